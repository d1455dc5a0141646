"""Test jobs whose patches are shared by the processes of a mesh."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import toy_networks
import yaml
from helpers import job_values, read_volume, toy, write_job, write_volume

from beam_inference import predict
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.job.state import State

SHAPE = (16, 28, 28)
COMMAND = [sys.executable, "-W", "ignore", "-m", "beam_inference", "run"]


@pytest.fixture
def source(tmp_path):
    array = np.random.default_rng(3).integers(0, 255, SHAPE, np.uint8)
    write_volume(tmp_path / "in", array)
    return tmp_path / "in"


def job(folder, source, name, **inference):
    values = job_values(
        source,
        folder / name,
        model={**toy("residual_unet", output_channels=3), "normalize": "unit"},
        inference={
            "patch_shape": [16, 16, 16],
            "patch_overlap": [0, 4, 4],
            "chunk_shape": [16, 16, 16],
            "batch_size": 1,
            "threads": 1,
            **inference,
        },
    )
    return write_job(folder / f"{name}.yaml", values)


def members_of(pid):
    """Processes of a mesh that a process, or one of those that it started, leads."""
    command = b"beam_inference.engines.partition.member"
    found = []
    for each in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in each.read_text().split():
            try:
                is_member = command in Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            found += [int(child)] if is_member else members_of(int(child))
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_mesh_gives_the_same_output(tmp_path, source):
    assert main(["run", str(job(tmp_path, source, "plain"))]) == 0
    expected = read_volume(tmp_path / "plain")
    fingerprints = set()
    for name, keys in {
        "recompute": {"strategy": "recompute", "partition": [1, 1, 2]},
        "exchange": {"strategy": "exchange", "partition": [1, 2, 2]},
    }.items():
        assert main(["run", str(job(tmp_path, source, name, **keys))]) == 0
        found = read_volume(tmp_path / name)
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
        record = State(f"file://{tmp_path / name}/_beam_inference").load_job()
        assert record.engine["partition"] == ",".join(map(str, keys["partition"]))
        fingerprints.add(record.fingerprint)
    plain = State(f"file://{tmp_path / 'plain'}/_beam_inference").load_job()
    assert "partition" not in plain.engine
    assert len(fingerprints | {plain.fingerprint}) == 3


HEADS = """
import torch

class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv3d(1, 2, 3, padding=1)

    def forward(self, batch):
        answer = self.layer(batch)
        return {"one": answer[:, :1], "two": answer.tanh()}

def make():
    torch.manual_seed(3)
    return Heads()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_divided_network_may_have_several_heads(tmp_path, source):
    (tmp_path / "heads.py").write_text(HEADS)
    heads = [{"key": "one", "channels": 1}, {"key": "two", "channels": 2}]
    found = []
    for name, partition in {"plain": [1, 1, 1], "divided": [1, 2, 1]}.items():
        values = yaml.safe_load(job(tmp_path, source, name, partition=partition).read_text())
        values["model"] = {"path": f"{tmp_path}/heads.py:make", "normalize": "unit", "heads": heads}
        values["output"]["head"] = "one"
        values["outputs"] = {"second": {"path": str(tmp_path / f"{name}_two"), "head": "two"}}
        assert main(["run", str(write_job(tmp_path / f"{name}.yaml", values))]) == 0
        found.append([read_volume(tmp_path / name), read_volume(tmp_path / f"{name}_two")])
    for plain, divided in zip(*found, strict=True):
        np.testing.assert_allclose(divided, plain, rtol=0, atol=1e-5)


SCRIPTED = """
import torch

@torch.jit.script
def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.clamp(8 * (x.mean([2, 3, 4], True) - 0.55), 0, 1)

class Gated(torch.nn.Module):
    def forward(self, batch):
        return gate(batch)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_divided_is_refused_in_one_message(tmp_path, source):
    """Here, a gate that is shut in the patch that is tried first, and open in others."""
    (tmp_path / "gated.py").write_text(SCRIPTED)
    model = f"--set=model={{path: '{tmp_path}/gated.py:Gated', normalize: unit}}"
    path = job(tmp_path, source, "out", partition=[1, 1, 2])
    result = subprocess.run([*COMMAND, str(path), model], capture_output=True, text=True)
    assert result.returncode == 2
    assert "(Gated) cannot be divided: aten.mean" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


FICKLE = """
import torch

class Fickle(torch.nn.Module):
    def forward(self, batch):
        return batch if type(batch) is torch.Tensor else batch * FACTOR
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("factor", "precision"), [(1.001, "float32"), (1.1, "bfloat16"), (1.0, "float32")]
)
def test_a_network_that_answers_otherwise_divided_is_refused(
    tmp_path, source, capsys, factor, precision
):
    (tmp_path / "fickle.py").write_text(FICKLE.replace("FACTOR", str(factor)))
    model = f"--set=model={{path: '{tmp_path}/fickle.py:Fickle', normalize: unit}}"
    path = job(tmp_path, source, "out", partition=[1, 1, 2], precision=precision)
    code = main(["run", str(path), model])
    if factor == 1.0:
        assert code == 0
        return
    assert code == 2
    message = capsys.readouterr().err
    assert "the network divided by inference.partition, torch in" in message
    assert ("Remove inference.partition" if precision == "float32" else "float32.") in message
    assert not (tmp_path / "out").exists()


def run_and_kill_a_member(arguments, output, leaders):
    """Run a job until a chunk is done, kill a member of a mesh, and wait for the launch's end."""
    launch = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    receipts = output / "_beam_inference"
    deadline = time.monotonic() + 500
    while not (any(receipts.glob("receipts/**/*.json")) and members_of(leaders or launch.pid)):
        assert time.monotonic() < deadline
        assert launch.poll() is None, launch.stderr.read()
        time.sleep(0.01)
    os.kill(members_of(leaders or launch.pid)[0], signal.SIGKILL)
    said, log = launch.communicate(timeout=500)
    return launch.returncode, said, log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_member_costs_a_chunk_and_no_output(tmp_path, source):
    keys = {"partition": [1, 1, 2]}
    path = job(tmp_path, source, "killed", **keys)
    assert main(["run", str(job(tmp_path, source, "whole", **keys))]) == 0
    code, said, log = run_and_kill_a_member([str(path)], tmp_path / "killed", None)
    assert code == 0, said + log
    assert "member 1 of 2 was lost (exit code -9)" in log
    assert np.array_equal(read_volume(tmp_path / "killed"), read_volume(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_dask_worker_leads_a_mesh_and_a_lost_member_costs_no_launch(tmp_path, dask_cluster):
    source = tmp_path / "in"
    write_volume(source, np.random.default_rng(4).integers(0, 255, (16, 60, 60), np.uint8))
    bound = "--set=model.prediction_bound=4"  # no trial here could tell
    assert main(["run", str(job(tmp_path, source, "plain")), bound]) == 0
    path = job(tmp_path, source, "divided", partition=[1, 1, 2])
    torch.save(toy_networks.residual_unet().state_dict(), tmp_path / "weights.pt")
    keys = [bound, f"--set=model.weights={tmp_path}/weights.pt"]
    file = dask_cluster[-1].partition("=")[2]
    found = subprocess.run(
        ["pgrep", "-f", f"dask worker.*{file}"], capture_output=True, text=True, check=True
    )
    leaders = int(found.stdout.split()[0])
    code, said, log = run_and_kill_a_member(
        [str(path), *keys, *dask_cluster], tmp_path / "divided", leaders
    )
    assert code == 0, said + log
    expected = read_volume(tmp_path / "plain")
    error = np.abs(read_volume(tmp_path / "divided") - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()
    state = State(f"file://{tmp_path / 'divided'}/_beam_inference")
    record = state.load_job()
    receipts = state.of(record).read_receipts(range(record.plan.chunks.count))
    assert len({each.worker for each in receipts}) >= 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engine": "openvino"}, "engine: torch"),
        ({"device": "cuda"}, "not yet among devices"),
        ({"partition": [1, 1, 17]}, "more processes along an axis"),
    ],
)
def test_what_a_mesh_cannot_be_is_refused(tmp_path, keys, message):
    inference = {"partition": [1, 1, 2], **keys}
    with pytest.raises(ConfigError, match=message):
        parse_job(job_values("in", "out", inference=inference), tmp_path)


def test_functions_cannot_be_divided():
    with pytest.raises(ConfigError, match="engine: torch"):
        predict(
            np.zeros((4, 4, 4), np.float32),
            lambda batch: batch,
            patch_shape=(4, 4, 4),
            partition=(1, 1, 2),
        )
