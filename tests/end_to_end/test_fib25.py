"""Accept a job on a real volume (FIB-25, 250³ voxels) with a network trained on it.

The volume is of Drosophila brain. The network has instance normalisation: every voxel of a patch
depends on the whole patch, so that any error of geometry would show.
"""

from itertools import cycle, product

import numpy as np
import pytest
import torch
from fib25_job import affinity_job, run_affinities
from helpers import oracle
from networks.fib25 import fib25_network
from safetensors.torch import load_file

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume

SMALL = {"start": [37, 20, 101], "stop": [68, 99, 170]}  # 31 × 79 × 69 voxels: nothing divides it
CHUNK_SHAPES = [(32, 80, 96), (21, 37, 49), (16, 48, 48), (31, 29, 64)]


def oracle_of(fib25, plan, weights, batch_size):
    """The same float32 predictions, summed in float64 over the whole domain."""
    volume = open_volume(f"file://{fib25}")
    network = fib25_network().eval()
    network.load_state_dict(load_file(weights))

    def predict(box):
        patch = torch.from_numpy(
            volume.cutout(box, "reflect", 0).astype(np.float32) * np.float32(1 / 255)
        )
        with torch.inference_mode():
            batch = patch[None].repeat(batch_size, 1, 1, 1, 1)
            return network(batch)[0].sigmoid().numpy()

    blended, _ = oracle(plan.lattice, predict, 3)
    return blended[(slice(None), *plan.chunks.roi.slices_in(plan.lattice.domain))]


def check_bit_identity(fib25, tmp_path, roi, jobs, batch_size):
    """Run jobs of several chunk shapes and strategies, and compare their bits."""
    results = []
    plans = []
    for number, (chunk_shape, strategy) in enumerate(jobs):
        values = affinity_job(
            fib25, tmp_path / f"out{number}", chunk_shape, batch_size=batch_size, roi=roi
        )
        values["inference"]["strategy"] = strategy
        result, job = run_affinities(tmp_path / f"job{number}.yaml", values)
        results.append(result)
        plans.append(job.plan)
    if batch_size > 1:
        last = {
            plan.work(i).patch_count % batch_size
            for plan in plans
            for i in range(plan.chunks.count)
        }
        assert 1 in last, "no chunk whose last batch has one patch"
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    return results[0], plans[0], job


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_chunk_shape_gives_the_same_bits_and_the_oracles_values(
    fib25, tmp_path, batch_size, capsys
):
    jobs = list(product(CHUNK_SHAPES, ("recompute", "exchange")))
    result, plan, job = check_bit_identity(fib25, tmp_path, SMALL, jobs, batch_size)
    expected = oracle_of(fib25, plan, job.config.model.weights, batch_size)
    error = np.abs(result - expected).max()
    assert error <= 1e-6, "the output's range is 1"

    crop = affinity_job(fib25, tmp_path / "crop", CHUNK_SHAPES[2], batch_size=batch_size, roi=SMALL)
    crop["inference"] |= {"seams": "crop", "chunk_crop_margin": [2, 8, 8]}
    cropped, _ = run_affinities(tmp_path / "crop.yaml", crop)
    difference = np.abs(cropped - expected)
    assert difference.max() > 0.01
    with capsys.disabled():
        print(
            f"\nFIB-25 {plan.chunks.roi.shape}, batch {batch_size}: {len(CHUNK_SHAPES)} chunk "
            f"shapes by both strategies bit-identical, |output - oracle| <= {error:.1e}; seams: "
            f"crop differs by up to {difference.max():.3f}, 99.9th percentile "
            f"{np.percentile(difference, 99.9):.4f}"
        )


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_whole_volume(fib25, tmp_path, batch_size, capsys):
    shapes = [(250, 250, 250), (127, 131, 250), (96, 160, 144), (97, 211, 101)]
    jobs = list(zip(shapes, cycle(("recompute", "exchange")), strict=False))
    result, plan, job = check_bit_identity(fib25, tmp_path, None, jobs, batch_size)
    assert plan.chunks.roi == BoundingBox((0, 0, 0), (250, 250, 250))
    error = np.abs(result - oracle_of(fib25, plan, job.config.model.weights, batch_size)).max()
    with capsys.disabled():
        print(
            f"\nFIB-25 whole, batch {batch_size}: {shapes} bit-identical, |output - oracle| <= "
            f"{error:.1e}"
        )
    assert error <= 1e-6
