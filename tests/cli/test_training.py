"""The command split."""

import json

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main


@pytest.fixture
def em(tmp_path):
    write_volume(tmp_path / "em", np.zeros((16, 32, 32), np.uint8), (-4, 0, 8))
    return str(tmp_path / "em")


def test_split_prints_sizes_and_a_map(em, capsys):
    assert main(["split", em, "--patch-shape", "2,4,4", "--test", "0.3"]) == 0
    out = capsys.readouterr().out
    assert "blocks of [8, 16, 16] voxels" in out
    assert out.count("blocks that start at z =") == 3
    rows = [line.strip() for line in out.splitlines() if set(line.strip()) <= set(".vt") and line]
    assert [len(row) for row in rows] == [3] * 6
    found = [sum(row.count(letter) for row in rows) for letter in ".vt"]
    words = [line.split() for line in out.splitlines()[1:4]]
    assert [int(each[1]) for each in words] == found


def test_split_as_json(em, capsys):
    assert main(["split", em, "--block_shape", "4,4,4", "--validation", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["split"] == {"block_shape": [4, 4, 4], "validation": 0, "test": 0.1, "seed": 0}
    assert sum(size["voxels"] for size in told["sets"].values()) == 16 * 32 * 32
    assert told["sets"]["validation"] == {"blocks": 0, "voxels": 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--block-shape", "4,4,4", "--test", "0.95"], "whose sum is below 1"),
        (["--block-shape", "4,4,4", "--scale", "3"], "has the scales 0 … 0"),
    ],
)
def test_wrong_splits_are_refused(em, capsys, words, message):
    assert main(["split", em, *words]) == 2
    assert message in capsys.readouterr().err


def test_absent_volumes_are_refused(tmp_path, capsys):
    assert main(["split", str(tmp_path / "none"), "--patch-shape", "8,8,8"]) == 2
    assert "no volume at" in capsys.readouterr().err
