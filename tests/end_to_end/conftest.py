"""Jobs whose result without any cluster is known."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_networks
from distributed import Client
from helpers import TOYS, job_values, read_volume, wait_for_text, write_job

from beam_inference.cli.main import main

DASK = Path(sys.executable).with_name("dask")


def job_and_result(volume_in, tmp_path, network, state, seams="recompute", postprocess=()):
    """A job file for a toy network with weights, 18 chunks; and its result in this process."""
    torch.save(state, tmp_path / "weights.pt")
    model = {
        "path": f"{TOYS}:{network}",
        "weights": str(tmp_path / "weights.pt"),
        "output_channels": 2 if state else 1,
        # where workers are elsewhere, there is no trial that could tell
        "prediction_bound": 1024,
    }
    keys = {"threads": 1, "patch_shape": [16, 32, 32], "seams": seams}
    more = {"postprocess": [*postprocess]}
    plain = job_values(volume_in, tmp_path / "plain", model=model, inference=keys) | more
    assert main(["run", str(write_job(tmp_path / "plain.yaml", plain))]) == 0
    values = job_values(volume_in, tmp_path / "out", model=model, inference=keys) | more
    return str(write_job(tmp_path / "job.yaml", values)), read_volume(tmp_path / "plain")


@pytest.fixture
def slow_job(volume_in, tmp_path):
    """A network without weights that takes its time, so that a test can see its job under way."""
    return job_and_result(volume_in, tmp_path, "slow", {})


@pytest.fixture
def slow_exchange_job(volume_in, tmp_path):
    """The same in two stages, every patch once."""
    return job_and_result(volume_in, tmp_path, "slow", {}, "exchange")


SLOWLY = {"operator": "own", "function": f"{TOYS}:slowly", "output_channels": 1}


@pytest.fixture
def long_job(volume_in, tmp_path):
    """A job of 0.6 s a chunk: a second worker comes while there is something left to do."""
    return job_and_result(volume_in, tmp_path, "slow", {}, postprocess=[SLOWLY] * 3)


@pytest.fixture
def longer_job(volume_in, tmp_path):
    """A job of 1.6 s a chunk: also a second launch comes in time."""
    return job_and_result(volume_in, tmp_path, "slow", {}, postprocess=[SLOWLY] * 8)


@pytest.fixture
def slow_merge_job(volume_in, tmp_path):
    """Likewise, and the second stage, too, takes its time."""
    return job_and_result(volume_in, tmp_path, "slow", {}, "exchange", [SLOWLY])


@pytest.fixture
def conv_job(volume_in, tmp_path):
    """A convolution."""
    torch.manual_seed(0)
    return job_and_result(volume_in, tmp_path, "conv", toy_networks.conv().state_dict())


@pytest.fixture
def conv_exchange_job(volume_in, tmp_path):
    """A convolution, in two stages."""
    torch.manual_seed(0)
    state = toy_networks.conv().state_dict()
    return job_and_result(volume_in, tmp_path, "conv", state, "exchange")


@pytest.fixture
def open_job(volume_in, tmp_path):
    """Writes a job file that leaves all choices open, of a network that says nothing of itself."""

    def make(network="conv", output="out", **inference):
        keys = {"patch_shape": [16, 32, 32], "patch_overlap": [4, 8, 8], "chunk_shape": "auto"}
        values = {
            "input": {"path": str(volume_in)},
            "output": {"path": str(tmp_path / output), "dtype": "float32"},
            "model": {"path": f"{TOYS}:{network}", "output_channels": 2},
            "inference": keys | inference,
        }
        return str(write_job(tmp_path / f"{output}.yaml", values))

    return make


@pytest.fixture
def dask_cluster(tmp_path, monkeypatch):
    """The address of a scheduler with two worker processes of one thread each, under nannies."""
    file = tmp_path / "scheduler.json"
    common = ["--scheduler-file", str(file), "--no-dashboard"]
    worker = [
        "worker",
        "--nworkers",
        "2",
        "--nthreads",
        "1",
        "--local-directory",
        str(tmp_path / "dask"),
    ]
    with (tmp_path / "dask.log").open("w") as log:
        processes = [
            subprocess.Popen(
                [str(DASK), *words, *common], stdout=log, stderr=log, start_new_session=True
            )
            for words in (["scheduler", "--port", "0"], worker)
        ]
        try:
            wait_for_text(file)
            with Client(scheduler_file=str(file), set_as_default=False) as client:
                client.wait_for_workers(2, timeout=60)
            yield ["--runner=DaskRunner", f"--dask_scheduler_file={file}"]
        finally:
            for process in reversed(processes):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
