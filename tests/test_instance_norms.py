"""Instance normalisation by OpenVINO: PyTorch's values, digit for digit where the mean is far from zero."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import job_values
from torch import nn

from beam_inference.job_file import parse_job
from beam_inference.predictors import load_predictor
from beam_inference.predictors.instance_norms import instance_norm

pytest.importorskip("openvino")


def normalised():
    """With parameters, without, and by statistics of the training."""
    torch.manual_seed(0)
    trained = nn.InstanceNorm3d(2, affine=True, track_running_stats=True)
    for array, low in ((trained.running_mean, -1), (trained.running_var, 1), (trained.weight, 1), (trained.bias, 0)):
        nn.init.uniform_(array, low, low + 1)
    affine = nn.InstanceNorm3d(2, affine=True)
    affine.load_state_dict({"weight": torch.rand(2), "bias": torch.rand(2)})
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), affine, nn.InstanceNorm3d(2), nn.ReLU(), trained).eval()


def flat():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.InstanceNorm2d(2), nn.InstanceNorm2d(2, affine=True))


def bare():
    return nn.InstanceNorm3d(1)


def answer(path, batch, **model):
    """OpenVINO's."""
    inference = {"patch_shape": batch.shape[2:], "patch_overlap": [0, 0, 0], "batch_size": 2, "engine": "openvino"}
    job = parse_job(job_values("in", "out", model={"path": path, **model}, inference=inference), Path("/"))
    predictor = load_predictor(job.model, job.inference)
    with predictor.session():
        return predictor.download(predictor.predict(predictor.upload(batch)))().copy()


def exact(network, batch):
    """PyTorch's in float64."""
    with torch.inference_mode():
        return network.double()(torch.from_numpy(batch).double()).numpy()


def random_batch(*shape):
    return np.random.default_rng(0).random(shape, np.float32)


@pytest.mark.parametrize("count", [2, 1], ids=["a full batch", "halved"])
def test_a_network_of_python(count):
    batch = random_batch(count, 1, 8, 16, 32)
    found = answer(f"{__file__}:normalised", batch, output_channels=2)
    np.testing.assert_allclose(found, exact(normalised(), batch), rtol=0, atol=5e-6)


def test_an_exported_file(tmp_path):
    batch = random_batch(2, 1, 8, 16, 32)
    torch.export.save(torch.export.export(normalised(), (torch.zeros(2, 1, 8, 16, 32),)), tmp_path / "network.pt2")
    found = answer(str(tmp_path / "network.pt2"), batch, output_channels=2)
    np.testing.assert_allclose(found, exact(normalised(), batch), rtol=0, atol=5e-6)


def test_in_two_dimensions():
    batch = random_batch(2, 1, 1, 32, 48)
    found = answer(f"{__file__}:flat", batch, output_channels=2, dims=2)
    np.testing.assert_allclose(found[:, :, 0], exact(flat(), batch[:, :, 0]), rtol=0, atol=5e-6)


def test_digits_that_a_long_sum_loses():
    """An image of uint8 / 255 around 0.7: by OpenVINO's own sums it was 6e-5 off, PyTorch's answer is 1e-6 off."""
    levels = 255 * (0.7 + 0.05 * np.random.default_rng(0).standard_normal((2, 1, 20, 256, 256)))
    batch = np.round(levels).astype(np.float32) / np.float32(255)
    np.testing.assert_allclose(answer(f"{__file__}:bare", batch), exact(bare(), batch), rtol=0, atol=5e-6)


@pytest.mark.parametrize("value", [0.0, 0.7, 200.0])
def test_a_patch_of_one_value_is_nearly_zero(value):
    """Whatever the mean's last digits are off is divided by √ε, 0.003."""
    batch = np.full((2, 1, 20, 256, 256), value, np.float32)
    np.testing.assert_allclose(answer(f"{__file__}:bare", batch), 0, atol=1e-3 * value)


@pytest.mark.parametrize("axes", [(5,), (5, 6), (4, 5, 6)])
@pytest.mark.parametrize("of_batch", [True, False])
@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", ""])
def test_what_pytorch_computes(axes, of_batch, given):
    torch.manual_seed(0)
    weight, bias, mean, variance = torch.rand(4, 3)
    batch = 2 + 3 * torch.rand(2, 3, *axes)
    arguments = (weight if "weight" in given else None, bias if "bias" in given else None, mean, variance)
    expected = torch.instance_norm(
        batch, *(None if a is None else a.clone() for a in arguments), of_batch, 0.1, 1e-3, False
    )
    torch.testing.assert_close(
        instance_norm(batch, *arguments, of_batch, 0.1, 1e-3, False), expected, rtol=1e-5, atol=1e-5
    )
    assert instance_norm(batch.bfloat16(), *arguments, of_batch, 0.1, 1e-3, False).dtype == torch.bfloat16
