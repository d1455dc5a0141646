"""``--json`` of the commands on volumes: one object on standard output, and nothing else."""

import json

import numpy as np
import pytest
from helpers import truncated, write_volume

from beam_inference.cli.main import main


@pytest.fixture
def em(tmp_path):
    rng = np.random.default_rng(0)
    write_volume(tmp_path / "em", rng.integers(1, 255, (32, 32, 64), dtype=np.uint8))
    return str(tmp_path / "em")


@pytest.fixture
def told(capfd):
    """The exit code of a command, and the object that is all of its standard output."""

    def run(*words: object) -> tuple[int, dict]:
        capfd.readouterr()
        code = main([*map(str, words), "--json"])
        return code, json.loads(capfd.readouterr().out)

    return run


COMMON = {"complete", "chunks", "done", "failures", "seconds", "error", "output"}


def test_a_conversion_into_blocks(em, tmp_path, told):
    code, values = told("convert", em, tmp_path / "out", "--block_shape", "32,32,32")
    assert (code, values["complete"], values["format"]) == (0, True, "precomputed")
    assert values["output"] == str(tmp_path / "out")
    assert values["bounds"] == {"start": [0, 0, 0], "stop": [32, 32, 64]}
    assert values["done"] == values["chunks"] > 0
    assert set(values) == COMMON | {"format", "bounds"}


def test_a_conversion_into_a_file_has_no_chunks(em, tmp_path, told):
    code, values = told("convert", em, tmp_path / "em.npy", "--drop", "voxel-size")
    assert (code, values["complete"], values["format"]) == (0, True, "npy")
    assert values["chunks"] is None
    assert np.load(tmp_path / "em.npy").shape == (32, 32, 64)


def test_levels(em, tmp_path, told):
    code, values = told("levels", em, "--to", tmp_path / "levels.json")
    assert (code, values["complete"]) == (0, True)
    assert values["output"] == f"file://{tmp_path}/levels.json"
    assert set(values) == COMMON


@pytest.mark.slow
def test_components_and_their_scales(em, tmp_path, told):
    code, values = told(
        *("components", em, tmp_path / "out", "--threshold", 128, "--pyramid"),
        *("--chunk_shape", "32x32x32", "--block_shape", "16x16x16"),
    )
    assert (code, values["complete"], values["warning"]) == (0, True, None)
    assert values["objects"] > 1
    assert values["table"].startswith(values["output"])
    assert values["pyramid"]["complete"]
    assert values["pyramid"]["scales"] == 2
    assert set(values) == COMMON | {"table", "objects", "warning", "pyramid"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_segments(tmp_path, told):
    rng = np.random.default_rng(0)
    affinities = rng.random((3, 16, 32, 32), np.float32)
    write_volume(tmp_path / "in", affinities, block_shape=(16, 32, 32))
    code, values = told(
        *("segment", tmp_path / "in", tmp_path / "out"),
        *("--threshold", 0.5, "--low", 0.1, "--high", 0.99),
    )
    assert (code, values["complete"], values["pyramid"]) == (0, True, None)
    assert values["objects"] >= 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("convert",), id="convert"),
        pytest.param(("components", "--threshold", "128"), id="components", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_read_is_a_failure(em, tmp_path, told, words):
    """Damaged blocks are failures in the object, and the exit code is 1."""
    command, *flags = words
    block = next((tmp_path / "em").rglob("0-32_0-32_0-32"))
    with truncated(block):
        code, values = told(command, em, tmp_path / "out", *flags)
    assert (code, values["complete"]) == (1, False)
    assert values["done"] < values["chunks"]
    assert values["failures"]


def test_bad_input_leaves_standard_output_empty(tmp_path, capfd):
    nowhere = str(tmp_path / "nowhere")
    for words in (
        ["convert", nowhere, "out"],
        ["levels", nowhere, "--to", "levels.json"],
        ["components", nowhere, "out", "--threshold", "1"],
        ["segment", nowhere, "out", "--threshold", "0.5", "--low", "0.1", "--high", "0.9"],
    ):
        capfd.readouterr()
        assert main([*words, "--json"]) == 2
        said = capfd.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
