"""Jobs of several volumes as a user runs them: one plan, one run, one exit code."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
import yaml
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.job.state import State

SHAPES = {"a": (16, 32, 40), "b": (24, 20, 33), "c": (9, 50, 18)}


@pytest.fixture
def write(tmp_path):
    """Write volumes and a job file that names them in a table; returns its path."""

    def write_all(shapes=SHAPES, **sections):
        rng = np.random.default_rng(len(shapes))
        for name, shape in shapes.items():
            if not (tmp_path / "in" / name).exists():
                write_volume(tmp_path / "in" / name, rng.integers(0, 256, shape, dtype=np.uint8))
        with open(tmp_path / "cohort.csv", "w") as file:
            csv.writer(file).writerows([["name", "input"], *([n, f"in/{n}"] for n in shapes)])
        sections = {"job": {"state_path": "state"}} | sections
        values = job_values("unused", "out/{name}", **sections)
        del values["input"]
        return str(write_job(tmp_path / "job.yaml", {**values, "volumes": "cohort.csv"}))

    return write_all


def printed(capsys, *words, expect=0):
    capsys.readouterr()
    assert main(list(words)) == expect
    return capsys.readouterr().out


def fingerprints(tmp_path):
    jobs = {n: State(f"file://{tmp_path}/state/volumes/{n}").load_job() for n in SHAPES}
    return {name: job.fingerprint for name, job in jobs.items()}


@pytest.mark.parametrize(
    "strategy", ["recompute", pytest.param("exchange", marks=pytest.mark.slow)]
)
def test_every_volume_has_the_bytes_of_a_job_of_its_own(write, tmp_path, capsys, strategy):
    path = write(inference={"strategy": strategy, "chunk_shape": [16, 16, 16]})
    assert "3 volumes complete" in printed(capsys, "run", path)
    for name in SHAPES:
        values = job_values(tmp_path / "in" / name, tmp_path / "alone" / name)
        assert main(["run", str(write_job(tmp_path / f"{name}.yaml", values))]) == 0
        np.testing.assert_array_equal(
            read_volume(tmp_path / "out" / name), read_volume(tmp_path / "alone" / name)
        )
    assert printed(capsys, "verify", path, "--deep").endswith("as it was written\n")
    assert "3 of 3 volumes complete" in printed(capsys, "run", path)


def test_a_volume_that_cannot_be_opened_is_put_aside_by_name(write, tmp_path, capsys):
    path = write()
    shutil.rmtree(tmp_path / "in" / "b")
    assert "b: " in (plan := printed(capsys, "plan", path)), plan
    out = printed(capsys, "run", path, expect=3)
    assert "2 of 3 volumes complete" in out
    assert "quarantined: volume b: " in out
    assert "--set" not in out
    status = json.loads(printed(capsys, "status", path, "--json"))
    assert list(status["quarantined_volumes"]) == ["b"]
    assert status["missing"] == 0
    verified = json.loads(printed(capsys, "verify", path, "--json", expect=1))
    assert (verified["complete"], verified["volumes"]["b"]) == (False, None)
    assert json.loads(printed(capsys, "run", path, "--json", expect=3))["done"] == 4
    assert main(["run", path, "--set", "job.max_failed_chunks=0"]) == 1
    write()
    assert "3 of 3 volumes complete" in printed(capsys, "run", path)
    assert not json.loads(printed(capsys, "status", path, "--json"))["quarantined_volumes"]


def test_what_run_has_put_aside_is_complete_for_no_command(write, tmp_path, capsys):
    """Its output of an earlier launch was complete for verify, with exit code 0."""
    path = write()
    assert main(["run", path]) == 0
    shutil.rmtree(tmp_path / "in" / "b")
    assert main(["run", path]) == 3
    assert "2 of 3 volumes complete" in printed(capsys, "status", path)
    found = printed(capsys, "verify", path, "--deep", expect=1)
    assert "2 of 3 volumes complete" in found
    assert "quarantined: volume b: " in found
    assert found.endswith("not complete\n")


def make_pipe(tmp_path):
    """A record that cannot be read."""
    record = tmp_path / "state/volumes/b/job.json"
    record.unlink()
    os.mkfifo(record)


def tear_record(tmp_path):
    """A record that was cut off."""
    (tmp_path / "state/volumes/b/job.json").write_text("{")


def put_another_output(tmp_path):
    """An output that names another job."""
    shutil.rmtree(tmp_path / "out/b")
    shutil.copytree(tmp_path / "out/a", tmp_path / "out/b")


@pytest.mark.parametrize("damage", [make_pipe, tear_record, put_another_output])
def test_a_damaged_volume_hides_no_other(write, tmp_path, capsys, damage):
    path = write()
    assert main(["run", path]) == 0
    damage(tmp_path)
    for command in ("status", "verify"):
        found = printed(capsys, command, path, expect=1)
        assert "2 of 3 volumes complete" in found
        assert "wrong: volume b: " in found
        values = json.loads(printed(capsys, command, path, "--json", expect=1))
        assert list(values["wrong_volumes"]) == ["b"]
    page = str(tmp_path / "page.html")
    assert " of 3 volumes complete" in printed(capsys, "report", path, "--to", page)
    assert main(["status", path, "--watch"]) == 1  # it waits for nothing


def test_commands_name_the_volume_that_they_cannot_read(write, tmp_path, capsys):
    path = write()
    assert main(["run", path]) == 0
    tear_record(tmp_path)
    assert "wrong: volume b: " in printed(capsys, "cancel", path, expect=1)
    assert main(["tasks", path]) == 2
    assert "volume b: " in capsys.readouterr().err


def test_a_new_or_changed_row_touches_no_other(write, tmp_path, capsys):
    path = write({name: SHAPES[name] for name in "ab"})
    assert main(["run", path]) == 0
    before = read_volume(tmp_path / "out" / "a")
    path = write(SHAPES)
    outcome = json.loads(printed(capsys, "run", path, "--json"))
    by_launch = {name: each["done_by_this_launch"] for name, each in outcome["volumes"].items()}
    assert (by_launch["a"], by_launch["b"], by_launch["c"] > 0) == (0, 0, True)
    all_before = fingerprints(tmp_path)
    text = (tmp_path / "cohort.csv").read_text().replace("input", "input,roi")
    text = text.replace("in/b", 'in/b,"0:16,0:16,0:32"').replace("in/a", "in/a,")
    (tmp_path / "cohort.csv").write_text(text.replace("in/c", "in/c,"))
    out = printed(capsys, "run", path, expect=3)
    assert "2 of 3 volumes complete" in out
    assert "volume b: " in out
    assert "belongs to another job" in out
    assert fingerprints(tmp_path) == all_before
    assert "2 of 3 volumes complete" in printed(capsys, "status", path)
    np.testing.assert_array_equal(read_volume(tmp_path / "out" / "a"), before)


def test_commands_take_one_volume_or_all(write, tmp_path, capsys):
    path = write()
    plan = json.loads(printed(capsys, "plan", path, "--json"))
    assert set(plan["volumes"]) == set(SHAPES)
    lines = printed(capsys, "plan", path).splitlines()
    assert [line for line in lines if line.startswith("volume c: ") and ", 2 chunks, 28 p" in line]
    assert main(["status", path]) == 2
    assert "holds no volume of this job" in capsys.readouterr().err
    assert "complete" in printed(capsys, "run", path, "--volume", "a")
    assert "volume b: not begun" in printed(capsys, "status", path)
    assert main(["run", path]) == 0
    tasks = list(csv.DictReader(printed(capsys, "tasks", path, "--csv").splitlines()))
    assert {task["volume"] for task in tasks} == set(SHAPES)
    assert {task["state"] for task in tasks} == {"done"}
    one = printed(capsys, "tasks", path, "--volume", "a").splitlines()
    assert len(one) == sum(task["volume"] == "a" for task in tasks)
    assert printed(capsys, "tasks", path).startswith("a 0 0:16,0:32,0:32 done\n")
    assert json.loads(printed(capsys, "tasks", path, "--json"))[0]["volume"] == "a"
    assert "no launch of this job is under way" in printed(capsys, "cancel", path)
    assert main(["mosaic", path]) == 2
    assert "name it with --volume, one of a, b, c" in capsys.readouterr().err
    assert main(["run", path, "--chunks", "0"]) == 2
    assert main(["verify", path, "--recompute", "0.5"]) == 2
    assert main(["plan", path, "--suggest"]) == 2
    assert main(["run", path, "--template_location", "x"]) == 2
    assert "verified" not in printed(capsys, "verify", path, "--volume", "c", "--recompute", "1")


def test_what_all_volumes_share_is_refused_once(write, tmp_path, capsys):
    path = write(model={"path": "absent.pt"})
    assert main(["run", path]) == 2
    assert not (tmp_path / "out").exists()
    path = write()
    assert main(["run", path]) == 0
    path = write(model={"activation": "sigmoid"})
    assert main(["run", path]) == 2
    assert "belongs to another job" in capsys.readouterr().err
    assert main(["run", path, "--overwrite"]) == 0


def test_volumes_are_found_by_a_pattern_or_listed(write, tmp_path, capsys):
    path = write()
    values = yaml.safe_load((tmp_path / "job.yaml").read_text())
    write_job(tmp_path / "job.yaml", {**values, "volumes": "in/[ab]"})
    assert set(json.loads(printed(capsys, "plan", path, "--json"))["volumes"]) == {"a", "b"}
    write_job(tmp_path / "job.yaml", {**values, "volumes": ["in/c"]})
    assert set(json.loads(printed(capsys, "plan", path, "--json"))["volumes"]) == {"c"}
    for volumes, message in [
        ("nothing/*", "nothing is called"),
        ("gs://bucket/*", "neither a CSV file"),
        ("absent.csv", "cannot read"),
        (3, "expected a list, a CSV file, or a pattern"),
    ]:
        write_job(tmp_path / "job.yaml", {**values, "volumes": volumes})
        assert main(["plan", path]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cohort_of_real_sub_volumes(fib25, tmp_path, capsys):
    whole = read_volume(fib25)[0]
    rng = np.random.default_rng(0)
    for number in range(22):
        shape = rng.integers(24, 72, 3)
        start = [
            int(rng.integers(0, max(1, n - m))) for n, m in zip(whole.shape, shape, strict=True)
        ]
        box = tuple(slice(a, a + int(b)) for a, b in zip(start, shape, strict=True))
        write_volume(tmp_path / "in" / f"v{number:02}", whole[box])
    added = tmp_path / "in" / "v21"
    added.rename(tmp_path / "later")
    damaged = tmp_path / "in" / "v07" / "info"
    good = damaged.read_text()
    damaged.write_text(good[:20])
    values = job_values("unused", "out/{name}", job={"state_path": "state"})
    del values["input"]
    path = str(write_job(tmp_path / "job.yaml", {**values, "volumes": "in/*"}))
    out = printed(capsys, "run", path, expect=3)
    assert "20 of 21 volumes complete" in out
    assert "volume v07: " in out
    damaged.write_text(good)
    (tmp_path / "later").rename(added)
    assert "22 of 22 volumes complete" in printed(capsys, "run", path)
    assert main(["verify", path, "--deep"]) == 0
    for number in range(22):
        name = f"v{number:02}"
        alone = job_values(tmp_path / "in" / name, tmp_path / "alone" / name)
        assert main(["run", str(write_job(tmp_path / "alone.yaml", alone))]) == 0
        np.testing.assert_array_equal(
            read_volume(tmp_path / "out" / name), read_volume(tmp_path / "alone" / name)
        )
