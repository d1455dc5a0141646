"""The residual U-Net: its shapes; it learns, is saved, and runs in a job with its weights."""

import numpy as np
import pytest
import torch
from helpers import job_values, read_volume, write_job, write_volume
from torch import nn

from beam_inference.cli.main import main
from beam_inference.residual_unet import ResidualUNet

FACTORY = """
from beam_inference.residual_unet import ResidualUNet


def network():
    return ResidualUNet(output_channels=2, widths=(4, 8))
"""


@pytest.mark.parametrize(
    ("widths", "pooling", "shape"),
    [
        ((4,), (1, 2, 2), (3, 5, 7)),
        ((4, 6), (1, 2, 2), (3, 6, 8)),
        ((4, 6, 8), (2, 2, 2), (8, 4, 12)),
        ((3, 4), (1, 3, 1), (2, 6, 5)),
    ],
)
def test_shapes_are_kept(widths, pooling, shape):
    network = ResidualUNet(2, 3, widths, pooling).eval()
    with torch.inference_mode():
        assert network(torch.rand(2, 2, *shape)).shape == (2, 3, *shape)


def test_other_multiples_are_refused():
    with pytest.raises(RuntimeError, match="must match"):
        ResidualUNet(widths=(4, 6, 8))(torch.rand(1, 1, 4, 8, 10))


@pytest.mark.slow
def test_it_learns_and_its_weights_run_in_a_job(tmp_path):
    """It finds bright and dark voxels after a few steps, and in the volume of a job."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    coarse = random.integers(0, 2, (4, 8, 8)).repeat(2, 0).repeat(4, 1).repeat(4, 2)
    array = np.clip(80 + 90 * coarse + random.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)
    batch = torch.from_numpy(array[None, None] / np.float32(255))
    target = torch.from_numpy(np.stack([coarse, 1 - coarse])[None]).float()
    network = ResidualUNet(output_channels=2, widths=(4, 8))
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(network(batch), target)
        loss.backward()
        optimizer.step()
    assert loss < 0.15
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "network.py").write_text(FACTORY)
    write_volume(tmp_path / "in", array)
    model = {
        "path": f"{tmp_path}/network.py:network",
        "weights": f"{tmp_path}/weights.pt",
        "output_channels": 2,
        "activation": "sigmoid",
        "normalize": "unit",
    }
    shapes = {
        "patch_shape": [8, 32, 32],
        "patch_overlap": [0, 0, 0],
        "batch_size": 1,
        "engine": "auto",
    }
    values = job_values(tmp_path / "in", tmp_path / "out", model=model, inference=shapes)
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    found = read_volume(tmp_path / "out")
    with torch.inference_mode():
        np.testing.assert_allclose(
            found, network.eval()(batch)[0].sigmoid().numpy(), rtol=0, atol=2e-5
        )
    assert ((found > 0.5) == target[0].numpy()).mean() > 0.95
