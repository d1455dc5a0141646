"""Chunks that are done again on demand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import files_of, read_volume

from beam_inference.cli.main import main
from beam_inference.job.state import STATE_FOLDER


@pytest.fixture(params=[pytest.param("recompute", marks=pytest.mark.slow), "exchange"])
def path(request, job) -> str:
    """A job of 18 chunks, by either strategy."""
    return job(inference={"strategy": request.param})


def former(output: Path) -> list[int]:
    """The chunks whose former receipts were kept."""
    folder = output / STATE_FOLDER / "former"
    return sorted(int(file.stem) for file in folder.rglob("*.json"))


def test_named_chunks_are_done_again_and_their_receipts_kept(path, tmp_path, capsys):
    assert main(["run", path]) == 0
    expected = files_of(tmp_path / "out")
    assert main(["run", path, "--chunks", "0:10,-5:11,3:40"]) == 0  # without --redo: done
    assert former(tmp_path / "out") == []
    assert main(["run", path, "--chunks", "0-1,4", "--redo"]) == 0
    out = capsys.readouterr().out
    assert "(3 by this launch)" in out
    assert "3 chunks were done again, with the same values as before" in out
    assert former(tmp_path / "out") == [0, 1, 4]
    assert files_of(tmp_path / "out") == expected
    assert main(["verify", path, "--deep"]) == 0


def test_chunks_of_several_outputs_with_previews_are_compared(job, tmp_path, capsys):
    preview = {"scale": [1, 1, 2], "value_range": [0, 255]}
    further = {"path": str(tmp_path / "further"), "preview": preview}
    path = job(output={"preview": preview}, outputs={"further": further})
    assert main(["run", path]) == 0
    assert main(["run", path, "--chunks", "0-1", "--redo"]) == 0
    assert "2 chunks were done again, with the same values as before" in capsys.readouterr().out
    (folder,) = (tmp_path / "further_preview").glob("[0-9]*_*_*")
    damaged = sorted(folder.iterdir())[0]
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert main(["verify", path, "--deep"]) == 1
    assert "outputs.further.preview: " in capsys.readouterr().out
    assert main(["run", path, "--chunks", "0-17", "--redo"]) == 0
    assert main(["verify", path, "--deep"]) == 0


def test_a_damaged_chunk_is_mended_by_redo(path, tmp_path):
    assert main(["run", path]) == 0
    expected = read_volume(tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("[0-9]*_*_*")
    block = sorted(folder.iterdir())[5]
    block.write_bytes(bytes(block.stat().st_size))
    assert main(["verify", path, "--deep"]) == 1
    assert main(["run", path, "--chunks", "0-17", "--redo"]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert main(["verify", path, "--deep"]) == 0


@pytest.mark.slow
def test_a_chunk_that_fails_when_it_is_done_again_is_missing(job, volume_in, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    blocks = [block for block in volume_in.glob("*/*") if block.parent.name != "info"]
    kept = {block: block.read_bytes() for block in blocks}
    for block in blocks:
        block.write_bytes(b"torn")
    assert main(["run", path, "--chunks", "5", "--redo"]) == 3
    assert main(["verify", path]) != 0
    for block, content in kept.items():
        block.write_bytes(content)
    capsys.readouterr()
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0


def test_other_values_than_before_are_told(job, volume_in, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    before = read_volume(tmp_path / "out")
    (block,) = volume_in.glob("*/2-34_-5-27_3-35")  # that chunk 0 begins in
    block.write_bytes(bytes(255 - value for value in block.read_bytes()))
    capsys.readouterr()
    assert main(["run", path, "--chunks", "0,17", "--redo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["redone"] == {"chunks": 2, "changed": [0]}
    after = read_volume(tmp_path / "out")
    assert (after != before).any()
    assert main(["run", path, "--chunks", "0", "--redo"]) == 0
    assert "1 chunks were done again, with the same values as before" in capsys.readouterr().out
    block.write_bytes(bytes(255 - value for value in block.read_bytes()))
    assert main(["run", path, "--chunks", "0", "--redo"]) == 0
    assert "other values than before: 0." in capsys.readouterr().out
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), before)
