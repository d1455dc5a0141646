"""Jobs on this machine's GPU, as a user gives them: ``gpu``."""

import json
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import files_of, job_values, read_volume, toy, write_job, write_volume
from toy_networks import batch_norm

from beam_inference.cli.main import main
from beam_inference.engines.devices import find_accelerator
from beam_inference.job.state import State

pytestmark = pytest.mark.gpu

PATCH = {"patch_shape": [16, 32, 32], "patch_overlap": [4, 8, 8]}

NETWORKS = """
import os
import torch
from torch import nn
from beam_inference.residual_unet import ResidualUNet

def residual():
    torch.manual_seed(0)
    return ResidualUNet(output_channels=2, widths=[8, 12, 16])

class Lost(nn.Module):
    "Looks a value up beyond the end of a table, once: the device is lost to this process."

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        if os.environ.get("LOSE_DEVICE") and self.calls > 6:
            return batch * self.table[batch.long().flatten()[:1] + 1000]
        return batch * self.table[0]

def lost():
    return Lost()

class Greedy(nn.Module):
    "Takes a fifth of the device's memory for every patch."

    def forward(self, batch):
        share = torch.cuda.get_device_properties(0).total_memory // 5
        held = [torch.empty(share, dtype=torch.uint8, device=batch.device) for _ in batch]
        return batch * (1 + 0 * len(held))

def greedy():
    return Greedy()

class Mixes(nn.Module):
    "Takes a mean over its whole batch."

    def forward(self, batch):
        return batch - batch.mean()

def mixes():
    return Mixes()

class Slow(nn.Module):
    def forward(self, batch):
        torch.cuda._sleep(200_000_000)
        return batch

def slow():
    return Slow()
"""


@pytest.fixture(autouse=True)
def accelerator():
    found = find_accelerator()
    assert found is not None, "tests marked gpu need a GPU that PyTorch sees"
    return found


@pytest.fixture
def make_job(tmp_path):
    """A function that writes a job over 48×96×80 random voxels; the job file's path."""
    array = np.random.default_rng(0).integers(0, 256, (48, 96, 80), dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    (tmp_path / "networks.py").write_text(NETWORKS)

    def make(name, network="residual", channels=2, model=(), output=(), **inference):
        values = job_values(
            tmp_path / "in",
            tmp_path / name,
            model={
                "path": f"{tmp_path}/networks.py:{network}",
                "output_channels": channels,
                "normalize": "unit",
                **dict(model),
            },
            output=dict(output),
            inference=PATCH | {"device": "auto"} | inference,
        )
        return str(write_job(tmp_path / f"{name}.yaml", values))

    return make


def volume_of(job):
    return read_volume(yaml.safe_load(Path(job).read_text())["output"]["path"])


def done(job, *flags):
    """The volume of a job that is done and verified."""
    assert main(["run", job, *flags]) == 0
    assert main(["verify", job, "--deep"]) == 0
    return volume_of(job)


def recorded(job):
    output = yaml.safe_load(Path(job).read_text())["output"]["path"]
    return json.loads((Path(output) / "_beam_inference" / "job.json").read_text())


def test_auto_takes_the_gpu_and_every_command_knows_it(make_job, accelerator, tmp_path, capsys):
    job = make_job("out", batch_size="auto", engine="auto")
    assert main(["plan", job]) == 0
    assert "on the GPU" in capsys.readouterr().out
    found = done(job)
    assert f'"{accelerator}"' in json.dumps(recorded(job))
    on_cpu = done(make_job("cpu", device="cpu"))
    np.testing.assert_allclose(found, on_cpu, atol=2e-4)
    assert not np.array_equal(found, on_cpu), "it is to be computed elsewhere"
    assert main(["status", job]) == 0
    assert main(["verify", job, "--recompute", "1"]) == 0
    assert main(["report", job, "--to", str(tmp_path / "report.html")]) == 0
    assert main(["show", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_patches_of_a_batch_know_nothing_of_each_other(make_job, precision, capfd):
    keys = {"precision": precision, "memory_format": "contiguous"}
    job = make_job("auto", batch_size="auto", **keys)
    done(job)
    assert recorded(job)["config"]["inference"]["batch_size"] > 1
    mixing = make_job("mixing", network="mixes", channels=1, batch_size=3, **keys)
    assert main(["run", mixing]) == 2
    assert "depends on the others" in capfd.readouterr().err
    mixing = make_job("alone", network="mixes", channels=1, batch_size="auto", **keys)
    assert main(["run", mixing]) == 0
    assert recorded(mixing)["config"]["inference"]["batch_size"] == 1


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_every_cut_of_a_job_has_the_same_bits(make_job, precision, layout):
    keys = {"precision": precision, "memory_format": layout, "batch_size": 3}
    small = {"chunk_shape": [16, 32, 32], "strategy": "recompute"}
    large = {"chunk_shape": [48, 64, 96], "strategy": "recompute"}
    exchange = {"chunk_shape": [32, 32, 64], "strategy": "exchange"}
    whole = done(make_job("large", **keys, **large))
    for name, shape in {"small": small, "exchange": exchange}.items():
        np.testing.assert_array_equal(done(make_job(name, **keys, **shape)), whole)
    exact = done(make_job("exact", **large, batch_size=3))
    assert np.abs(whole - exact).max() <= {"float32": 1e-4, "tf32": 1e-2}.get(precision, 0.1)


def test_a_compiled_network_answers_alike(make_job):
    plain = done(make_job("torch", precision="float32"))
    compiled = done(make_job("compiled", engine="compile"))
    np.testing.assert_allclose(compiled, plain, atol=1e-4)
    chunks = {"chunk_shape": [48, 64, 96], "strategy": "exchange"}
    np.testing.assert_array_equal(done(make_job("other", engine="compile", **chunks)), compiled)


def test_two_processes_share_a_gpu(make_job, tmp_path):
    done(make_job("one"))
    done(make_job("two"), "--direct_running_mode=multi_processing", "--direct_num_workers=2")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_cpu_and_a_gpu_do_one_job(make_job, accelerator, first, capsys):
    keys = {"mixed_devices": True, "threads": 1}
    devices = {"cpu": "cpu", "gpu": accelerator}
    second = next(device for name, device in devices.items() if name != first)
    alone = {name: done(make_job(name, device=device)) for name, device in devices.items()}
    assert main(["run", make_job("out", device=devices[first], **keys), "--sample", "0.4"]) == 0
    job = make_job("out", device=second, **keys)
    found = done(job)
    for expected in alone.values():
        assert 0 < np.abs(found - expected).max() <= 1e-5
    capsys.readouterr()
    assert main(["verify", job, "--recompute", "1"]) == 0


def test_a_job_of_another_device_is_refused(make_job, accelerator, capsys):
    assert main(["run", make_job("out", device=accelerator), "--sample", "0.4"]) == 0
    capsys.readouterr()
    assert main(["run", make_job("out", device="cpu")]) == 2
    assert "device" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(make_job, accelerator, capsys):
    count = torch.accelerator.device_count()
    assert main(["run", make_job("out", device=f"{accelerator}:{count}")]) == 2
    assert f"{accelerator}:{count}" in capsys.readouterr().err


def test_batches_beyond_the_memory_are_halved(make_job, capsys):
    job = make_job("out", "greedy", 1, batch_size=8)
    found = done(job)
    array = read_volume(Path(job).parent / "in").astype(np.float32)
    np.testing.assert_allclose(found, array / 255, atol=1e-5)


def test_a_corrupt_chunk_is_set_aside(make_job, tmp_path):
    array = read_volume(tmp_path / "in")[0].astype(np.float32) / 255
    array[20, 50, 50] = np.nan
    write_volume(tmp_path / "bad", array)
    job = make_job("out", model={"normalize": "none"}, chunk_shape=[16, 32, 32])
    values = yaml.safe_load(Path(job).read_text())
    values["input"]["path"] = str(tmp_path / "bad")
    write_job(Path(job), values)
    assert main(["run", job]) == 3
    state = State(f"file://{tmp_path}/out/_beam_inference")
    assert state.load_job() is not None
    assert np.isfinite(volume_of(job)).all()


def test_a_lost_device_ends_the_launch_and_the_next_one_goes_on(make_job, tmp_path):
    job = make_job("out", "lost", 1, chunk_shape=[16, 32, 32], batch_size=1)
    command = [sys.executable, "-m", "beam_inference", "run", job]
    ended = subprocess.run(
        ["env", "LOSE_DEVICE=1", *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode not in (0, None), ended.stderr
    assert "the device is lost" in ended.stderr
    assert "Traceback" not in ended.stderr
    found = done(job)
    np.testing.assert_allclose(found, read_volume(tmp_path / "in") / 255, atol=1e-5)


def test_a_killed_launch_goes_on(make_job, tmp_path):
    keys = {"chunk_shape": [16, 32, 32], "batch_size": 1}
    done(make_job("whole", "slow", 1, **keys))
    job = make_job("out", "slow", 1, **keys)
    process = subprocess.Popen([sys.executable, "-m", "beam_inference", "run", job])
    receipts = tmp_path / "out" / "_beam_inference" / "receipts"
    deadline = time.monotonic() + 60
    while not list(receipts.rglob("*.json")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() is None, "it was done before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    done(job)
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "out")


def test_a_function_of_numpy_arrays_runs_on_the_cpu(make_job):
    job = make_job("out", engine="auto", model={"path": "identity", "output_channels": 1})
    done(job)
    assert '"device": "cpu"' in json.dumps(recorded(job))


@pytest.mark.parametrize("suffix", ["pt", "pt2"])
def test_networks_that_were_saved_on_a_cpu_run_there(make_job, tmp_path, suffix):
    network = batch_norm().eval()
    path = tmp_path / f"net.{suffix}"
    example = torch.zeros(1, 1, *PATCH["patch_shape"])
    if suffix == "pt":
        with warnings.catch_warnings():  # it is deprecated; many people's files are made by it
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(network, example).save(str(path))
    else:
        batches = {0: torch.export.Dim("n", min=1, max=64)}
        pair = (torch.cat([example, example]),)
        torch.export.save(torch.export.export(network, pair, dynamic_shapes=(batches,)), str(path))
    found = done(make_job("out", model={"path": str(path)}, batch_size=2))
    plain = done(make_job("plain", model=toy("batch_norm"), batch_size=2, device="cpu"))
    np.testing.assert_allclose(found, plain, atol=1e-4)


@pytest.mark.timeout(600)  # each engine is compiled for each batch that is tried
def test_the_fastest_way_is_found_and_kept(make_job):
    keys = {"engine": "fastest", "batch_size": "auto", "precision": "bfloat16"}
    job = make_job("out", **keys, chunk_shape=[48, 64, 96])
    assert main(["run", job, "--sample", "0.4"]) == 0
    before = recorded(job)
    done(job)
    assert recorded(job) == before
    exact = done(make_job("exact"))
    assert np.abs(volume_of(job) - exact).max() < 0.1
