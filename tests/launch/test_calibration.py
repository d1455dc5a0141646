"""``plan --calibrate`` and ``plan --json`` on a small job: figures are right, nothing created."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import job_values, toy, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.launch import calibration

PRICES = Path(__file__).parents[2] / "templates" / "prices.yaml"


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """What is measured here takes as long each time."""
    monkeypatch.setattr(calibration, "LEAST_SECONDS", 0)


@pytest.fixture
def slow(volume_in, tmp_path):
    """A network of 0.03 s a call."""
    inference = {"batch_size": 1, "patch_shape": [16, 32, 32], "chunk_shape": [16, 32, 64]}
    return str(
        write_job(
            tmp_path / "job.yaml",
            job_values(volume_in, tmp_path / "out", model=toy("slow"), inference=inference),
        )
    )


@pytest.mark.slow
def test_the_network_is_timed_and_nothing_is_created(slow, tmp_path, capsys):
    before = set(tmp_path.rglob("*"))
    assert (
        main(["plan", slow, "--calibrate", "--prices", str(PRICES), "--workers", "3", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert set(tmp_path.rglob("*")) == before
    measured = told["measured"]
    assert 0.03 <= measured["call_seconds"] < 0.3
    computing = measured["call_seconds"] * told["patches"] / told["chunks"]
    assert computing < told["seconds_per_chunk"] < 1.2 * computing, (
        "what is moved takes a little of the cores"
    )
    assert [estimate["kind"] for estimate in told["estimates"]] == ["on demand", "interruptible"]
    assert all(estimate["money"] > 0 for estimate in told["estimates"])
    assert main(["plan", slow, "--calibrate", "--prices", str(PRICES), "--workers", "3"]) == 0
    said = capsys.readouterr().out
    for words in (
        "s a call",
        "3 worker(s), on demand",
        "3 worker(s), interruptible",
        "per 10^9 voxels",
        "a month",
    ):
        assert words in said


@pytest.mark.parametrize("batch_size", [4, 16])
def test_batches_are_filled_and_blank_input_is_not_timed(tmp_path, capsys, caplog, batch_size):
    """0.03 s a call, however many patches; where the middle is blank, noise is timed."""
    write_volume(tmp_path / "in", np.zeros((48, 96, 96), np.uint8))
    keys = {"batch_size": batch_size, "patch_shape": [16, 32, 32], "chunk_shape": [16, 32, 64]}
    values = job_values(tmp_path / "in", tmp_path / "out", model=toy("slow"), inference=keys)
    assert (
        main(["plan", str(write_job(tmp_path / "job.yaml", values)), "--calibrate", "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert 0.03 <= told["measured"]["call_seconds"] < 0.3
    assert "has a single value: timing random noise" in caplog.text


def test_patches_of_one_value_are_no_calls(tmp_path, capsys):
    """Of the middle chunk's patches most are background: the others take no less for that."""
    array = np.zeros((48, 96, 96), np.uint8)
    array[20:30, 44:52, 44:52] = np.random.default_rng(0).integers(0, 256, (10, 8, 8))
    write_volume(tmp_path / "in", array)
    keys = {
        "batch_size": 1,
        "patch_shape": [8, 16, 16],
        "patch_overlap": [0, 0, 0],
        "chunk_shape": [48, 96, 96],
    }
    values = job_values(tmp_path / "in", tmp_path / "out", model=toy("slow"), inference=keys)
    assert (
        main(["plan", str(write_job(tmp_path / "job.yaml", values)), "--calibrate", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["measured"]["call_seconds"] >= 0.03


def test_of_an_exchange_the_seam_files_are_timed_too(volume_in, tmp_path, capsys):
    inference = {
        "batch_size": 1,
        "patch_shape": [16, 32, 32],
        "chunk_shape": [16, 32, 64],
        "seams": "exchange",
    }
    values = job_values(volume_in, tmp_path / "out", model=toy("slow"), inference=inference)
    before = set(tmp_path.rglob("*"))
    assert (
        main(["plan", str(write_job(tmp_path / "job.yaml", values)), "--calibrate", "--json"]) == 0
    )
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert 0 < measured["seam_read_seconds"] < 1e-3
    assert 0 < measured["seam_write_seconds"] < 1e-3
    assert set(tmp_path.rglob("*")) == before | {tmp_path / "job.yaml"}


def test_what_contradicts_itself_is_refused(slow, capsys):
    for words in (
        ["--suggest", "--worker-price=1"],
        ["--prices", "x"],
        ["--write"],
        ["--suggest", "--worker-memory=nan"],
        ["--suggest", "--worker-memory=1e300"],
    ):
        try:
            code = main(["plan", slow, *words])
        except SystemExit as exit:
            code = exit.code
        assert code == 2, words
        assert "not foreseen" not in capsys.readouterr().err


def test_the_plan_as_json(slow, capsys):
    assert main(["plan", slow, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["strategies"]) == {"exchange", "recompute", "crop"}
    assert told["strategies"]["recompute"]["this_job"]
    assert (
        told["strategies"]["exchange"]["network_calls"]
        <= told["patches"]
        == told["strategies"]["recompute"]["network_calls"]
    )
    assert told["stored_bytes"] == 40 * 70 * 50 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker_hours: 3\n", "worker_hours"),
        ("worker_hour: -1\n", "greater"),
        ("[", "not a valid price file"),
    ],
)
def test_prices_that_are_none_are_refused(slow, tmp_path, capsys, text, message):
    (tmp_path / "prices.yaml").write_text(text)
    assert main(["plan", slow, "--calibrate", "--prices", str(tmp_path / "prices.yaml")]) == 2
    assert message in capsys.readouterr().err
    assert main(["plan", slow, "--calibrate", "--prices", str(tmp_path / "absent.yaml")]) == 2


def test_a_job_whose_network_fails_is_refused(slow, tmp_path, capsys):
    shutil.rmtree(tmp_path / "in")
    assert main(["plan", slow, "--calibrate"]) == 2
