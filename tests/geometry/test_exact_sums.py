"""Sums of rounded terms: exact, so the same in any order and in any groups, on every device."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.torch_device import TorchDevice
from beam_inference.geometry.blending import BUMP, axis_weights
from beam_inference.geometry.exact_sums import (
    LARGEST_BOUND,
    STEPS_PER_BOUND,
    bound_above,
    bound_after_trial,
    largest_exact,
    largest_rounding,
    step_of,
)
from beam_inference.geometry.grids import LatticeAxis

MAGNITUDES = st.floats(1e-6, 1e6)


def weighted_terms(data, bound):
    """Weights and predictions of all patches that cover a few voxels of an axis."""
    patch = data.draw(st.integers(2, 24), "patch")
    overlap = data.draw(st.integers(0, patch - 1), "overlap")
    axis = LatticeAxis(0, data.draw(st.integers(patch, 3 * patch)), patch, patch - overlap)
    seed = data.draw(st.integers(0, 2**32 - 1), "seed")
    random = np.random.default_rng(seed)
    most = largest_exact(bound)
    terms = []
    for k in range(axis.count):
        prediction = random.uniform(-most, most, patch).astype(np.float32)
        if data.draw(st.booleans(), "as large as they may be"):
            prediction[:] = most * random.choice([-1, 1])
        terms.append((axis.patch_start(k), axis_weights(axis, k, BUMP), prediction))
    return axis, terms


def add_up(device, axis, terms, bound, groups):
    """Sums of groups of terms, each group into zeros of its own, and the sum of these."""
    on_host = isinstance(device, NumpyDevice)
    total = np.zeros(axis.stop, np.float32)
    for group in groups:
        sums = device.empty((axis.stop,))
        sums[:] = 0
        for number in group:
            start, weights, prediction = terms[number]
            in_steps = device.upload(weights * np.float32(STEPS_PER_BOUND / bound))
            weighted = device.empty((axis.patch,))
            device.multiply(device.upload(prediction.copy()), in_steps, weighted)
            device.add_rounded(sums[start : start + axis.patch], weighted, step_of(bound))
        total += sums if on_host else sums.numpy()
    return total


@settings(deadline=None, max_examples=150)
@given(st.data(), MAGNITUDES, st.randoms())
def test_any_order_and_any_groups_on_any_device_give_the_same_bits(data, magnitude, random):
    bound = bound_above(magnitude)
    axis, terms = weighted_terms(data, bound)
    numbers = range(len(terms))
    expected = add_up(NumpyDevice(), axis, terms, bound, [numbers])
    for device in (NumpyDevice(), TorchDevice(torch.device("cpu"))):
        for _ in range(3):
            order = random.sample(numbers, len(terms))
            cuts = sorted(random.sample(range(len(terms) + 1), random.randint(0, len(terms))))
            pairs = zip([0, *cuts], [*cuts, len(terms)], strict=True)
            groups = [order[first:last] for first, last in pairs]
            assert add_up(device, axis, terms, bound, groups).tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=150)
@given(st.data(), MAGNITUDES)
def test_sums_are_exact_and_within_the_stated_bound_of_the_real_ones(data, magnitude):
    bound = bound_above(magnitude)
    axis, terms = weighted_terms(data, bound)
    sums = add_up(NumpyDevice(), axis, terms, bound, [range(len(terms))])
    step = Fraction(step_of(bound))
    exact = [Fraction(0)] * axis.stop
    real = [Fraction(0)] * axis.stop
    most = [0] * axis.stop
    for start, weights, prediction in terms:
        rounded = np.rint(prediction * (weights * np.float32(STEPS_PER_BOUND / bound)))
        for i in range(axis.patch):
            exact[start + i] += int(rounded[i]) * step
            real[start + i] += Fraction(float(prediction[i])) * Fraction(float(weights[i]))
            most[start + i] += 1
    assert [Fraction(float(value)) for value in sums] == exact
    assert max(most) == axis.most_patches
    for value, expected in zip(sums, real, strict=True):
        # a product of float32 numbers is rounded by 2^-24 of it
        allowed = largest_rounding(bound, axis.most_patches) + 2 * bound * 2.0**-23
        assert abs(float(Fraction(float(value)) - expected)) <= allowed


def test_beyond_twice_the_bound_sums_may_round():
    """Why predictions beyond the bound are counted: float32 has no odd numbers above 2^24."""
    device = NumpyDevice()
    terms = np.array([2.0**24 + 2, -1, -1, -1], np.float32)
    results = set()
    for order in (terms, terms[::-1]):
        sums = np.zeros(1, np.float32)
        for term in order:
            device.add_rounded(sums, np.array([term], np.float32), 1.0)
        results.add(float(sums[0]))
    assert len(results) == 2


def test_halves_are_rounded_to_even_and_nan_passes():
    for device in (NumpyDevice(), TorchDevice(torch.device("cpu"))):
        sums = device.upload(np.zeros(6, np.float32))
        terms = device.upload(np.array([0.5, 1.5, 2.5, -0.5, np.nan, np.inf], np.float32))
        device.add_rounded(sums, terms, 0.25)
        np.testing.assert_array_equal(np.asarray(sums), [0, 0.5, 0.5, 0, np.nan, np.inf])
        assert not np.signbit(np.asarray(sums)[3]), "zero and minus zero are one sum"


@pytest.mark.parametrize(
    ("magnitude", "bound"),
    [(1.0, 1.0), (1.0000001, 2.0), (0.75, 1.0), (2.0**-60, 2.0**-60), (3e-7, 2.0**-21)],
)
def test_the_bound_is_a_power_of_two(magnitude, bound):
    assert bound_above(magnitude) == bound


@given(MAGNITUDES)
def test_the_least_power_of_two_above(magnitude):
    bound = bound_above(magnitude)
    assert bound / 2 < magnitude <= bound
    assert np.log2(bound) == np.floor(np.log2(bound))


@pytest.mark.parametrize("magnitude", [0.0, -1.0, float("nan"), float("inf"), 1e30, 1e-30])
def test_bounds_out_of_reach_are_refused(magnitude):
    with pytest.raises(ValueError, match="expected a magnitude from"):
        bound_above(magnitude)


def test_after_a_trial_there_is_a_margin_and_never_no_bound():
    assert bound_after_trial(1.0) == 1.0
    assert bound_after_trial(5.0) == 8.0
    assert 1.99 < largest_exact(1.0) < 2
    assert bound_after_trial(0.0) == 1 / LARGEST_BOUND
    assert bound_after_trial(1e37) == LARGEST_BOUND


@settings(max_examples=300)
@given(st.integers(1, 9), st.integers(0, 8), st.integers(0, 40))
def test_the_most_patches_of_a_voxel_are_counted(patch, overlap, more):
    axis = LatticeAxis(3, 3 + patch + more, patch, patch - min(overlap, patch - 1))
    counts = [len(axis.touching(voxel, voxel + 1)) for voxel in range(3, axis.stop)]
    assert axis.most_patches == max(counts)
