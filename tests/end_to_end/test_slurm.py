"""The recipe for Slurm, on a cluster of one node: an array of shards, killed and requeued."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
from clusters.slurm import Slurm, slurm_cluster
from helpers import job_values, read_volume, write_job

from beam_inference.cli.main import main

RECIPE = Path(__file__).parents[2] / "templates" / "slurm"
SHARDS = 5
NETWORK = """
import os, time
import torch

class Ramp(torch.nn.Module):
    def forward(self, batch):
        time.sleep(float(os.environ.get("RAMP_SECONDS", "0")))
        return batch * torch.linspace(1, 2, batch[0].numel()).reshape(batch.shape[1:])
"""


@pytest.fixture
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def recipe(tmp_path):
    """The recipe, with what a small node and a short test ask for."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for file in RECIPE.iterdir():
        text = file.read_text()
        text = text.replace("--cpus-per-task=4", "--cpus-per-task=1").replace(
            "--mem=16G", "--mem=0"
        )
        (folder / file.name).write_text(text)
        (folder / file.name).chmod(0o755)
    return folder


def write_slow_job(volume_in, tmp_path, seams, output):
    (tmp_path / "network.py").write_text(NETWORK)
    values = job_values(
        volume_in,
        tmp_path / output,
        model={"path": f"{tmp_path}/network.py:Ramp", "prediction_bound": 512},
        inference={"chunk_shape": [8, 16, 16], "seams": seams},
        output={"block_shape": [8, 16, 16]},
    )
    return str(write_job(tmp_path / f"{output}.yaml", values))


def wait_for(is_so, seconds):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def logs_of(slurm: Slurm) -> str:
    return "\n".join(file.read_text() for file in sorted(slurm.folder.glob("*.log")))


def restarts(slurm: Slurm, array: str) -> int:
    """How often tasks of an array were put back into the queue."""
    shown = slurm.run("scontrol", "show", "job", array, "--oneliner")
    return sum(map(int, re.findall(r"Restarts=(\d+)", shown)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seams", ["recompute", "exchange"])
def test_an_array_of_shards_that_are_signalled_and_killed(
    slurm, recipe, volume_in, tmp_path, seams
):
    job = write_slow_job(volume_in, tmp_path, seams, "out")
    slurm.environment["RAMP_SECONDS"] = "0.06"
    told = slurm.run(str(recipe / "submit.sh"), job, str(SHARDS))
    prepare, array, finish = re.findall(r": (\d+)", told)
    folder = tmp_path / "out/_beam_inference" / ("sums" if seams == "exchange" else "receipts")

    def count_done():
        return len(list(folder.rglob("*.json")))

    wait_for(count_done, 300)
    assert slurm.states(prepare) == ["COMPLETED"]
    # as Slurm does before the time is over, to the tasks that run: they end with 75
    slurm.signal(array, "USR1")
    wait_for(lambda: restarts(slurm, array), 120)
    assert "share not done" in logs_of(slurm)
    before = count_done()
    wait_for(lambda: count_done() > before, 300)
    # as Slurm does where a node is lost: killed, and put back
    running = slurm.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").split()
    assert running
    assert all(task.startswith(f"{array}_") for task in running)
    for task in running:
        slurm.run("scontrol", "requeue", task)
    assert set(slurm.wait(array, 600)) == {"COMPLETED"}, logs_of(slurm)
    assert restarts(slurm, array) >= 2
    assert slurm.wait(finish, 300) == ["COMPLETED"], logs_of(slurm)
    assert main(["verify", job, "--deep"]) == 0
    whole = write_slow_job(volume_in, tmp_path, "recompute", "whole")
    assert main(["run", whole]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "whole"))
