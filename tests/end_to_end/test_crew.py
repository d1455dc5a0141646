"""Test launches that join a job that runs, one of which is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from chaos.clocks import Clocks, build_library
from helpers import job_values, read_volume, write_job

from beam_inference.cli.main import main

NETWORK = """
import time
import torch

class Ramp(torch.nn.Module):
    def forward(self, batch):
        time.sleep(0.02)
        return batch * torch.linspace(1, 2, batch[0].numel()).reshape(batch.shape[1:])
"""


def start(job, *flags, variables=None):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", job, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(variables or {})},
    )


def wait_for_records(output, count, process):
    deadline = time.monotonic() + 90
    while sum(1 for _ in (output / "_beam_inference").rglob("0*/0*.json")) < count:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.fixture
def job_of(volume_in, tmp_path):
    def write(output, strategy):
        (tmp_path / "network.py").write_text(NETWORK)
        values = job_values(
            volume_in,
            tmp_path / output,
            model={"path": f"{tmp_path}/network.py:Ramp", "prediction_bound": 512},
            inference={"chunk_shape": [8, 16, 16], "strategy": strategy},
            output={"block_shape": [8, 16, 16]},
            job={"timeouts": {"claim": 4}},
        )
        return str(write_job(tmp_path / f"{output}.yaml", values))

    return write


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["recompute", "exchange"])
def test_a_killed_launch_is_replaced_by_those_that_joined(job_of, tmp_path, strategy):
    path = job_of("out", strategy)
    killed = start(path)
    wait_for_records(tmp_path / "out", 3, killed)
    processes = "--direct_running_mode=multi_processing"
    others = [start(path), start(path, processes, "--direct_num_workers=2")]
    wait_for_records(tmp_path / "out", 30, others[0])
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    for process in others:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, out + err
    assert main(["verify", path, "--deep"]) == 0
    assert main(["run", job_of("alone", "recompute"), "--no_claims"]) == 0
    assert not (tmp_path / "alone/_beam_inference/claims").exists()
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_clocks_that_are_wrong_change_nothing(job_of, tmp_path):
    library = build_library(tmp_path / "clocks")
    if library is None:
        pytest.skip("there is no compiler")
    path = job_of("out", "recompute")
    crew = []
    for seconds in (0, 600, 1200):
        clock = Clocks(tmp_path / f"clocks/{seconds}", library)
        variables = clock.make()
        clock.set_all(seconds)
        crew.append(start(path, variables=variables))
        wait_for_records(tmp_path / "out", 2, crew[0])
    assert main(["status", path]) == 0
    for process in crew:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, out + err
    state = tmp_path / "out/_beam_inference"
    done = [json.loads(path.read_text())["done"] for path in state.glob("launches/*.json")]
    assert len(done) == 3
    assert min(done) > 0
    assert sum(done) == len([*state.rglob("receipts/*/*/*.json")])
    assert main(["verify", path, "--deep"]) == 0
    assert main(["run", job_of("alone", "recompute")]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "alone"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cancel_stops_all_launches(job_of, tmp_path, capsys):
    path = job_of("out", "recompute")
    first = start(path)
    wait_for_records(tmp_path / "out", 2, first)
    second = start(path)
    workers = tmp_path / "out/_beam_inference/workers"
    while len([*workers.glob("*.json")]) < 2:
        assert second.poll() is None, second.communicate()
        time.sleep(0.02)
    assert main(["status", path]) == 0
    assert capsys.readouterr().out.count("at work: ") == 2
    assert main(["cancel", path]) == 0
    assert capsys.readouterr().out.count("told to stop") == 2
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, out + err
    assert main(["cancel", path]) == 0
    assert "no launch" in capsys.readouterr().out
    assert main(["run", path]) == 0
