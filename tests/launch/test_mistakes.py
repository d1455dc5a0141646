"""Test that mistakes of users give one message and exit code 2, and touch nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import DATAFLOW, job_values, read_volume, toy, write_job, write_volume

from beam_inference.cli.main import main


def hidden_blocks(volume):
    for block in list(volume.rglob("*-*_*")):
        block.rename(block.with_name(block.name + ".bz2"))


# What a user can get wrong: sections of the job, what to do to the volume before, more arguments,
# and the message.
MISTAKES = {
    "unknown key": (
        {"inference": {"patch_shap": [1, 1, 1]}},
        None,
        [],
        "did you mean 'patch_shape'",
    ),
    "missing section": ({"model": None}, None, [], "model: missing"),
    "wrong type": ({"inference": {"batch_size": "four"}}, None, [], "inference.batch_size"),
    "overlap too large": (
        {"inference": {"patch_overlap": [8, 0, 0]}},
        None,
        [],
        "must be smaller than patch_shape",
    ),
    "input absent": ({"input": {"path": "nowhere"}}, None, [], "does not exist"),
    "input is no volume": ({}, lambda v: (v / "info").unlink(), [], "no volume at"),
    "input damaged": ({}, lambda v: (v / "info").write_text("{"), [], "not valid JSON"),
    "compressed blocks": ({}, hidden_blocks, [], "would read every voxel as zero"),
    "scale absent": ({"input": {"scale": 2}}, None, [], "has the scales 0 … 0"),
    "channel absent": ({"input": {"channel": 4}}, None, [], "has the channels 0 … 0"),
    "channels differ": (
        {"model": {"input_channels": 2, "output_channels": 2}},
        None,
        [],
        "has 1 channels",
    ),
    "fill value out of range": (
        {"input": {"fill": "constant", "fill_value": 300}},
        None,
        [],
        "not a value of the volume",
    ),
    "roi outside": (
        {"roi": {"start": [0, 0, 0], "stop": [4, 4, 4]}},
        None,
        [],
        "The part inside is",
    ),
    "roi empty": (
        {"roi": {"start": [4, 4, 4], "stop": [4, 5, 5]}},
        None,
        [],
        "must lie beyond start",
    ),
    "chunk no multiple of block": (
        {"inference": {"chunk_shape": [20, 32, 32]}},
        None,
        [],
        "Nearest on z: 16 or 32",
    ),
    "roi cuts blocks": (
        {
            "roi": {"start": [5, -5, 2], "stop": [21, 27, 52]},
            "output": {"bounds": {"start": [3, -5, 2], "stop": [43, 65, 52]}},
        },
        None,
        [],
        "Nearest starts on z: 3 or 19",
    ),
    "zarr cannot start below zero": (
        {"output": {"format": "zarr3"}},
        None,
        [],
        "do not start at 0, as zarr3 volumes do",
    ),
    "output is the input": ({"output": {"path": "in"}}, None, [], "is the input"),
    "output over http": (
        {"output": {"path": "http://localhost:1/v"}},
        None,
        [],
        "can only be read from",
    ),
    "output with a bar": ({"output": {"path": "out|b"}}, None, [], "has | in it"),
    "output not writable": ({"output": {"path": "/proc/nowhere/out"}}, None, [], "cannot"),
    "output scheme unknown": (
        {"output": {"path": "ftp://host/out"}},
        None,
        [],
        "unsupported URL scheme",
    ),
    "voxel size": (
        {"model": {"voxel_size_nm": [40, 4, 4]}},
        None,
        [],
        "No scale of the input fits",
    ),
    "unit of floats": ({"model": {"normalize": "unity"}}, None, [], "is not one of none, unit"),
    "model absent": ({"model": {"path": "nope.pt"}}, None, [], "there is no file"),
    "module absent": ({"model": {"path": "nope.nope:net"}}, None, [], "there is no Python module"),
    "factory fails": ({"model": toy("raises")}, None, [], "the factory is broken"),
    "model hash": (
        {"model": toy("conv", output_channels=2, sha256="0" * 64)},
        None,
        [],
        "changed or damaged",
    ),
    "output channels": (
        {"model": toy("conv", output_channels=5)},
        None,
        [],
        "returns an array of shape",
    ),
    "network returns a tuple": ({"model": toy("pair")}, None, [], "returns a tuple"),
    "network returns nan": ({"model": toy("not_a_number")}, None, [], "NaN or infinite"),
    "network fails": (
        {"model": toy("flat", output_channels=2)},
        None,
        [],
        "fails on an input of shape",
    ),
    "value range needed": ({"output": {"dtype": "uint8"}}, None, [], "value_range is needed"),
    "unknown flag": ({}, None, ["--direct_num_worker=2"], "did you mean --direct_num_workers"),
    "bad flag value": ({}, None, ["--direct_num_workers=two"], "invalid int value"),
    "bad override": ({}, None, ["--set", "inference"], "takes key.key=value"),
    "chunks file absent": ({}, None, ["--chunks", "/nowhere/chunks"], "does not exist"),
    "state not writable": ({"job": {"state_path": "in/info/state"}}, None, [], "cannot"),
    "negative workers": ({}, None, ["--direct_num_workers=-1"], "must be 0"),
    "no endpoint": ({}, None, ["--runner=PortableRunner"], "needs --job_endpoint"),
    "batch norm that is not there": (
        {
            "model": toy("conv", output_channels=2, batch_norm="batch"),
            "inference": {"batch_size": 1},
        },
        None,
        [],
        "no BatchNorm layer",
    ),
    "random weights": ({"model": toy("random")}, None, [], "other parameters at every call"),
    "chunks and overwrite": ({}, None, ["--chunks", "c", "--overwrite"], "give one of them"),
    "nothing to redo": ({}, None, ["--redo"], "name them with --chunks"),
    "no such chunk": ({}, None, ["--chunks", "3,18"], "there is no chunk 18, only 0 … 17"),
    "a box elsewhere": ({}, None, ["--chunks", "0:1,900:901,0:1"], "touches no chunk"),
    "local paths on dataflow": ({}, None, DATAFLOW, "which remote workers cannot reach"),
    "dataflow without an image": (
        {},
        None,
        ["--runner=DataflowRunner"],
        "needs --sdk_container_image",
    ),
    "unknown runner": ({}, None, ["--runner=NoSuchRunner"], "unknown runner"),
}
if not torch.cuda.is_available():
    MISTAKES["cuda absent"] = (
        {"model": toy("same"), "inference": {"device": "cuda"}},
        None,
        [],
        "sees no CUDA device",
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_clear_message_exit_code_2_and_touches_nothing(
    name, job, capfd, tmp_path, volume_in
):
    sections, damage, arguments, message = MISTAKES[name]
    if damage:
        damage(volume_in)
    before = sorted(tmp_path.rglob("*"))
    path = job(**sections)
    assert main(["run", path, *arguments]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert sorted(p for p in tmp_path.rglob("*") if p != Path(path)) == before


def test_there_are_at_least_25_such_cases():
    assert len(MISTAKES) >= 25


@pytest.mark.parametrize(
    ("read", "written"),
    [("in", "in"), ("in/0", "in"), ("in", "in/0"), ("in", "in/"), ("in/0", "in/0")],
)
def test_an_image_of_several_arrays_is_not_written_over(tmp_path, capsys, read, written):
    array = np.random.default_rng(0).integers(0, 256, (16, 32, 32), dtype=np.uint8)
    write_volume(tmp_path / "in", array, format="ome_zarr", block_shape=(16, 16, 16))
    output = {
        "dtype": "uint8",
        "value_range": [0, 1],
        "format": "ome_zarr" if written.rstrip("/") == "in" else "zarr3",
    }
    values = job_values(tmp_path / read, f"{tmp_path}/{written}", output=output)
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 2
    assert "is the input" in capsys.readouterr().err
    np.testing.assert_array_equal(read_volume(tmp_path / "in")[0], array)
