"""Test the mesh that a worker process leads, with real processes."""

import gc
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from engine_jobs import answer, load
from helpers import toy

from beam_inference.engines.partition import leader
from beam_inference.errors import EngineError, ModelContractError, WorkerFault

UNET = toy("residual_unet", output_channels=3)


def members():
    """Processes of meshes that this process leads."""
    command = b"beam_inference.engines.partition.member"
    tasks = Path("/proc/self/task").glob("*/children")
    children = {int(child) for each in tasks for child in each.read_text().split()}
    return [pid for pid in children if command in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_a_member_is_lost_the_mesh_starts_anew_once(caplog, monkeypatch):
    others = set(members())  # of tests before, in this process

    def own_members():
        return [each for each in members() if each not in others]

    batch = np.random.default_rng(1).random((1, 1, 8, 16, 32), np.float32)
    expected = answer(load(UNET, "torch", batch_size=1), batch)
    predictor = load(UNET, "torch", batch_size=1, partition=(1, 1, 2))
    assert predictor.description["partition"] == "1,1,2"
    first = answer(predictor, batch)
    assert np.abs(first - expected).max() <= 1e-5 * np.abs(expected).max()
    (member,) = own_members()
    os.kill(member, signal.SIGKILL)
    assert np.array_equal(answer(predictor, batch), first)
    assert "member 1 of 2 was lost (exit code -9)" in caplog.text
    (member,) = own_members()
    start_member = leader._start_member
    started = []

    def start(orders):
        process = start_member(orders)
        started.append(process.pid)
        process.kill()
        return process

    monkeypatch.setattr(leader, "_start_member", start)
    os.kill(member, signal.SIGKILL)
    with pytest.raises(WorkerFault, match=r"member 1 of 2 did not start \(exit code -9\)"):
        answer(predictor, batch)
    assert len(started) == 1
    assert not own_members()
    monkeypatch.undo()
    assert np.array_equal(answer(predictor, batch), first)
    (member,) = own_members()
    del predictor
    gc.collect()  # what was raised knows the frames that it passed
    assert not own_members()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layer_that_cannot_be_divided_is_refused_by_name(tmp_path):
    network = tmp_path / "network.py"
    network.write_text(
        "import torch\n"
        "class Shuffle(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.flip(4)\n"
        "def network():\n"
        "    return torch.nn.Sequential(torch.nn.Identity(), Shuffle())\n"
    )
    predictor = load({"path": f"{network}:network"}, "torch", partition=(1, 1, 2))
    with pytest.raises(ModelContractError, match=r"1 \(Shuffle\) cannot be divided: flip"):
        answer(predictor, np.zeros((2, 1, 8, 16, 32), np.float32))


def test_networks_of_planes_cannot_be_divided():
    with pytest.raises(EngineError, match="model.dims: 2"):
        load(
            toy("valid_plane", dims=2, output_channels=2, crop_margin=(0, 1, 1)),
            "torch",
            patch_shape=(1, 16, 16),
            partition=(1, 1, 2),
        )
