import io
import logging
import os
import subprocess
import sys

import pytest
from helpers import job_values

from beam_inference import run_job
from beam_inference.cli import main
from beam_inference.errors import WorkerFault
from beam_inference.job_file import parse_job
from beam_inference.runner import explain


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (WorkerFault("the disk is full"), "the disk is full"),
        (raised(RuntimeError("wrapped"), WorkerFault("the disk is full")), "the disk is full"),
        (
            RuntimeError(
                "Traceback\n  File x\nbeam_inference.errors.WorkerFault: the disk is full [while running 'A/B']\n"
            ),
            "the disk is full",
        ),
        (RuntimeError("Traceback\n  File x\nsomething of Beam's own"), "something of Beam's own"),
        (KeyError(), "KeyError"),
    ],
)
def test_what_a_runner_made_of_an_error_is_told_as_one_message(error, message):
    assert explain(error) == message


def test_a_job_from_python(volume_in, tmp_path):
    outcome = run_job(parse_job(job_values(volume_in, tmp_path / "out"), tmp_path))
    assert (outcome.exit_code, outcome.done, outcome.missing, outcome.quarantined) == (0, 18, 0, [])
    assert outcome.summary.done == 18


def test_processes_of_one_machine_take_devices_in_turn(tmp_path, monkeypatch):
    code = """
import sys, time
from beam_inference.predictors.torch_predictor import _claim_cuda_device
print(_claim_cuda_device(2), flush=True)
sys.stdin.read()
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    processes, claimed = [], []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        processes.append(process)
        claimed.append(int(process.stdout.readline()))
    for process in processes:
        process.communicate("")
    assert claimed == [0, 1, 0]


def test_a_log_that_cannot_be_written_does_not_end_the_job(job):
    """As where standard error is a pipe whose reader has gone."""
    gone = io.StringIO()
    gone.close()
    handler = logging.StreamHandler(gone)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        assert main(["run", job(), "--debug"]) == 0
    finally:
        root.removeHandler(handler)
