import numpy as np
import pytest
from helpers import bump
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry.blending import axis_weights, patch_weights
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import LatticeAxis, PatchLattice


def total(axis):
    sums = np.zeros(axis.stop - axis.start)
    for k in range(axis.count):
        start = axis.patch_start(k) - axis.start
        sums[start : start + axis.patch] += axis_weights(axis, k)
    return sums


@given(
    st.integers(1, 24).flatmap(
        lambda p: st.tuples(st.just(p), st.integers(1, p), st.integers(0, 50))
    )
)
def test_weights_are_finite_and_sum_to_one_at_every_voxel_and_overlap(case):
    patch, stride, extra = case
    axis = LatticeAxis(-3, -3 + patch + extra, patch, stride)
    weights = [axis_weights(axis, k) for k in range(axis.count)]
    assert all(np.isfinite(w).all() and (w >= 0).all() and (w <= 1).all() for w in weights)
    np.testing.assert_allclose(total(axis), 1, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("patch", "stride"),
    [
        (256, 256),
        (256, 192),
        (256, 128),
        (256, 64),
        (256, 1),
        (2048, 2048),
        (2048, 1536),
        (2048, 1000),
        (2048, 512),
    ],
)
def test_long_patches_where_the_bump_underflows(patch, stride):
    axis = LatticeAxis(0, 2 * patch + 77, patch, stride)
    assert all(np.isfinite(axis_weights(axis, k)).all() for k in range(axis.count))
    np.testing.assert_allclose(total(axis), 1, atol=1e-6, rtol=0)


def test_a_single_patch_weighs_one_everywhere():
    np.testing.assert_array_equal(
        axis_weights(LatticeAxis(0, 256, 256, 64), 0), np.ones(256, np.float32)
    )


def test_weights_are_the_papers_bump_normalised():
    axis = LatticeAxis(0, 40, 16, 8)
    sums = np.zeros(40)
    for k in range(axis.count):
        sums[8 * k : 8 * k + 16] += bump(16)
    for k in range(axis.count):
        np.testing.assert_allclose(
            axis_weights(axis, k), bump(16) / sums[8 * k : 8 * k + 16], rtol=1e-6
        )


def test_patch_weights_are_one_read_only_vector_per_axis():
    lattice = PatchLattice(BoundingBox((0, 0, 0), (5, 9, 20)), (2, 5, 8), (1, 3, 2))
    weights = patch_weights(lattice, (1, 1, 1))
    assert [w.shape for w in weights] == [(2,), (5,), (8,)]
    assert all(w.dtype == np.float32 for w in weights)
    with pytest.raises(ValueError, match="read-only"):
        weights[0][0] = 3
