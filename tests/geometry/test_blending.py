from itertools import product

import numpy as np
import pytest
from helpers import bump, window_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from beam_inference.geometry import blending, zyx
from beam_inference.geometry.blending import BUMP, BlendWindow, axis_weights, patch_weights
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import LatticeAxis, PatchLattice

WINDOWS = [
    BUMP,
    BlendWindow("constant"),
    BlendWindow("gaussian", 0.125),
    BlendWindow("gaussian", 0.01),
    BlendWindow("gaussian", 0.125, is_on_voxel=True),
]
FLOORS = [
    BlendWindow("gaussian", 0.125, floor=1e-3),
    BlendWindow("gaussian", 0.06, is_on_voxel=True, floor=2.0**-24 / 10),
    BlendWindow("bump", floor=0.1),
]


def total(axis, window=BUMP):
    sums = np.zeros(axis.stop - axis.start)
    for k in range(axis.count):
        start = axis.patch_start(k) - axis.start
        sums[start : start + axis.patch] += axis_weights(axis, k, window)
    return sums


@given(
    st.integers(1, 24).flatmap(
        lambda p: st.tuples(st.just(p), st.integers(1, p), st.integers(0, 50), st.booleans())
    ),
    st.sampled_from(WINDOWS),
)
def test_weights_are_finite_and_sum_to_one_at_every_voxel_and_overlap(case, window):
    patch, stride, extra, is_spread = case
    axis = LatticeAxis(-3, -3 + patch + extra, patch, stride, is_spread)
    weights = [axis_weights(axis, k, window) for k in range(axis.count)]
    assert all(np.isfinite(w).all() and (w >= 0).all() and (w <= 1).all() for w in weights)
    np.testing.assert_allclose(total(axis, window), 1, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
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
def test_long_patches_where_the_window_underflows(patch, stride, window):
    axis = LatticeAxis(0, 2 * patch + 77, patch, stride)
    assert all(np.isfinite(axis_weights(axis, k, window)).all() for k in range(axis.count))
    np.testing.assert_allclose(total(axis, window), 1, atol=1e-6, rtol=0)


def test_a_single_patch_weighs_one_everywhere():
    np.testing.assert_array_equal(
        axis_weights(LatticeAxis(0, 256, 256, 64), 0, BUMP), np.ones(256, np.float32)
    )


def test_weights_are_the_papers_bump_normalised():
    axis = LatticeAxis(0, 40, 16, 8)
    sums = np.zeros(40)
    for k in range(axis.count):
        sums[8 * k : 8 * k + 16] += bump(16)
    for k in range(axis.count):
        np.testing.assert_allclose(
            axis_weights(axis, k, BUMP), bump(16) / sums[8 * k : 8 * k + 16], rtol=1e-6
        )


@settings(deadline=None)
@given(
    st.tuples(*[st.integers(2, 7)] * 3),
    st.tuples(*[st.integers(0, 12)] * 3),
    st.sampled_from(["stride", "spread"]),
    st.sampled_from(FLOORS),
    st.data(),
)
def test_weights_with_a_floor_are_those_of_the_formula(patch, extra, kind, window, data):
    overlap = tuple(data.draw(st.integers(0, p - 1)) for p in patch)
    domain = BoundingBox((-2, 0, 3), zyx.add((-2, 0, 3), zyx.add(patch, extra)))
    lattice = PatchLattice(domain, patch, overlap, kind)
    values = window_of(patch, window)
    total = np.zeros(domain.shape)
    places = {
        index: lattice.patch_box(index).slices_in(domain)
        for index in product(*(range(axis.count) for axis in lattice.axes))
    }
    for where in places.values():
        total[where] += values
    for index, where in places.items():
        weights = patch_weights(lattice, index, window)
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, values / total[where], rtol=1e-6)
        with pytest.raises(ValueError, match="read-only"):
            weights[0, 0, 0] = 3


def test_a_few_weights_with_a_floor_are_kept(monkeypatch):
    lattice = PatchLattice(BoundingBox((0, 0, 0), (60, 60, 60)), (6, 6, 6), (3, 3, 3))
    first = patch_weights(lattice, (4, 4, 4), FLOORS[0])
    assert patch_weights(lattice, (5, 6, 7), FLOORS[0]) is first, "neighbours lie in the same way"
    monkeypatch.setattr(blending, "KEPT_BYTES", 1)
    patch_weights(lattice, (0, 0, 0), FLOORS[0])
    again = patch_weights(lattice, (4, 4, 4), FLOORS[0])
    assert again is not first
    np.testing.assert_array_equal(again, first)


def test_windows_are_those_of_the_tools():
    """Against what nnU-Net and MONAI compute, by their formulas in SciPy and NumPy."""
    shape = (20, 32, 33)
    impulse = np.zeros(shape)
    impulse[tuple(n // 2 for n in shape)] = 1
    importance = ndimage.gaussian_filter(impulse, [n / 8 for n in shape], mode="constant", cval=0)
    importance /= importance.max()
    nnunet = BlendWindow("gaussian", 0.125, is_on_voxel=True)
    z, y, x = (np.exp(nnunet.exponents(n)) for n in shape)
    np.testing.assert_allclose(z[:, None, None] * y[:, None] * x, importance, rtol=1e-6)
    axes = [np.arange(-(n - 1) / 2, (n - 1) / 2 + 1) for n in shape]
    monai = [np.exp(x**2 / (-2 * (0.125 * n) ** 2)) for x, n in zip(axes, shape, strict=True)]
    for n, expected in zip(shape, monai, strict=True):
        window = BlendWindow("gaussian", 0.125)
        np.testing.assert_allclose(np.exp(window.exponents(n)), expected, rtol=1e-12)
