"""Put links to others' folders into state folders: nothing in these is written or removed."""

import shutil

import numpy as np
import pytest
from helpers import job_values, vary_each, write_job, write_volume

from beam_inference.cli.main import main

ARRAY = np.random.default_rng(0).integers(1, 256, (16, 32, 32), dtype=np.uint8)


def replace_by_link(folder, victim):
    """Put a link in a folder's place that leads to files of the same names."""
    shutil.copytree(folder, victim)
    for file in [path for path in victim.rglob("*") if path.is_file()]:
        file.write_text("mine")
    shutil.rmtree(folder)
    folder.symlink_to(victim)
    return {path: path.read_text() for path in victim.rglob("*") if path.is_file()}


@vary_each(state=["out/_beam_inference", "state"], seams=["recompute", "exchange"], level=[1, 2, 3])
def test_a_job_changes_nothing_through_a_link(state, seams, level, tmp_path, capsys):
    write_volume(tmp_path / "in", ARRAY)
    values = job_values("in", "out", inference={"seams": seams})
    if state == "state":
        values["job"] = {"state_path": "state"}
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 0
    (folder,) = (tmp_path / state / "receipts").glob("*/000000000")
    link = [folder.parent.parent, folder.parent, folder][level - 1]
    theirs = replace_by_link(link, tmp_path / "victim")
    assert theirs
    capsys.readouterr()
    assert main(["run", job]) in (1, 2)
    assert "is a link, and what it leads to would be changed" in "".join(capsys.readouterr())
    assert {path: path.read_text() for path in theirs} == theirs
    link.unlink()
    assert main(["run", job]) == 0


@pytest.mark.parametrize("link", ["volumes", "volumes/a"])
@pytest.mark.parametrize("words", [["run"], ["run", "--overwrite"], ["run", "--volume", "a"]])
def test_a_job_of_several_volumes_changes_nothing_through_a_link(link, words, tmp_path, capsys):
    for name in ("a", "b"):
        write_volume(tmp_path / "in" / name, ARRAY)
    (tmp_path / "cohort.csv").write_text("name,input\na,in/a\nb,in/b\n")
    values = job_values("unused", "out/{name}") | {"job": {"state_path": "state"}}
    del values["input"]
    job = str(write_job(tmp_path / "job.yaml", {**values, "volumes": "cohort.csv"}))
    assert main(["run", job]) == 0
    theirs = replace_by_link(tmp_path / "state" / link, tmp_path / "victim")
    capsys.readouterr()
    assert main([words[0], job, *words[1:]]) != 0
    assert "is a link, and what it leads to would be changed" in "".join(capsys.readouterr())
    assert {path: path.read_text() for path in theirs} == theirs
    assert {path for path in (tmp_path / "victim").rglob("*") if path.is_file()} == {*theirs}


def test_a_state_folder_may_be_a_link_of_the_users_own(tmp_path):
    write_volume(tmp_path / "in", ARRAY)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    values = job_values("in", "out") | {"job": {"state_path": "state"}}
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 0
    assert main(["verify", job]) == 0
    assert (tmp_path / "elsewhere" / "job.json").is_file()


@pytest.mark.parametrize("stage", ["label", "relabel"])
def test_records_of_components_are_not_removed_through_a_link(stage, tmp_path, capsys):
    write_volume(tmp_path / "in", ARRAY)
    words = ["components", str(tmp_path / "in"), str(tmp_path / "labels")]
    words += ["--threshold", "200"]
    assert main(words) == 0
    (folder,) = (tmp_path / "labels" / "_beam_inference" / "components").glob(f"*/{stage}")
    theirs = replace_by_link(folder, tmp_path / "victim")
    assert theirs
    capsys.readouterr()
    assert main(words) in (1, 2)
    assert "is a link, and what it leads to would be changed" in "".join(capsys.readouterr())
    assert {path: path.read_text() for path in theirs} == theirs


@pytest.mark.parametrize("flags", [[], ["--overwrite"]])
@pytest.mark.parametrize("state", ["begun", "new"])
def test_a_pyramid_changes_nothing_through_a_link(flags, state, tmp_path, capsys):
    write_volume(tmp_path / "in", ARRAY)
    words = ["pyramid", str(tmp_path / "in"), "--num-scales", "1"]
    if state == "begun":
        assert main(words) == 0
        (scale,) = (path for path in (tmp_path / "in").iterdir() if path.name.startswith("20_"))
        theirs = replace_by_link(scale, tmp_path / "victim")
    else:
        (tmp_path / "victim").mkdir()
        (tmp_path / "in" / "20_20_20").symlink_to(tmp_path / "victim")
        theirs = {}
    capsys.readouterr()
    assert main([*words, *flags]) != 0
    assert "is a link, and what it leads to would be changed" in "".join(capsys.readouterr())
    assert {path: path.read_text() for path in (tmp_path / "victim").iterdir()} == theirs


def test_levels_write_no_record_through_a_link(tmp_path, capsys):
    write_volume(tmp_path / "in", ARRAY)
    (tmp_path / "victim").mkdir()
    (tmp_path / "levels.json.parts").symlink_to(tmp_path / "victim")
    assert main(["levels", str(tmp_path / "in"), "--to", str(tmp_path / "levels.json")]) != 0
    assert "is a link, and what it leads to would be changed" in "".join(capsys.readouterr())
    assert not list((tmp_path / "victim").iterdir())
