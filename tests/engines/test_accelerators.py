"""Which device a job means, on machines that this one is not."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import job_values
from torch import nn

from beam_inference.config.inference import Inference
from beam_inference.config.job_file import parse_job
from beam_inference.engines import devices
from beam_inference.engines.choice import engine_description
from beam_inference.engines.device_errors import device_errors, empty_cache
from beam_inference.engines.exact_sums_check import check_exact_sums
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.torch_device import TorchDevice
from beam_inference.engines.torch_network import prepare_network, torch_device
from beam_inference.errors import ConfigError, DeviceOutOfMemory, EngineError, ModelContractError
from beam_inference.launch.decide import decide_device
from beam_inference.models.loading import LoadedNetwork

PATCH = {"patch_shape": [4, 4, 4], "chunk_shape": [4, 4, 4]}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that puts accelerators into this machine, as far as PyTorch tells."""
    emptied = []
    modules = SimpleNamespace(empty_cache=lambda: emptied.append(True))

    def put(kind, count=1, memory=2**30):
        accelerator = torch.accelerator
        monkeypatch.setattr(
            accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
        )
        monkeypatch.setattr(accelerator, "device_count", lambda: count)
        monkeypatch.setattr(accelerator, "get_memory_info", lambda number: (1, memory + number))
        monkeypatch.setattr(accelerator, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(accelerator, "memory_allocated", lambda: 3)
        monkeypatch.setattr(accelerator, "max_memory_allocated", lambda: 5)
        monkeypatch.setattr(torch, "get_device_module", lambda device: modules)
        return emptied

    monkeypatch.setattr(devices.tempfile, "gettempdir", lambda: str(tmp_path))
    devices.claim_device.cache_clear()
    yield put
    devices.claim_device.cache_clear()


def inference(device, **settings):
    return Inference.model_validate(PATCH | {"device": device} | settings)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_auto_is_the_accelerator_that_pytorch_has(machine, kind, tmp_path):
    machine(kind)
    job = parse_job(job_values(tmp_path / "in", tmp_path / "out"), tmp_path)
    auto = job.model_copy(update={"inference": inference("auto")})
    assert decide_device(auto, None) == kind
    assert torch_device(inference(kind)) == torch.device(kind, 0)
    assert devices.count_devices(kind) == 1
    tf32 = job.model_copy(update={"inference": inference("auto", precision="tf32")})
    if kind == "cuda":
        assert decide_device(tf32, None) == "cuda"
    else:
        with pytest.raises(ConfigError, match="tf32 exists only on CUDA devices, and this machine"):
            decide_device(tf32, None)


def test_a_number_means_one_device_of_several_and_changes_no_bit(machine):
    machine("cuda", count=3, memory=100)
    assert torch_device(inference("cuda:2")) == torch.device("cuda:2")
    assert torch_device(inference("cuda")) == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="3 such device.* cuda:0 … cuda:2"):
        torch_device(inference("cuda:3"))
    assert [devices.count_devices(each) for each in ("cpu", "cuda", "cuda:1", "xpu")] == [
        1,
        3,
        1,
        0,
    ]
    assert [devices.device_memory(each) for each in ("cuda", "cuda:2")] == [100, 102]
    model = SimpleNamespace(path="net.pt", loader=None)
    descriptions = [
        engine_description(model, inference(each, engine="torch")) for each in ("cuda", "cuda:2")
    ]
    assert descriptions[0] == descriptions[1]
    assert descriptions[0]["device"] == "cuda"


@pytest.mark.parametrize("name", ["gpu", "mps:1", "cpu:0", "cuda:", "cuda:x", "CUDA"])
def test_names_that_mean_no_device_are_refused(name):
    with pytest.raises(ValueError, match="device"):
        inference(name)


def test_another_accelerator_than_the_jobs_is_named(machine):
    machine("mps")
    with pytest.raises(ConfigError, match="no XPU device .* it has Apple's GPUs .* device: mps"):
        torch_device(inference("xpu"))
    with pytest.raises(ValueError, match="use float32 on the mps"):
        inference("mps", precision="tf32")


def test_what_pytorch_does_not_tell_of_a_device_is_not_guessed(machine):
    machine("mps")
    assert devices.device_memory("mps") is None
    assert devices.start_device_peak("mps") > devices.device_peak("mps") == 0
    machine("xpu")
    assert devices.device_memory("cpu") is None
    assert (devices.start_device_peak("xpu"), devices.device_peak("xpu")) == (3, 5)


def test_a_network_in_float64_is_told_before_it_is_brought_to_mps(tmp_path):
    loaded = LoadedNetwork(nn.Conv3d(1, 1, 1).double(), "module")
    job = parse_job(job_values(tmp_path / "in", tmp_path / "out"), tmp_path)
    with pytest.raises(ModelContractError, match="weight is float64, which Apple's GPUs"):
        prepare_network(loaded, job.model, inference("mps"), "mps:0")


def test_memory_that_runs_out_is_the_same_error_on_every_device(machine):
    emptied = machine("cuda")
    for error in (
        RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        torch.OutOfMemoryError("XPU out of memory."),
    ):
        with pytest.raises(DeviceOutOfMemory), device_errors():
            raise error
    assert emptied == [True]


def test_without_an_accelerator_there_is_no_cache_to_empty():
    if not torch.accelerator.is_available():
        empty_cache()
        assert devices.count_devices("cuda") == 0


@pytest.mark.parametrize("device", [NumpyDevice(), TorchDevice(torch.device("cpu"))])
def test_sums_are_tried_before_they_are_believed(device):
    check_exact_sums(device, "this device")


class AwayFromZero(NumpyDevice):
    """Rounds halves as some devices do."""

    def add_rounded(self, sums, terms, step):
        sums += np.copysign(np.floor(np.abs(terms) + np.float32(0.5)), terms) * np.float32(step)


def test_a_device_that_rounds_otherwise_is_refused():
    with pytest.raises(EngineError, match=r"device: xpu does not round .* Write device: cpu"):
        check_exact_sums(AwayFromZero(), "inference.device: xpu")


@pytest.mark.parametrize(
    ("built_for", "may"),
    [
        ("cuda = None; hip = None; xpu = None", "False"),
        ("cuda = None; hip = '6.4'; xpu = None", "True"),
        ("cuda = None; hip = None; xpu = '2025.3'", "True"),
        ("cuda = None", "True"),
    ],
)
def test_what_pytorch_was_built_for_tells_whether_to_ask_it(built_for, may, tmp_path):
    if sys.platform == "darwin":
        pytest.skip("every PyTorch for a Mac may have mps")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(built_for)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from beam_inference.engines.devices import may_have_accelerator\n"
        "print(may_have_accelerator())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [may]
