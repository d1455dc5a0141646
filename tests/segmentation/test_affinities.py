"""Affinities as integers, and thresholds for their means."""

import numpy as np
import pytest

from beam_inference.segmentation.affinities import as_limit, as_summands


@pytest.mark.parametrize("threshold", [0.2, 0.45, 0.6, 0.7, 0.8, -0.3, 12.1])
def test_a_threshold_includes_itself_as_a_number_and_as_it_is_stored(threshold):
    """Three edges of 1 and two of 0 have a mean of 0.6, whose float32 is greater."""
    limit = as_limit(threshold, floats=True)
    one = as_summands(np.float32([1]))[0]
    assert threshold * one >= limit
    assert as_summands(np.float32([threshold]))[0] >= limit
    assert as_summands(np.float32([threshold - 1e-6]))[0] < limit


def test_three_of_five_reach_three_fifths():
    sums = as_summands(np.float32([1, 1, 1, 0, 0])).sum()
    assert sums / 5 >= as_limit(0.6, floats=True)


def test_thresholds_of_integers_are_their_own():
    assert as_limit(150, floats=False) == 150
