import os
import subprocess
import sys

import pytest
from helpers import job_values

from beam_inference import run_job
from beam_inference.job_file import parse_job


def test_a_job_from_python(volume_in, tmp_path):
    outcome = run_job(parse_job(job_values(volume_in, tmp_path / "out"), tmp_path))
    assert (outcome.exit_code, outcome.done, outcome.missing, outcome.quarantined) == (0, 18, 0, [])
    assert outcome.summary.done == 18


@pytest.mark.slow
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
