"""Status and structured logs: how far a job is, seen from its receipts."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from helpers import truncated

from beam_inference.cli.jobs import StatusOptions
from beam_inference.cli.jobs import status as print_status_of
from beam_inference.cli.main import main
from beam_inference.job.state import State
from beam_inference.job.status import job_status, recent_rate

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def status_of(tmp_path):
    state = State(f"file://{tmp_path}/out/_beam_inference")
    return job_status(state.load_job(), state, datetime.now(UTC))


def test_a_job_that_is_complete(job, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    status = status_of(tmp_path)
    assert (status.planned, status.done, status.missing, status.quarantined, status.workers) == (
        18,
        18,
        0,
        0,
        1,
    )
    assert datetime.now(UTC) - status.latest < timedelta(minutes=1)
    capsys.readouterr()
    options = StatusOptions(overrides=(), volume=None, step=None, job=path, watch=True, json=False)
    assert print_status_of(options, watch_seconds=0.05) == 0
    assert "18 of 18 chunks done (100.0%), 0 missing\ncomplete" in capsys.readouterr().out


def test_a_job_that_is_not(job, tmp_path, capsys):
    path = job()
    (tmp_path / "some").write_text("1\n2\n3\n4\n5\n")
    assert main(["run", path, "--chunks", str(tmp_path / "some")]) == 0
    status = status_of(tmp_path)
    assert (status.done, status.missing) == (5, 13)
    assert status.rate > 0
    assert status.seconds_left == pytest.approx(13 / status.rate)
    assert main(["status", path]) == 0
    assert "13 missing" in capsys.readouterr().out


def test_quarantined_chunks_are_not_missing(job, tmp_path, capsys):
    path = job()
    block = next((tmp_path / "in").glob("*/*_*-*_*"))
    with truncated(block):
        assert main(["run", path]) == 3
        status = status_of(tmp_path)
        assert status.quarantined > 0
        assert status.done + status.quarantined == 18
    assert main(["run", path]) == 0
    assert status_of(tmp_path).quarantined == 0  # their receipts supersede


def test_before_the_first_launch(job, capsys):
    assert main(["status", job()]) == 2
    assert "holds no job" in capsys.readouterr().err


def test_watching_a_job_from_beside_it(job, tmp_path, capsys):
    path = job()
    (tmp_path / "some").write_text("0\n")
    assert main(["run", path, "--chunks", str(tmp_path / "some")]) == 0
    rest = threading.Timer(0.5, main, [["run", path]])
    rest.start()
    options = StatusOptions(overrides=(), volume=None, step=None, job=path, watch=True, json=False)
    assert print_status_of(options, watch_seconds=0.05) == 0
    rest.join()
    out = capsys.readouterr().out
    assert "17 missing" in out
    assert "complete; verify reads it back" in out


def test_the_rate_is_that_of_late():
    # one a minute, long ago
    slow = [NOW - timedelta(hours=10) + timedelta(minutes=i) for i in range(200)]
    fast = [NOW - timedelta(seconds=100 - i) for i in range(100)]  # one a second
    assert recent_rate(slow + fast, 300, NOW) == pytest.approx(1, rel=0.05)
    # a sample of a hundredth
    assert recent_rate(slow + fast, 30_000, NOW) == pytest.approx(100, rel=0.05)
    assert recent_rate(slow, 200, NOW) is None
    assert recent_rate(fast[:1], 1, NOW) is None


def test_structured_logs_name_job_launch_run_chunk_and_attempt(job, tmp_path, capfd):
    path = job(job={"run_length": 3})
    block = next((tmp_path / "in").glob("*/*_*-*_*"))
    block.write_bytes(block.read_bytes()[:10])
    assert main(["run", path, "--log-format", "json"]) == 3
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    quarantined = [
        line for line in lines if line["level"] == "WARNING" and "quarantined" in line["message"]
    ]
    assert quarantined
    fingerprint = State(f"file://{tmp_path}/out/_beam_inference").load_job().fingerprint
    for line in quarantined:
        assert fingerprint.startswith(line["job"])
        assert line["run"] <= line["chunk"] < line["run"] + 3
        assert (line["stage"], line["attempt"]) == ("read", 1)
        assert line["launch"]
        datetime.fromisoformat(line["time"])
    runs = [line for line in lines if "outcomes" in line]
    assert sum(sum(line["outcomes"].values()) for line in runs) == 18
    assert main(["run", path, "--log-format", "json", "--set", "model.nonsense=1"]) == 2
    (line,) = map(json.loads, capfd.readouterr().err.splitlines())
    assert line["level"] == "ERROR"
    assert "unknown key" in line["message"]


def test_what_changes_between_runs_has_flags(job, tmp_path):
    path = job()
    other = [
        "--output",
        str(tmp_path / "other"),
        "--roi=3x-5x2:19x27x34",
        "--resume=true",
        "--max_failed_chunks=0",
    ]
    assert main(["run", path, *other, "--set", "inference.batch_size=1"]) == 0
    resolved = State(f"file://{tmp_path}/other/_beam_inference").load_job()
    assert resolved.config.roi.stop == (19, 27, 34)
    assert resolved.config.inference.batch_size == 1
    assert resolved.config.job.max_failed_chunks == 0
    assert main(["verify", path, *other, "--set", "inference.batch_size=1"]) == 0
    assert yaml.safe_load(Path(path).read_text())["output"]["path"] == str(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_roi_that_is_none(job, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["run", job(), "--roi=1,2,3"])
    assert exit.value.code == 2
    assert "expected START:STOP" in capsys.readouterr().err
