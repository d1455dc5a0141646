"""Test what a trial says of a network on a job's own input."""

import logging

import numpy as np
import pytest
from helpers import job_values, write_volume

from beam_inference.config.definite import EngineSettings, make_definite
from beam_inference.config.job_file import parse_job
from beam_inference.engines.identity import identity_predictor
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.errors import DeviceOutOfMemory, ModelContractError
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import prepare
from beam_inference.worker.trial import try_network


@pytest.mark.parametrize("partition", [[1, 1, 1], [1, 1, 2]])
def test_too_little_memory_for_a_comparison(partition, volume_in, tmp_path, caplog):
    """A network is divided because it does not fit undivided: that is told, and not refused."""

    def predict(batch):
        raise DeviceOutOfMemory("can't allocate 12 bytes")

    values = job_values(volume_in, tmp_path / "out")
    values["inference"] |= {"partition": partition, "engine": "torch", "device": "cpu"}
    planned = plan_job(parse_job(values, tmp_path), THIS_PROCESS, 1, None)
    engine = EngineSettings("torch", "contiguous", 1)
    config = make_definite(planned.config, planned.settings, engine)
    predictor = identity_predictor()
    reference = Predictor(NumpyDevice(), predict, predictor.description)
    arguments = predictor, config, planned.input, planned.plan, reference
    if partition == [1, 1, 1]:
        with pytest.raises(ModelContractError, match="out of memory for 1 patches a batch in PyT"):
            try_network(*arguments)
        return
    with caplog.at_level(logging.WARNING):
        assert try_network(*arguments).difference is None
    assert "was not compared" in caplog.text
    assert "can't allocate 12 bytes" in caplog.text


FAST_GROWING = """
import torch

class Power(torch.nn.Module):
    def forward(self, x):
        return torch.exp(0.2 * x)

def make():
    return Power().eval()
"""


def bound_of(tmp_path, array):
    """The prediction bound of a job on a volume, whose network grows fast."""
    (tmp_path / "power.py").write_text(FAST_GROWING)
    write_volume(tmp_path / "in", array)
    model = {"path": "power.py:make", "output_channels": 1}
    keys = {"batch_size": 1}  # larger ones are tried on other noise
    values = job_values(tmp_path / "in", tmp_path / "out", model=model, inference=keys)
    return prepare(parse_job(values, tmp_path)).read_job().prediction_bound


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint64"])
@pytest.mark.parametrize("blank", ["the middle", "the diagonal"])
def test_the_bound_is_of_values_that_occur(dtype, blank, tmp_path, caplog):
    """Noise over all integers of a dtype would round the answers to the volume's values away."""
    array = np.random.default_rng(0).integers(1, 20, (32, 64, 64)).astype(dtype)
    if blank == "the middle":
        array[12:24, 20:48, 20:48] = 0
    else:
        array[:, np.arange(64)[:, None] // 16 == np.arange(64) // 16] = 0
    assert 20 < bound_of(tmp_path, array) <= 64
    assert "found by noise" not in caplog.text


@pytest.mark.parametrize(
    ("dtype", "value", "bound"), [("uint8", 0, 2.0**74), ("int32", 3, 2.0), ("float32", 0, 2.0)]
)
def test_noise_is_told_of(dtype, value, bound, tmp_path, caplog):
    """Where the network answers it by infinity, its answer to the volume counts alone."""
    found = bound_of(tmp_path, np.full((32, 64, 64), value, dtype))
    assert found == min(bound, 2.0**60)
    assert "found by noise" in caplog.text


@pytest.mark.parametrize(
    ("start", "stop"),
    [((0, 0, 0), (1, 1, 1)), ((14, 30, 30), (18, 34, 34)), ((0, 0, 0), (18, 64, 64))],
)
def test_a_hole_of_nan_is_not_what_a_network_is_tried_on(start, stop, tmp_path):
    """Its chunks are quarantined, and no job fails by it."""
    array = np.random.default_rng(0).integers(1, 20, (32, 64, 64)).astype(np.float32)
    array[tuple(map(slice, start, stop))] = np.nan
    assert 20 < bound_of(tmp_path, array) <= 64


def test_a_volume_of_nan_alone_is_told_of(tmp_path):
    with pytest.raises(ModelContractError, match=r"each patch that could be tried.*input\.mask"):
        bound_of(tmp_path, np.full((32, 64, 64), np.nan, np.float32))


CHOOSY = """
import torch

class Choosy(torch.nn.Module):
    def forward(self, x):
        assert not (x == 95).any(), "no 95, please"
        return x

def make():
    return Choosy().eval()
"""


@pytest.fixture
def choosy_job(tmp_path):
    """A job whose network refuses a value, given what it is tried on and its batch size."""
    (tmp_path / "choosy.py").write_text(CHOOSY)

    def make(array, batch_size):
        write_volume(tmp_path / "in", array)
        model = {"path": "choosy.py:make", "output_channels": 1, "normalize": "none"}
        keys = {"batch_size": batch_size, "engine": "torch"}
        values = job_values(tmp_path / "in", tmp_path / "out", model=model, inference=keys)
        return parse_job(values, tmp_path)

    return make


def test_a_network_that_refuses_some_values_is_told_before_the_first_chunk(choosy_job, tmp_path):
    array = np.random.default_rng(0).integers(1, 20, (32, 64, 64)).astype(np.uint8)
    array[6:12, 12:24, 12:24] = 95  # not in the middle, where the network is tried first
    with pytest.raises(ModelContractError, match=r"fails on an input.*no 95, please.*by `mask`"):
        prepare(choosy_job(array, 1))
    assert not (tmp_path / "out").exists()


def test_a_network_that_refuses_noise_runs_without_batches(choosy_job):
    blank = np.full((32, 64, 64), 7, np.uint8)
    assert prepare(choosy_job(blank, 1)).read_job().prediction_bound
    assert prepare(choosy_job(blank, "auto")).read_job().config.inference.batch_size == 1
    with pytest.raises(ModelContractError, match=r"no 95, please.*inference\.batch_size: 1\."):
        prepare(choosy_job(blank, 2))
