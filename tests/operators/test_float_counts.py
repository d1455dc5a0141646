"""Counts of floats against exact sums of fractions, and NumPy's quantiles."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from beam_inference.operators import float_counts
from beam_inference.operators.distributions import (
    QUANTILES,
    WideSum,
    describe_values,
    ranks_of,
)
from beam_inference.operators.float_counts import (
    FloatCounts,
    count_floats,
    count_in_bins,
    section_moments,
)

SHAPES = st.tuples(st.just(1), *[st.integers(1, 4)] * 3)
ARRAYS = hnp.arrays(
    "f4",
    SHAPES,
    elements=st.floats(allow_nan=False, allow_infinity=False, width=32)
    | st.sampled_from([0.0, -0.0, 1.0, 2.0**-149, -(2.0**-130), 3.4e38])
    | st.floats(0.984375, 1.015625, width=32),
)


def counts_of(array, zeros_outside=0):
    """Counts of (1, Z, Y, X) as both passes make them, without some zeros."""
    bins = FloatCounts(count_floats(array)[1][0].astype(object)).without_zeros(zeros_outside)
    places = sorted(set(bins.bins_of(ranks_of(QUANTILES, bins.number))))
    refined = dict(zip(places, count_in_bins(array[0], places), strict=True))
    if 0 in refined:
        refined[0][0] -= zeros_outside
    return FloatCounts(bins.bins, refined)


def moments(values):
    """Mean and standard deviation, exact, then rounded."""
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    return float(mean), math.sqrt(sum((value - mean) ** 2 for value in exact) / len(exact))


@settings(deadline=None, max_examples=40)  # exact sums of many bins
@given(ARRAYS)
def test_levels_are_exact(array):
    found = describe_values(counts_of(array))
    assert found.values == np.quantile(array, QUANTILES, method="inverted_cdf").tolist()
    assert (found.mean, found.std) == moments(array.ravel().tolist())
    for section, sums in zip(array[0], count_floats(array)[0], strict=True):
        assert section_moments(sums.astype(object)) == moments(section.ravel().tolist())


@settings(deadline=None, max_examples=40)
@given(ARRAYS, st.integers(0, 16), st.integers(0, 16))
def test_clipped_values_have_the_moments_that_follow(array, one, other):
    low, high = sorted((one, other))
    values = np.quantile(array, QUANTILES, method="inverted_cdf").astype(float)
    clipped = array.ravel().astype(float).clip(values[low], values[high])
    found = describe_values(counts_of(array)).clipped_moments(low, high)
    # sums of the whole are rounded once: to a share of its largest difference from the mean
    largest = float(abs(array.astype(float) - moments(array.ravel().tolist())[0]).max())
    expected = moments(clipped.tolist())
    assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-12 * largest)
    assert found[1] == pytest.approx(expected[1], rel=1e-12, abs=1e-6 * largest)


def test_many_values_of_one_bin_are_added_exactly(monkeypatch):
    monkeypatch.setattr(float_counts, "_PIECE_VOXELS", 1000)  # in several pieces
    array = np.full((1, 3, 40, 50), np.nextafter(np.float32(2), np.float32(0)))
    found = describe_values(counts_of(array))
    assert (found.mean, found.std) == (float(array[0, 0, 0, 0]), 0)
    assert set(found.values) == {found.mean}


def test_zeros_can_be_left_out():
    array = np.random.default_rng(1).normal(size=(1, 4, 5, 6)).astype(np.float32)
    array[0, :, 2:] = 0
    array[0, 0, 0, 0] = -0.0
    found = describe_values(counts_of(array, zeros_outside=30))
    rest = np.concatenate([array[array != 0], np.zeros(array.size - 30 - (array != 0).sum())])
    assert found.values == np.quantile(rest, QUANTILES, method="inverted_cdf").tolist()
    assert (found.mean, found.std) == moments(rest.tolist())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value):
    array = np.ones((1, 2, 2, 2), np.float32)
    array[0, 1, 1, 1] = value
    with pytest.raises(ValueError, match="NaN or infinite values"):
        count_floats(array)


def test_wide_sums_do_not_overflow():
    total = WideSum()
    for _ in range(5):
        total.add(np.array([2**62, 1, 0]))
    assert total.as_integers().tolist() == [5 * 2**62, 5, 0]
