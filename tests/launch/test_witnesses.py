"""What is done when the first chunk that has a receipt is not as it was written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import job_values, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.job.state import STATE_FOLDER


@pytest.fixture(params=[pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def path(request, job: Callable[..., str]) -> str:
    """A job of 18 chunks, by either strategy."""
    return job(inference={"strategy": request.param})


def blocks_of(output: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(output.glob("[0-9]*_*_*/*"))
        if STATE_FOLDER not in path.parts
    }


def first_block(output: Path) -> Path:
    """A block of chunk 0."""
    (folder,) = output.glob("[0-9]*_*_*")
    return folder / "2-18_-5-11_3-19"


def damage(block: Path) -> None:
    content = block.read_bytes()
    block.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


def test_a_copy_that_lacks_its_last_blocks_is_completed(path, tmp_path, capsys, caplog):
    assert main(["run", path]) == 0
    expected = blocks_of(tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("[0-9]*_*_*")

    def places(block: Path) -> list[int]:
        return [int(part.rpartition("-")[2]) for part in block.name.split("_")][::-1]

    max(folder.iterdir(), key=places).unlink()
    capsys.readouterr()
    assert main(["run", path]) == 0
    assert "chunk 17 is done again." in caplog.text
    assert "(1 by this launch)" in capsys.readouterr().out
    assert blocks_of(tmp_path / "out") == expected


@pytest.mark.parametrize(
    "harm",
    [
        damage,
        pytest.param(Path.unlink, marks=pytest.mark.slow),
        pytest.param(lambda block: block.write_bytes(b"torn"), marks=pytest.mark.slow),
    ],
)
def test_a_chunk_whose_block_was_damaged_is_done_again(path, harm, tmp_path, capsys, caplog):
    assert main(["run", path]) == 0
    expected = blocks_of(tmp_path / "out")
    harm(first_block(tmp_path / "out"))
    assert main(["verify", path, "--deep"]) == 1
    capsys.readouterr()
    assert main(["run", path]) == 0
    assert "chunk 0 is done again." in caplog.text
    assert "(1 by this launch)" in capsys.readouterr().out
    assert blocks_of(tmp_path / "out") == expected
    assert main(["verify", path, "--deep"]) == 0


@pytest.mark.slow
def test_others_that_were_looked_at_are_done_again_too(path, tmp_path, capsys):
    assert main(["run", path]) == 0
    expected = blocks_of(tmp_path / "out")
    for block in sorted(first_block(tmp_path / "out").parent.glob("*3-19"))[:3]:
        damage(block)
    damage(first_block(tmp_path / "out"))
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0
    assert blocks_of(tmp_path / "out") == expected


def test_too_many_damaged_blocks_are_another_output(path, tmp_path, capsys):
    assert main(["run", path]) == 0
    for block in first_block(tmp_path / "out").parent.iterdir():
        if block.name.endswith(("3-19", "19-35")):
            damage(block)
    found = blocks_of(tmp_path / "out")
    assert main(["run", path]) == 2
    assert "bear no witness that only this one was changed" in capsys.readouterr().err
    assert blocks_of(tmp_path / "out") == found


def test_of_a_few_chunks_all_are_looked_at(path, tmp_path, capsys):
    (tmp_path / "chunks").write_text("0\n17\n")
    words = ["run", path, "--chunks", str(tmp_path / "chunks")]
    assert main(words) == 0
    expected = blocks_of(tmp_path / "out")
    damage(first_block(tmp_path / "out"))
    assert main(words) == 0
    assert blocks_of(tmp_path / "out") == expected


def test_a_single_chunk_has_no_other_witness(path, tmp_path, capsys):
    (tmp_path / "chunks").write_text("0\n")
    words = ["run", path, "--chunks", str(tmp_path / "chunks")]
    assert main(words) == 0
    damage(first_block(tmp_path / "out"))
    assert main(words) == 2
    assert "says that chunk 0 is done, but in" in capsys.readouterr().err


def test_blocks_of_one_value_bear_no_witness(tmp_path, capsys):
    """An output that was emptied has them too."""
    array = np.zeros((32, 64, 64), np.uint8)
    array[:16, :32, :32] = np.random.default_rng(0).integers(0, 256, (16, 32, 32))
    write_volume(tmp_path / "in", array)
    values = job_values(tmp_path / "in", tmp_path / "out", model={"normalize": "none"})
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", path]) == 0
    for folder in (tmp_path / "out").glob("[0-9]*_*_*"):
        shutil.rmtree(folder)
    assert main(["run", path]) == 2
    assert "bear no witness" in capsys.readouterr().err
