"""``plan --calibrate`` and ``plan --json`` on a small job: nothing is created, and the figures are what they say."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import job_values, toy, write_job

from beam_inference.cli import main

PRICES = Path(__file__).parents[1] / "templates" / "prices.yaml"


@pytest.fixture
def slow(volume_in, tmp_path):
    """A network of 0.03 s a call."""
    inference = {"batch_size": 1, "patch_shape": [16, 32, 32], "chunk_shape": [16, 32, 64]}
    return str(
        write_job(
            tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", model=toy("slow"), inference=inference)
        )
    )


def test_the_network_is_timed_and_nothing_is_created(slow, tmp_path, capsys):
    before = set(tmp_path.rglob("*"))
    assert main(["plan", slow, "--calibrate", "--prices", str(PRICES), "--workers", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not [path for path in tmp_path.rglob("*") if path not in before and path.is_file()]
    measured = told["measured"]
    assert 0.03 <= measured["patch_seconds"] < 0.06
    assert told["seconds_per_chunk"] == pytest.approx(
        measured["patch_seconds"] * told["patches"] / told["chunks"], rel=0.01
    )
    assert [estimate["kind"] for estimate in told["estimates"]] == ["on demand", "interruptible"]
    assert all(estimate["money"] > 0 for estimate in told["estimates"])
    assert main(["plan", slow, "--calibrate", "--prices", str(PRICES), "--workers", "3"]) == 0
    said = capsys.readouterr().out
    for words in ("s a patch", "3 worker(s), on demand", "3 worker(s), interruptible", "per 10^9 voxels", "a month"):
        assert words in said


def test_the_plan_as_json(slow, capsys):
    assert main(["plan", slow, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["seams"]) == {"exchange", "recompute", "crop"}
    assert told["seams"]["recompute"]["this_job"]
    assert told["seams"]["exchange"]["network_calls"] <= told["patches"] == told["seams"]["recompute"]["network_calls"]
    assert told["stored_bytes"] == 40 * 70 * 50 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [("worker_hours: 3\n", "worker_hours"), ("worker_hour: -1\n", "greater"), ("[", "no file of prices")],
)
def test_prices_that_are_none_are_refused(slow, tmp_path, capsys, text, message):
    (tmp_path / "prices.yaml").write_text(text)
    assert main(["plan", slow, "--calibrate", "--prices", str(tmp_path / "prices.yaml")]) == 2
    assert message in capsys.readouterr().err
    assert main(["plan", slow, "--calibrate", "--prices", str(tmp_path / "absent.yaml")]) == 2


def test_a_job_whose_network_fails_is_refused(slow, tmp_path, capsys):
    shutil.rmtree(tmp_path / "in")
    assert main(["plan", slow, "--calibrate"]) == 2
