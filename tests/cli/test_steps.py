"""Job files of several steps as a user runs them: one command, one order, one exit code."""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from helpers import job_values, read_volume, truncated, write_volume

from beam_inference.cli.main import main
from beam_inference.volumes.drafts import file_of_draft

LEVELS = "levels in --to levels.json"
OBJECTS = "components map objects --threshold 0.5 --chunk_shape 16x16x16"


@pytest.fixture
def write(tmp_path):
    """Write a volume and a job file with steps; returns its path."""
    rng = np.random.default_rng(0)
    write_volume(tmp_path / "in", rng.integers(1, 256, (16, 32, 96), dtype=np.uint8))

    def write_steps(**steps):
        path = tmp_path / "steps.yaml"
        path.write_text(yaml.safe_dump({"steps": steps}, sort_keys=False))
        return str(path)

    return write_steps


def job(source, output, /, **sections):
    return job_values(source, output, **{"model": {"normalize": "unit"}, **sections})


def printed(capsys, *words, expect=0):
    capsys.readouterr()
    assert main(list(words)) == expect
    return capsys.readouterr().out


def refused(capsys, *words):
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


def status(capsys, path):
    steps = json.loads(printed(capsys, "status", path, "--json"))["steps"]
    return {name: (each["complete"], each["waits_for"]) for name, each in steps.items()}


def test_steps_are_done_in_their_order_by_one_command(write, tmp_path, capsys):
    normal = {"normalize": {"levels": "levels.json"}}
    path = write(
        levels=LEVELS,
        map=job("in", "map", model=normal),
        coarse="pyramid map --num-scales 1 --method mean",
        again=job("map", "again", model={"normalize": {"scale": 2, "offset": 0}}),
    )
    waiting = dict.fromkeys(("map", "coarse", "again"), (False, "levels"))
    assert status(capsys, path) == {"levels": (False, None), **waiting}
    unverified = printed(capsys, "verify", path, "--deep", expect=1)
    assert "map: not complete\n" in unverified
    assert "coarse: not complete by its records" in unverified
    plan = json.loads(printed(capsys, "plan", path, "--json"))["steps"]
    assert plan["levels"]["size"] == {"chunks": 2}
    assert (plan["map"]["size"], plan["map"]["waits_for"]) == (None, "levels")
    assert "4 of 4 steps complete" in printed(capsys, "run", path)
    assert set(status(capsys, path).values()) == {(True, None)}
    verified = printed(capsys, "verify", path, "--deep")
    assert "again: complete\n" in verified
    assert "coarse: complete by its records; what a command has made is not read back" in verified
    assert "coarse: complete\n" in printed(capsys, "verify", path)
    doubled = 2 * read_volume(tmp_path / "map")
    np.testing.assert_allclose(read_volume(tmp_path / "again"), doubled, atol=1e-5)
    outcome = json.loads(printed(capsys, "run", path, "--json"))
    assert (outcome["complete"], len(outcome["steps"])) == (True, 4)
    assert "map: 3 chunks, " in printed(capsys, "plan", path)
    assert "complete" in printed(capsys, "status", path, "--step", "map")
    assert "1 of 1 steps" in printed(capsys, "status", path, "--step", "coarse")


RECORDS = [
    pytest.param("levels.json.parts", "levels", id="levels"),
    pytest.param("map", "coarse", id="pyramid"),
    pytest.param("objects", "objects", marks=pytest.mark.slow, id="components"),
]


@pytest.mark.parametrize(("folder", "step"), RECORDS)
def test_records_of_commands_that_cannot_be_believed_do_not_count(
    write, tmp_path, capsys, folder, step
):
    path = write(
        levels=LEVELS,
        map=job("in", "map", model={"normalize": {"levels": "levels.json"}}),
        coarse="pyramid map --num-scales 1 --method mean",
        objects=OBJECTS,
    )
    assert main(["run", path]) == 0
    for record in (tmp_path / folder).glob("_beam_inference/*/*/*/done/**/*.json"):
        text = record.read_bytes()
        for damaged in (b"", text[:-5], b"{}"):
            record.write_bytes(damaged)
            assert not status(capsys, path)[step][0]
            assert f"{step}: not complete" in printed(capsys, "verify", path, expect=1)
        record.write_bytes(text)
        assert set(status(capsys, path).values()) == {(True, None)}
        assert main(["verify", path, "--deep"]) == 0


@pytest.mark.slow
def test_nothing_follows_a_step_with_quarantined_chunks(write, tmp_path, capsys):
    path = write(map=job("in", "map"), objects=OBJECTS)
    block = min(file for file in (tmp_path / "in").rglob("*-*_*-*_*-*") if file.is_file())
    with truncated(block):
        out = printed(capsys, "run", path, expect=3)
        assert "step map is not complete; not begun: objects" in out
        assert not (tmp_path / "objects").exists()
        assert status(capsys, path)["objects"] == (False, "map")
        assert main(["status", path, "--watch"]) == 0  # nothing more is to come
        assert "quarantined: chunk" in printed(capsys, "verify", path, expect=1)
        values = json.loads(printed(capsys, "run", path, "--json", expect=3))
        assert values["steps"]["objects"] is None
        assert main(["run", path, "--step", "objects"]) == 0  # whoever names it wants it
        assert f"Remove what it has made (file://{tmp_path}/objects)" in refused(
            capsys, "run", path
        )


@pytest.mark.slow
def test_what_a_later_step_was_made_of_is_not_changed(write, tmp_path, capsys):
    path = write(map=job("in", "map"), objects=OBJECTS)
    assert main(["run", path]) == 0
    assert "--overwrite cannot be given for all steps" in refused(
        capsys, "run", path, "--overwrite"
    )
    redo = ("run", path, "--step", "map", "--chunks", "0", "--redo")
    for words in [("run", path, "--step", "map", "--overwrite"), redo]:
        assert "the later step objects has begun" in refused(capsys, *words)
    assert main(["run", path, "--step", "objects", "--overwrite"]) == 0
    assert "--chunks, --redo is for jobs" in refused(
        capsys, "run", path, "--step", "objects", *redo[4:]
    )


@pytest.mark.slow
def test_commands_on_one_job_ask_for_a_step(write, capsys):
    path = write(map=job("in", "map"), objects=OBJECTS)
    for words in [("tasks", path), ("prepare", path, "--shards", "2"), ("report", path)]:
        assert "name it with --step, one of map" in refused(capsys, *words)
    assert "--suggest, --calibrate and flags" in refused(capsys, "plan", path, "--suggest")
    assert "--recompute is for one job" in refused(capsys, "verify", path, "--recompute", "1")
    assert main(["run", path]) == 0
    assert printed(capsys, "tasks", path, "--step", "map").count("done") == 3
    assert "stopped where it runs" in printed(capsys, "cancel", path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("verify map", "verify is no command that a step can be"),
        ("component map o --threshold 1", "Did you mean components"),
        ("components map o", "one of the arguments --threshold --multilabel is required"),
        ("components --help", "it would only print its help"),
        ("components map o --threshold 1 --runner=DirectRunner", "--runner=DirectRunner cannot"),
        ("components map o --threshold 1 --overwrite", "--overwrite cannot be given for a step"),
        ("convert map map.tif", "map.tif is a single file"),
        ("report objects", "the name of an earlier step that is a job, here one of map"),
        ("levels later --to x.json", "put after before own"),
        ("levels in --mask later --to x.json", "put after before own"),
        ("components in map --threshold 1", "map and own both write"),
    ],
)
def test_a_step_that_cannot_be_is_refused_before_anything_is_done(
    write, tmp_path, capsys, line, message
):
    path = write(map=job("in", "map"), own=line, after=job("in", "later"))
    assert message in refused(capsys, "run", path)
    assert not (tmp_path / "map").exists()


def test_steps_are_not_staged(write, capsys):
    path = write(map=job("in", "map"), objects=OBJECTS)
    message = refused(capsys, "run", path, "--output_executable_path=x")
    assert "a pipeline that is staged" in message


def start(path):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def results(folder):
    """The files of volumes, of their tables and levels, but no records, metadata or drafts."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if "_beam_inference" not in file.parts
        and file.name not in ("info", "provenance", "steps.yaml")
        and file_of_draft(file.name) is None
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_in_every_step_it_resumes_to_the_same_bytes(tmp_path):
    def steps(folder):
        rng = np.random.default_rng(0)
        array = rng.integers(1, 256, (32, 64, 96), dtype=np.uint8)
        write_volume(folder / "in", array, block_shape=(16, 16, 16))
        small = {"patch_overlap": [0, 0, 0], "chunk_shape": [16, 16, 16]}
        both = {"inference": small, "output": {"dtype": "uint8", "value_range": [0, 1]}}
        values = {
            "levels": LEVELS,
            "map": job("in", "map", model={"normalize": {"levels": "levels.json"}}, **both),
            "again": job("map", "again", mask={"path": "map"}, **both),
            "objects": "components again objects --threshold 100 --chunk_shape 16x16x16",
            "coarse": "pyramid objects --num-scales 2",
        }
        (folder / "steps.yaml").write_text(yaml.safe_dump({"steps": values}, sort_keys=False))
        return str(folder / "steps.yaml")

    folder = tmp_path / "work"  # of one name, which levels files have in them
    assert main(["run", steps(folder)]) == 0
    undisturbed = results(folder)
    shutil.rmtree(folder)
    path = steps(folder)
    records = {
        "levels": "levels.json.parts/_beam_inference/levels/*/*/done",
        "map": "map/_beam_inference/receipts",
        "again": "again/_beam_inference/receipts",
        "objects": "objects/_beam_inference/components/*/*/done",
        "coarse": "objects/_beam_inference/pyramid/*/*/done",
    }
    kept = {}
    for step, pattern in records.items():
        process = start(path)
        while not any(file for each in folder.glob(pattern) for file in each.rglob("*.json")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        assert f"step {step} (" in out
        assert "steps complete" not in out
        found = folder.glob("*/_beam_inference/receipts/**/*.json")
        now = {file: file.read_bytes() for file in found}
        assert now.items() >= kept.items(), "nothing is done twice"
        kept = now
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert results(folder) == undisturbed
