"""Counts and exact sums of float32 values, in two passes.

The first pass sorts values into bins by their upper 16 bits (sign, exponent and seven bits of the
mantissa), and adds up the lower 16 bits of each bin's values and their squares: these sums are
integers, and with them that of all values is exact. The second pass counts the values of the few
bins that hold a quantile one by one. So quantiles, mean and standard deviation are exact, and do
not depend on how the volume was cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.operators.distributions import Upto, sum_of_products

BINS = 2**16
"""Number of bins, and of the values of each."""
_PIECE_VOXELS = 2**21
"""Voxels that are counted at a time: so many squares of 16 bits are added exactly in float64."""
_ASCENDING: NDArray[np.int64] = np.concatenate(
    [np.arange(BINS - 1, BINS // 2 - 1, -1), np.arange(BINS // 2)]
)
"""The bins from the lowest values to the highest: with a sign, greater bits are lower values."""


def count_floats(
    array: AnyArray, kept: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count values in bins.

    Args:
        array: (C, Z, Y, X), float32.
        kept: the voxels (Z, Y, X) that count; None for all.

    Returns:
        Sums of each section (Z, sign and exponent, 6) as :func:`section_moments` takes them, and
        for each channel (C, BINS, 3) the number of values in each bin, the sum of their lower 16
        bits, and the sum of the squares of these.

    Raises:
        ValueError: there are NaN or infinite values.
    """
    channels, depth = array.shape[:2]
    by_section = np.zeros((depth, 512, 6), np.int64)
    by_channel = np.zeros((channels, BINS, 3), np.int64)
    for z in range(depth):
        for channel in range(channels):
            there = array[channel, z]
            counts = _count_bins(there if kept is None else there[kept[z]])
            by_section[z] += _by_exponent(counts)
            by_channel[channel] += counts
    numbers = by_channel[:, :, 0]
    if numbers[:, 0x7F80:0x8000].any() or numbers[:, 0xFF80:].any():
        raise ValueError("NaN or infinite values")
    return by_section, by_channel


def _count_bins(values: AnyArray) -> NDArray[np.int64]:
    counts = np.zeros((BINS, 3), np.int64)
    flat = values.reshape(-1)
    for start in range(0, flat.size, _PIECE_VOXELS):
        bits = _bits(flat[start : start + _PIECE_VOXELS])
        bins = (bits >> 16).astype(np.int64)
        low = (bits & 0xFFFF).astype(np.float64)
        counts[:, 0] += np.bincount(bins, minlength=BINS)
        counts[:, 1] += np.bincount(bins, low, BINS).astype(np.int64)
        counts[:, 2] += np.bincount(bins, low * low, BINS).astype(np.int64)
    return counts


def _bits(values: AnyArray) -> NDArray[np.uint32]:
    """The bits of float32 values; -0 is 0."""
    bits: NDArray[np.uint32] = np.add(values, np.float32(0), dtype=np.float32).view(np.uint32)
    return bits


def _by_exponent(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of bins (BINS, 3) over all that have sign and exponent in common (512, 6)."""
    number, low, squares = np.moveaxis(counts.reshape(512, 128, 3), 2, 0)
    high = np.arange(128) + 128 * (np.arange(512) % 256 > 0)[:, None]
    return np.stack(
        [
            each.sum(axis=1)
            for each in (number, number * high, number * high**2, low, low * high, squares)
        ],
        axis=1,
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """A number of values, and their exact sums, in units of the smallest float32 and its square."""

    number: int = 0
    total: int = 0
    squares: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.number + other.number, self.total + other.total, self.squares + other.squares
        )


_UNIT = Fraction(1, 2**149)


def _sums_of_exponent(exponent: int, sums: Sequence[int]) -> _Sums:
    """Sums of all values with a sign and exponent, from those of their mantissas."""
    number, high, high_squares, low, products, low_squares = map(int, sums)
    shift = max(exponent % 256, 1) - 1
    sign = -1 if exponent >= 256 else 1
    total = sign * ((high << 16) + low) << shift
    squares = (high_squares << 32) + (products << 17) + low_squares << 2 * shift
    return _Sums(number, total, squares)


def _sums_of_bin(place: int, number: int, low: int, squares: int) -> _Sums:
    exponent = place >> 7
    high = (place & 127) + (128 if exponent % 256 else 0)
    sums = (number, number * high, number * high**2, low, low * high, squares)
    return _sums_of_exponent(exponent, sums)


def section_moments(sums: NDArray[np.object_]) -> tuple[float, float]:
    """Mean and standard deviation of a section, from its sums (sign and exponent, 6)."""
    there = [int(exponent) for exponent in np.flatnonzero(sums[:, 0])]
    whole = sum((_sums_of_exponent(each, sums[each].tolist()) for each in there), _Sums())
    mean = whole.total * _UNIT / whole.number
    variance = whole.squares * _UNIT**2 / whole.number - mean**2
    return float(mean), math.sqrt(variance)


@dataclass(frozen=True, eq=False)
class FloatCounts:
    """Counts of float32 values.

    Attributes:
        bins: for each bin its values' number, and sums of their lower bits (BINS, 3), as Python's
            integers.
        refined: how often each value of some bins occurs, by the bin.
    """

    bins: NDArray[np.object_]
    refined: Mapping[int, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """How many values there are."""
        return int(self.bins[:, 0].sum())

    def without_zeros(self, number: int) -> FloatCounts:
        """The values without some of the zeros."""
        bins = self.bins.copy()
        bins[0, 0] -= number
        refined = dict(self.refined)
        if 0 in refined:
            refined[0] = refined[0].copy()
            refined[0][0] -= number
        return FloatCounts(bins, refined)

    @cached_property
    def _places(self) -> NDArray[np.int64]:
        """The bins that hold values, in ascending order."""
        there: NDArray[np.bool_] = self.bins[_ASCENDING, 0] > 0
        return _ASCENDING[there]

    @cached_property
    def _numbers(self) -> NDArray[np.int64]:
        """Number of values up to the end of each of these."""
        numbers = self.bins[self._places, 0].astype(np.int64)
        upto: NDArray[np.int64] = numbers.cumsum()
        return upto

    @cached_property
    def _before(self) -> list[_Sums]:
        """Sums of all values below each of these."""
        sums = (_sums_of_bin(place, *self.bins[place].tolist()) for place in self._places.tolist())
        return list(accumulate(sums, initial=_Sums()))

    def bins_of(self, ranks: Sequence[int]) -> list[int]:
        """The bins that hold the values of these ranks."""
        places: list[int] = self._places[np.searchsorted(self._numbers, ranks)].tolist()
        return places

    def upto(self, ranks: Sequence[int]) -> list[Upto]:
        """All values up to the one of each rank, whose bins must be refined; 1 is the smallest."""
        return [self._upto(rank) for rank in ranks]

    def _upto(self, rank: int) -> Upto:
        order = int(np.searchsorted(self._numbers, rank))
        place = int(self._places[order])
        before = self._before[order]
        ascending = slice(None, None, -1 if place >= BINS // 2 else 1)
        counts = self.refined[place][ascending]
        last = int(np.searchsorted(np.cumsum(counts), rank - before.number))
        low = np.arange(BINS)[ascending][: last + 1]
        counts = counts[: last + 1]
        within = _sums_of_bin(
            place,
            int(counts.sum()),
            sum_of_products(low, counts),
            sum_of_products(low**2, counts),
        )
        sums = before + within
        bits = np.uint32(place << 16 | int(low[-1]))
        return Upto(
            float(bits.view(np.float32)),
            sums.number,
            sums.total * _UNIT,
            sums.squares * _UNIT**2,
        )


def count_in_bins(values: AnyArray, bins: Sequence[int]) -> NDArray[np.int64]:
    """Count how often each value of some bins occurs, (bins, BINS)."""
    counts = np.zeros((len(bins), BINS), np.int64)
    position = np.full(BINS, -1, np.int64)
    position[list(bins)] = np.arange(len(bins))
    flat = values.reshape(-1)
    for start in range(0, flat.size, _PIECE_VOXELS):
        bits = _bits(flat[start : start + _PIECE_VOXELS])
        where = position[bits >> 16]
        inside = where >= 0
        index = where[inside] * BINS + (bits[inside] & 0xFFFF)
        counts += np.bincount(index, minlength=counts.size).reshape(counts.shape)
    return counts
