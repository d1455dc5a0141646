"""``plan`` tells what an output takes in its store, from the chunks of it that are done."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import job_values, write_job, write_volume

from beam_inference.cli.main import main

PRICES = Path(__file__).parents[2] / "templates" / "prices.yaml"
SHAPE = (64, 64, 96)


@pytest.fixture
def image(tmp_path):
    """An image that compresses as well everywhere: noise of a few values."""
    rng = np.random.default_rng(3)
    write_volume(tmp_path / "em", rng.integers(0, 4, SHAPE).astype(np.uint8) * 60)
    return tmp_path / "em"


def job_at(image: Path, tmp_path: Path, **output: object) -> str:
    keys = {
        "dtype": "uint8",
        "value_range": [0, 256],
        "block_shape": [16, 16, 16],
        "shard_shape": [32, 32, 32],
        **output,
    }
    values = job_values(
        image, tmp_path / "out", output=keys, inference={"chunk_shape": [32, 32, 32]}
    )
    return str(write_job(tmp_path / "job.yaml", values))


def told(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def voxel_files(output: Path) -> list[Path]:
    """Files of blocks and shards: neither metadata nor the job's records."""
    metadata = ("info", "zarr.json", ".zarray", "attributes.json", "provenance", ".zattrs")
    return [
        path
        for path in output.rglob("*")
        if path.is_file()
        and path.name not in metadata
        and "_beam_inference" not in path.relative_to(output).parts
        and path.suffix != ".json"
    ]


@pytest.mark.parametrize(
    "output",
    [
        {},
        pytest.param({"shard_shape": None}, marks=pytest.mark.slow),
        pytest.param({"format": "zarr3"}, marks=pytest.mark.slow),
        pytest.param({"format": "n5", "shard_shape": None}, marks=pytest.mark.slow),
    ],
    ids=["precomputed", "precomputed, a file a block", "zarr3", "n5"],
)
def test_a_sample_tells_what_the_whole_job_stores(image, tmp_path, capsys, output):
    path = job_at(image, tmp_path, **output)
    assert told(capsys, path)["compressed"] is None
    assert main(["run", path, "--sample", "0.4", "--seed", "1"]) == 0
    capsys.readouterr()
    expected = told(capsys, path)["compressed"]
    sample = expected["samples"]["output"]
    assert main(["run", path]) == 0
    files = voxel_files(tmp_path / "out")
    stored = sum(file.stat().st_size for file in files)
    assert expected["stored_bytes"] == pytest.approx(stored, rel=0.02)
    assert expected["objects"] == len(files) + 12  # receipts
    assert 0 < sample["blocks"] < 12
    side = 32 if output.get("shard_shape", True) else 16
    assert sample["decoded_bytes"] == sample["blocks"] * side**3


def test_without_a_sample_it_says_how_to_get_one(image, tmp_path, capsys):
    path = job_at(image, tmp_path)
    before = set(tmp_path.rglob("*"))
    assert main(["plan", path]) == 0
    assert "no chunk of this job is done;" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before
    assert main(["run", path, "--sample", "0.4", "--seed", "1"]) == 0
    capsys.readouterr()
    assert main(["plan", path]) == 0
    assert "by blocks of chunks that are done," in capsys.readouterr().out


@pytest.mark.slow
def test_prices_are_those_of_what_is_stored(image, tmp_path, capsys):
    words = (job_at(image, tmp_path, pyramid=True), "--calibrate", "--prices", str(PRICES))
    before = told(capsys, *words)
    assert main(["run", words[0], "--sample", "0.4", "--seed", "1"]) == 0
    capsys.readouterr()
    after = told(capsys, *words)
    ratio = after["compressed"]["stored_bytes"] / before["stored_bytes"]
    assert 0.2 < ratio < 0.6
    money = [each["estimates"][0]["money_per_month"] for each in (before, after)]
    assert money[1] == pytest.approx(ratio * money[0])
    assert main(["plan", *words]) == 0
    assert "of its blocks that are done are stored: " in capsys.readouterr().out


def test_a_damaged_receipt_is_no_sample(image, tmp_path, capsys):
    path = job_at(image, tmp_path)
    assert main(["run", path, "--sample", "0.4", "--seed", "1"]) == 0
    for receipt in (tmp_path / "out" / "_beam_inference").rglob("receipts/*/*/*.json"):
        receipt.write_text(receipt.read_text()[:40])
    capsys.readouterr()
    assert told(capsys, path)["compressed"] is None
