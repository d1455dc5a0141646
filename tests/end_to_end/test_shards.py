"""Test jobs that are done in shards, by processes that are killed, asked to stop, and requeued."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import job_values, launch_of, read_volume, write_job

from beam_inference.cli.main import main
from beam_inference.worker.worker import Worker

SHARDS = 7
NETWORK = """
import os, time
import torch

class Ramp(torch.nn.Module):
    def forward(self, batch):
        time.sleep(float(os.environ.get("RAMP_SECONDS", "0")))
        return batch * torch.linspace(1, 2, batch[0].numel()).reshape(batch.shape[1:])
"""
INFERENCE = {"chunk_shape": [8, 16, 16]}  # 100 chunks, of half a second each
OUTPUT = {"block_shape": [8, 16, 16]}
PROCESSES = ("--direct_running_mode=multi_processing", "--direct_num_workers=2")


def start(job, shard, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", job, f"--shard={shard}/{SHARDS}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "RAMP_SECONDS": "0.06"},
    )


def model_in(folder):
    return {"path": f"{folder}/network.py:Ramp", "prediction_bound": 512}


def records(output):
    return [
        path
        for folder in ("receipts", "sums")
        for path in (output / "_beam_inference" / folder).rglob("*.json")
    ]


def wait_for_a_chunk(output, process):
    """Wait until one more chunk is done, or summed; how long that took."""
    began = time.monotonic()
    before = len(records(output))
    while len(records(output)) <= before:
        assert time.monotonic() < began + 90
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.fixture
def job(volume_in, tmp_path):
    """A function that writes a job of a slow network, and divides it."""

    def prepare(seams):
        (tmp_path / "network.py").write_text(NETWORK)
        inference = {**INFERENCE, "seams": seams}
        values = job_values(
            volume_in,
            tmp_path / "out",
            model=model_in(tmp_path),
            inference=inference,
            output=OUTPUT,
        )
        path = str(write_job(tmp_path / "job.yaml", values))
        assert main(["prepare", path, "--shards", str(SHARDS)]) == 0
        return path

    return prepare


def assert_stopped(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "share not done" in out
    assert "Traceback" not in err


def assert_bytes_of_one_run(volume_in, folder):
    model = model_in(folder)
    launch = launch_of(
        volume_in,
        folder / "whole",
        "recompute",
        model=model,
        inference=INFERENCE,
        output=OUTPUT,
    )
    list(Worker(launch).infer_chunks(range(launch.read_job().plan.chunks.count)))
    np.testing.assert_array_equal(read_volume(folder / "out"), read_volume(folder / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seams", ["recompute", "exchange"])
def test_seven_shards_killed_stopped_and_requeued(job, volume_in, tmp_path, seams):
    path = job(seams)
    output = tmp_path / "out"
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    order = random.Random(seed).sample(range(SHARDS), SHARDS)
    for shard in order[:2]:
        process = start(path, shard)
        seconds = wait_for_a_chunk(output, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert_stopped(start(path, order[2], f"--stop_after={max(1, int(seconds))}s"))
    process = start(path, order[3])
    wait_for_a_chunk(output, process)
    process.send_signal(signal.SIGTERM)
    assert_stopped(process)
    kept = {record: record.read_bytes() for record in records(output)}
    for some in (order[4:6], order[6:] + order[:1], order[1:3], order[3:4]):  # the last ones again
        processes = [start(path, shard) for shard in some]
        ends = [(*process.communicate(timeout=120), process.returncode) for process in processes]
        for out, err, code in ends:
            assert code == 0, err
            assert "share done, job not complete" in out
    assert main(["finish", path, "--deep"]) == main(["finish", path]) == 0
    assert all(record.read_bytes() == content for record, content in kept.items())
    assert_bytes_of_one_run(volume_in, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), PROCESSES], ids=["threads", "processes"])
def test_slurm_signals_all_processes_of_a_step(job, volume_in, tmp_path, flags):
    path = job("recompute")
    process = start(path, 3, *flags)
    wait_for_a_chunk(tmp_path / "out", process)
    while process.poll() is None:  # wrappers pass it on, and scancel repeats it
        os.killpg(process.pid, signal.SIGUSR1)
        time.sleep(0.1)
    assert_stopped(process)
