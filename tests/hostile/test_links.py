"""Links and folders in odd places: nothing is written or removed but what is ours."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main

ARRAY = np.random.default_rng(0).integers(1, 256, (16, 20, 24)).astype(np.uint8)
BLOCKS = (8, 8, 8)


@pytest.fixture
def victim(tmp_path):
    """A folder of somebody else, with files in folders of several depths."""
    folder = tmp_path / "victim"
    for name in ("z", "k/x", "receipts/0/y"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
    yield folder
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"z", "k/x", "receipts/0/y"}


def refused_with_link(words, capsys):
    assert main([str(word) for word in words]) in (1, 2)
    assert "link" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "v", "v"],
        ["components", "image", "v", "--threshold=9"],
        ["pyramid", "v", "--method=mode"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("place", ["{kind}", "{kind}_scratch/0123456789abcdef"])
def test_a_link_in_a_state_folder(tmp_path, victim, capsys, monkeypatch, command, place):
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "image", ARRAY)
    write_volume(tmp_path / "v", ARRAY.astype(np.uint32))
    link = tmp_path / "v" / "_beam_inference" / place.format(kind=command[0])
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    refused_with_link(command, capsys)


@pytest.mark.parametrize("part", ["receipts", "claims", "launches", "seams/0123456789abcdef"])
def test_a_link_in_the_state_folder_of_a_job(tmp_path, victim, capsys, part):
    write_volume(tmp_path / "v", ARRAY)
    job = write_job(tmp_path / "job.yaml", job_values(tmp_path / "v", tmp_path / "out"))
    link = tmp_path / "out" / "_beam_inference" / part
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    for further in ([], ["--overwrite"]):
        refused_with_link(["run", job, *further], capsys)
    refused_with_link(["clean", job], capsys)


def test_a_link_to_a_folder_of_receipts(tmp_path, victim, capsys):
    write_volume(tmp_path / "v", ARRAY)
    job = write_job(tmp_path / "job.yaml", job_values(tmp_path / "v", tmp_path / "out"))
    assert main(["run", str(job)]) == 0
    (receipts,) = (tmp_path / "out/_beam_inference/receipts").glob("*/000000000")
    shutil.rmtree(receipts)
    receipts.symlink_to(victim)
    refused_with_link(["run", job], capsys)


def test_a_link_where_levels_keep_their_counts(tmp_path, victim, capsys):
    write_volume(tmp_path / "v", ARRAY)
    (tmp_path / "levels.json.parts").mkdir()
    (tmp_path / "levels.json.parts" / "counts").symlink_to(victim)
    refused_with_link(["levels", tmp_path / "v", "--to", tmp_path / "levels.json"], capsys)


def test_a_link_in_place_of_a_guard(tmp_path, victim, capsys):
    write_volume(tmp_path / "v", ARRAY, block_shape=BLOCKS)
    (tmp_path / "v" / "info.guard").symlink_to(victim / "created")
    refused_with_link(["pyramid", tmp_path / "v", "--num-scales=1"], capsys)


@pytest.mark.parametrize("name", ["o.nii.gz", "slices"])
def test_a_link_in_place_of_a_file_that_is_written_meanwhile(tmp_path, victim, name):
    write_volume(tmp_path / "v", ARRAY)
    (tmp_path / f".{name}.array").symlink_to(victim / "z")
    format = ["--format=png"] if name == "slices" else []
    target = tmp_path / name
    assert main(["convert", str(tmp_path / "v"), str(target), "--drop=voxel-size", *format]) == 0
    assert (victim / "z").read_text() == "precious"
    assert not os.path.lexists(tmp_path / f".{name}.array")


@pytest.mark.parametrize(
    ("base", "coarser"),
    [("s/base", "s"), ("20_20_20/base", None), ("20_20_20", "mesh"), ("b", "b/c")],
)
def test_a_coarser_scale_in_whose_folder_the_base_lies(tmp_path, base, coarser):
    volume = tmp_path / "v"
    write_volume(volume, ARRAY, block_shape=BLOCKS, voxel_size_nm=(10, 10, 10))
    info = json.loads((volume / "info").read_text())
    (scale,) = info["scales"]
    moved = tmp_path / "moved"
    (volume / scale["key"]).rename(moved)
    (volume / base).parent.mkdir(exist_ok=True)
    moved.rename(volume / base)
    scale["key"] = base
    info["mesh"] = "mesh"
    (volume / "mesh").mkdir()
    (volume / "mesh" / "precious").touch()
    if coarser is not None:
        info["scales"].append(
            {**scale, "resolution": [20, 20, 20], "size": [12, 10, 8], "key": coarser}
        )
    (volume / "info").write_text(json.dumps(info))
    assert main(["pyramid", str(volume), "--num-scales=1", "--overwrite"]) in (0, 1, 2)
    np.testing.assert_array_equal(read_volume(volume)[0], ARRAY)
    assert (volume / "mesh" / "precious").exists()


def test_a_coarser_dataset_in_the_folder_of_the_base(tmp_path):
    volume = Path(tmp_path / "v")
    write_volume(volume, ARRAY, format="ome_zarr", block_shape=BLOCKS, voxel_size_nm=(10, 10, 10))
    group = json.loads((volume / "zarr.json").read_text())
    datasets = group["attributes"]["ome"]["multiscales"][0]["datasets"]
    coarser = json.loads(json.dumps(datasets[0]))
    coarser["path"] += "/c"
    coarser["coordinateTransformations"][0]["scale"] = [20.0, 20.0, 20.0]
    datasets.append(coarser)
    (volume / "zarr.json").write_text(json.dumps(group))
    assert main(["pyramid", str(volume), "--num-scales=1", "--overwrite"]) == 0
    np.testing.assert_array_equal(read_volume(volume)[0], ARRAY)
