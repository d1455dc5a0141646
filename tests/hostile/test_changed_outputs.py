"""Outputs that were changed or emptied since they were complete: they are not called so again."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest
from helpers import job_values, toy, vary_each, write_job, write_volume

from beam_inference.cli.main import main

ARRAY = np.random.default_rng(0).integers(1, 256, (16, 20, 24)).astype(np.uint8)
BLOCKS = (8, 8, 8)


@pytest.mark.parametrize("what", ["source", "target", "nothing"])
def test_a_conversion(tmp_path, capsys, refused, what):
    write_volume(tmp_path / "v", ARRAY)
    words = ["convert", str(tmp_path / "v"), str(tmp_path / "o"), "--format=zarr3"]
    assert main(words) == 0
    if what == "source":
        shutil.rmtree(tmp_path / "v")
        write_volume(tmp_path / "v", 255 - ARRAY)
    elif what == "target":
        shutil.rmtree(tmp_path / "o" / "c")
    if what == "nothing":
        assert main(words) == 0
    else:
        capsys.readouterr()
        assert "does not hold what its source gives" in refused(words)
        assert main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize("what", ["base", "scale", "nothing"])
def test_a_pyramid(tmp_path, capsys, refused, what):
    write_volume(tmp_path / "v", ARRAY, block_shape=BLOCKS, voxel_size_nm=(10, 10, 10))
    words = ["pyramid", str(tmp_path / "v"), "--num-scales=1"]
    assert main(words) == 0
    if what == "scale":
        shutil.rmtree(tmp_path / "v" / "20_20_20")
    elif what == "base":
        for block in (tmp_path / "v" / "10_10_10").iterdir():
            block.unlink()
    if what == "nothing":
        assert main(words) == 0
    else:
        capsys.readouterr()
        assert "does not hold what its source gives" in refused(words)


@pytest.fixture
def components(tmp_path, capsys):
    write_volume(tmp_path / "v", ARRAY)
    words = ["components", str(tmp_path / "v"), str(tmp_path / "o"), "--threshold=200"]
    assert main(words) == 0
    capsys.readouterr()
    return words


def test_components_whose_volume_is_gone(tmp_path, components, refused):
    (scale,) = json.loads((tmp_path / "o" / "info").read_text())["scales"]
    for block in (tmp_path / "o" / scale["key"]).iterdir():
        block.unlink()
    assert "does not hold object" in refused(components)


TABLES = ["", "torn,", "{}", "[]", '{"objects": -5}', '{"objects": NaN}', "[" * 10_000]


@pytest.mark.parametrize("name", ["summary.json", "000000.csv"])
def test_components_whose_table_was_changed(tmp_path, components, refused, name):
    file = tmp_path / "o" / "components" / name
    for content in TABLES:
        file.write_text(content)
        refused(components)
    file.unlink()
    os.mkfifo(file)
    refused(components)


@pytest.mark.parametrize("listed", [[1] * 3, [True], ["1"], "12", {"1": 2}, [2, 1], [], [None]])
def test_thresholds_that_segment_did_not_write(tmp_path, refused, listed):
    write_volume(tmp_path / "labels", ARRAY.astype(np.uint32))
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "thresholds.json").write_text(json.dumps({"thresholds": listed}))
    told = refused(["evaluate", tmp_path / "series", tmp_path / "labels"])
    assert "does not list thresholds" in told


@pytest.mark.parametrize("ome", [[1], "x", {"well": []}])
def test_a_plate_of_many_wells_that_are_not_there(tmp_path, refused, ome):
    plate = {"wells": [{"path": f"A/{number}"} for number in range(20_000)]}
    (tmp_path / "plate" / "A" / "0").mkdir(parents=True)
    for folder, attributes in (("", {"plate": plate}), ("A/0", ome)):
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": attributes}}
        (tmp_path / "plate" / folder / "zarr.json").write_text(json.dumps(group))
    refused(["convert", tmp_path / "plate", tmp_path / "o"])


@pytest.fixture
def job_of_two_outputs(tmp_path, capsys):
    """A job that is complete, with an output and a second one, and its state apart or not."""

    def make(**job):
        write_volume(tmp_path / "in", ARRAY)
        values = job_values(
            tmp_path / "in", tmp_path / "out", model=toy("conv", output_channels=2), job=job
        )
        values["outputs"] = {"second": {"path": str(tmp_path / "second"), "dtype": "float32"}}
        path = str(write_job(tmp_path / "job.yaml", values))
        assert main(["run", path]) == 0
        assert main(["status", path]) == main(["verify", path]) == 0
        capsys.readouterr()
        return path

    return make


@vary_each(
    apart=[False, True], output=["out", "second"], how=["removed", "converted", "of another job"]
)
def test_an_output_that_is_another_one_by_now(
    job_of_two_outputs, tmp_path, refused, how, output, apart
):
    job = job_of_two_outputs(**({"state_path": str(tmp_path / "state")} if apart else {}))
    folder = tmp_path / output
    if how == "removed":
        shutil.rmtree(folder)
    elif how == "converted":
        words = ["convert", str(tmp_path / "in"), str(folder), "--voxel-size=8,8,8"]
        assert main([*words, "--overwrite"]) == 0
    else:
        values = job_values(tmp_path / "in", folder, model=toy("conv", output_channels=2))
        other = str(write_job(tmp_path / "other.yaml", values))
        assert main(["run", other, "--overwrite"]) == 0
    if output == "out" and not apart:  # the state went with it
        expected = "nothing to|another job|not belong|belongs"
    else:
        expected = "does not name this job with its state|belongs to another job"
    for command in (["status", job], ["verify", job]):
        assert re.search(expected, refused(command))


def _move(image):
    image["datasets"][0]["coordinateTransformations"].append(
        {"type": "translation", "translation": [160.0, 0.0, 0.0]}
    )


def _stretch(image):
    image["datasets"][0]["coordinateTransformations"][0]["scale"][0] = 20.0


def _turn(image):
    image["axes"].reverse()


@pytest.mark.parametrize("change", [_move, _stretch, _turn])
def test_the_group_of_an_ome_zarr_output(tmp_path, capsys, refused, change):
    url = write_volume(tmp_path / "in", ARRAY, block_shape=BLOCKS)
    values = job_values(url, tmp_path / "out")
    values["output"] |= {"format": "ome_zarr"}
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 0
    group = tmp_path / "out" / "zarr.json"
    metadata = json.loads(group.read_text())
    change(metadata["attributes"]["ome"]["multiscales"][0])
    group.write_text(json.dumps(metadata))
    capsys.readouterr()
    for words in (["run", path], ["verify", path, "--deep"]):
        message = refused(words)
        assert "differs from the job: the group's" in message or "bounds [16, 0, 0 to" in message


@pytest.mark.parametrize("again", ["redo", "overwrite", "nothing"])
def test_what_is_made_of_chunks_that_are_done_again(tmp_path, capsys, refused, again):
    """Whether it has changed is not seen where it is none of the few chunks that bear witness."""
    write_volume(tmp_path / "in", ARRAY, block_shape=BLOCKS)
    path = str(write_job(tmp_path / "job.yaml", job_values(tmp_path / "in", tmp_path / "map")))
    assert main(["run", path]) == 0
    made = [
        ["components", str(tmp_path / "map"), str(tmp_path / "objects"), "--threshold=1"],
        ["convert", str(tmp_path / "map"), str(tmp_path / "copy"), "--format=zarr3"],
    ]
    for words in made:
        assert main(words) == 0
    if again == "redo":
        assert main(["run", path, "--chunks=0", "--redo"]) == 0
    elif again == "overwrite":
        assert main(["run", path, "--overwrite"]) == 0
    else:
        assert main(["run", path]) == 0
    capsys.readouterr()
    for words in made:
        if again == "nothing":
            assert main(words) == 0
        else:
            assert "--overwrite" in refused(words)
            assert main([*words, "--overwrite"]) == 0
