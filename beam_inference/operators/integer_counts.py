"""Counts of 8-bit and 16-bit integers: how often each value occurs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.operators.distributions import Upto, ranks_of, sum_of_products


def count_values(
    array: AnyArray, kept: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count how often each value occurs.

    Args:
        array: (C, Z, Y, X), of an 8-bit or 16-bit integer dtype.
        kept: the voxels (Z, Y, X) that count; None for all.

    Returns:
        Counts of each section (Z, values) and of each channel (C, values), from the dtype's lowest
        value on.
    """
    size = 2 ** (8 * array.dtype.itemsize)
    channels, depth = array.shape[:2]
    by_section = np.zeros((depth, size), np.int64)
    by_channel = np.zeros((channels, size), np.int64)
    for z in range(depth):  # one at a time: numbers to count by take eight bytes each
        for channel in range(channels):
            there = array[channel, z].ravel() if kept is None else array[channel, z][kept[z]]
            values = there.astype(np.int64) - lowest(array.dtype)
            counts = np.bincount(values, minlength=size)
            by_section[z] += counts
            by_channel[channel] += counts
    return by_section, by_channel


@dataclass(frozen=True, eq=False)
class IntegerCounts:
    """Counts of integers.

    Attributes:
        counts: how often each value occurs, from the lowest on.
        lowest: the lowest value.
    """

    counts: NDArray[np.int64]
    lowest: int

    @property
    def number(self) -> int:
        """How many values there are."""
        return int(self.counts.sum())

    def without_zeros(self, number: int) -> IntegerCounts:
        """The values without some of the zeros."""
        counts = self.counts.copy()
        counts[-self.lowest] -= number
        return IntegerCounts(counts, self.lowest)

    def upto(self, ranks: Sequence[int]) -> list[Upto]:
        """All values up to the one of each rank; 1 is the smallest."""
        upto = np.cumsum(self.counts)
        values = np.arange(len(upto)) + self.lowest
        return [
            Upto(
                int(values[place]),
                int(upto[place]),
                Fraction(sum_of_products(values[: place + 1], self.counts[: place + 1])),
                Fraction(sum_of_products(values[: place + 1] ** 2, self.counts[: place + 1])),
            )
            for place in np.searchsorted(upto, ranks).tolist()
        ]


def values_at(
    quantiles: tuple[float, ...], counts: NDArray[np.int64], dtype: AnyDtype
) -> list[int]:
    """The smallest values that such shares of all do not exceed (NumPy's ``inverted_cdf``)."""
    upto = np.cumsum(counts)
    ranks = ranks_of(quantiles, int(upto[-1]))
    return [int(place) + lowest(dtype) for place in np.searchsorted(upto, ranks)]


def mean_and_std(counts: NDArray[np.int64], dtype: AnyDtype) -> tuple[float, float]:
    """Mean and standard deviation of all values, from their exact sums."""
    values = np.arange(len(counts)) + lowest(dtype)
    number = int(counts.sum())
    total = sum_of_products(values, counts)
    of_squares = sum_of_products(values**2, counts)
    # Python divides integers of any size with one rounding; the difference is 0 for one value
    # throughout.
    return total / number, math.sqrt((number * of_squares - total**2) / number**2)


def lowest(dtype: AnyDtype) -> int:
    """Lowest value of an integer dtype."""
    return int(np.iinfo(dtype).min)
