"""NaN in a patch, or made by a network, is NaN in the answer, whatever the engine."""

import numpy as np
import pytest
from engine_jobs import answer, job_config
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.engines.loading import load_predictor, load_reference
from beam_inference.engines.trial import check_difference, check_no_numbers
from beam_inference.errors import EngineError

pytest.importorskip("openvino")

SHAPE = (1, 16, 16, 16)

NETWORKS = """
import torch
from torch import nn


def convolution():
    torch.manual_seed(0)
    layers = nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(3, 1, 1), nn.Conv3d(4, 1, 1)
    return nn.Sequential(*layers, nn.Sigmoid())


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, batch):
        return self.function(batch)


def stretched():
    return Own(lambda x: torch.relu((x - x.amin()) / (x.amax() - x.amin()) - 0.5))


def logarithm():
    return Own(lambda x: torch.relu(x.log()))


def without_nan():
    return Own(lambda x: torch.nan_to_num(x) + 1)
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "net.py").write_text(NETWORKS)

    def load(name, batch_size=2):
        model = {"path": f"{tmp_path}/net.py:{name}", "output_channels": 1, "normalize": "none"}
        job = job_config(model, engine="openvino", patch_shape=SHAPE[1:], batch_size=batch_size)
        return load_predictor(job.model, job.inference), load_reference(job.model, job.inference)

    return load


def patch():
    return np.random.default_rng(0).random(SHAPE, np.float32)


def keep(batch):
    return batch


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_patch_that_holds_none_is_lost_and_no_other(value, load):
    predictor, _ = load("convolution", 3)
    batch = np.stack([patch()] * 3)
    whole = answer(predictor, batch)
    batch[1, 0, 3, 4, 5] = value
    found = answer(predictor, batch)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], whole[[0, 2]])
    np.testing.assert_array_equal(answer(predictor, np.stack([patch()] * 3)), whole)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_networks_that_hide_none_are_run(batch_size, load):
    predictor, reference = load("convolution", batch_size)
    check_no_numbers(predictor, reference, patch(), keep, batch_size)
    check_difference(predictor, reference, patch(), keep, batch_size)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_network_that_divides_by_zero_where_all_is_one_value(batch_size, load):
    predictor, reference = load("stretched", batch_size)
    with pytest.raises(EngineError, match="openvino gives numbers for a patch with zeros, where"):
        check_no_numbers(predictor, reference, patch(), keep, batch_size)


def test_a_network_that_fails_for_what_the_trial_adds(load):
    predictor, reference = load("logarithm")
    with pytest.raises(EngineError, match="openvino gives numbers for noise, where PyTorch"):
        check_difference(predictor, reference, patch(), keep, 2)


def test_a_network_that_takes_it_for_a_number(load):
    predictor, reference = load("without_nan")
    with pytest.raises(EngineError, match="replaces NaN by numbers in PyTorch in float32, and"):
        check_no_numbers(predictor, reference, patch(), keep, 2)
    check_no_numbers(predictor, reference, np.ones(SHAPE, np.uint8), keep, 2)


@pytest.mark.parametrize(
    ("name", "engine"), [("convolution", "openvino"), ("without_nan", "torch")]
)
def test_a_job_on_a_volume_with_a_hole(name, engine, tmp_path, load):
    """Its chunk is put aside, unless the network fills holes."""
    array = np.random.default_rng(0).random((16, 16, 48)).astype(np.float32)
    array[4, 5, 38] = np.nan
    write_volume(tmp_path / "in", array, block_shape=(16, 16, 16))
    values = job_values(
        tmp_path / "in",
        tmp_path / "out",
        model={
            "path": f"{tmp_path}/net.py:{name}",
            "output_channels": 1,
            "normalize": "none",
            "prediction_bound": 4,
        },
        inference={"patch_shape": [16] * 3, "chunk_shape": [16] * 3, "engine": "auto"},
        job={"max_failed_chunks": 2},
    )
    code = main(["run", str(write_job(tmp_path / "job.yaml", values))])
    found = read_volume(tmp_path / "out")
    assert engine in (tmp_path / "out/_beam_inference/job.json").read_text()
    if engine == "torch":
        assert code == 0
        np.testing.assert_allclose(found[0], np.nan_to_num(array) + 1, rtol=1e-6)
    else:
        assert code == 3
        assert not found[0, :, :, 32:].any()
        assert found[0, :, :, :16].all()
