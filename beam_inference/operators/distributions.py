"""Quantiles, mean and standard deviation of a volume's values, from exact counts and sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, model_validator

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Frozen

QUANTILES = (
    0.0,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
    0.75,
    0.9,
    0.95,
    0.98,
    0.99,
    0.995,
    0.998,
    0.999,
    1.0,
)


StoredInteger = Annotated[int, Field(ge=-(2**63), lt=2**64)]
StoredFloat = Annotated[FiniteFloat, Field(ge=-4e38, le=4e38)]
"""A value that a volume may hold, or a mean of such values."""

Deviation = Annotated[FiniteFloat, Field(ge=0, le=8e38)]


class ValueLevels(Frozen):
    """Levels of some values.

    Attributes:
        number: how many values there are.
        values: the values at the quantiles, ascending.
        mean, std: of all values.
        upto: of the values up to each quantile's: their number, the sum of their differences from
            the mean, and the sum of these differences squared. From two of them follow mean and
            standard deviation of the values clipped to two quantiles.
    """

    number: Annotated[int, Field(gt=0, lt=2**63)]
    values: list[StoredInteger | StoredFloat]
    mean: StoredFloat
    std: Deviation
    upto: list[tuple[Annotated[int, Field(ge=0, lt=2**63)], FiniteFloat, FiniteFloat]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.values) != len(self.upto):
            raise ValueError("it does not hold a sum for each quantile")
        if self.values != sorted(self.values):
            raise ValueError("its values at quantiles do not ascend")
        return self

    def clipped_moments(self, low: int, high: int) -> tuple[float, float]:
        """Mean and standard deviation of the values clipped to those at two quantiles.

        Args:
            low: position in ``values`` of the one that lower values become.
            high: position of the one that higher values become.
        """
        below = self.values[low] - self.mean
        above = self.values[high] - self.mean
        count_below, sum_below, squares_below = self.upto[low]
        count_within, sum_within, squares_within = self.upto[high]
        beyond = self.number - count_within
        total = math.fsum((count_below * below, sum_within, -sum_below, beyond * above))
        squares = math.fsum(
            (count_below * below**2, squares_within, -squares_below, beyond * above**2)
        )
        shift = total / self.number
        return self.mean + shift, math.sqrt(max(0.0, squares / self.number - shift**2))


@dataclass(frozen=True, slots=True)
class Upto:
    """All values up to one of them.

    Attributes:
        value: the largest.
        count: how many there are.
        total, squares: their exact sum, and that of their squares.
    """

    value: int | float
    count: int
    total: Fraction
    squares: Fraction


class Distribution(Protocol):
    """Values, each with the number of times that it occurs."""

    @property
    def number(self) -> int:
        """How many values there are."""

    def upto(self, ranks: Sequence[int]) -> list[Upto]:
        """All values up to the one of each rank; 1 is the smallest."""


class ArrayValues:
    """The values of an array in memory, as a :class:`Distribution`."""

    def __init__(self, array: AnyArray) -> None:
        self._values = np.sort(array, axis=None)

    @property
    def number(self) -> int:
        """How many values there are."""
        return self._values.size

    def upto(self, ranks: Sequence[int]) -> list[Upto]:
        """All values up to the one of each rank, which ascend; 1 is the smallest."""
        parts = []
        count = 0
        total = squares = Fraction(0)
        for rank in ranks:
            value = self._values[rank - 1]
            end = int(np.searchsorted(self._values, value, "right"))
            more = self._values[count:end].astype(np.float64)
            total += Fraction(math.fsum(more.tolist()))
            squares += Fraction(math.fsum((more * more).tolist()))
            count = max(count, end)
            parts.append(Upto(value.item(), count, total, squares))
        return parts


def ranks_of(quantiles: Sequence[float], number: int) -> list[int]:
    """Rank of the smallest value that such a share does not exceed (NumPy's ``inverted_cdf``)."""
    # From the decimals as they are written: products in float64 are off by a rank for some numbers
    # of voxels.
    return [max(1, math.ceil(Fraction(str(quantile)) * number)) for quantile in quantiles]


def describe_values(distribution: Distribution) -> ValueLevels:
    """The levels of a distribution; each number is rounded once."""
    parts = distribution.upto(ranks_of(QUANTILES, distribution.number))
    whole = parts[-1]
    mean = whole.total / whole.count

    def squares(part: Upto) -> Fraction:
        return part.squares - 2 * mean * part.total + part.count * mean**2

    return ValueLevels(
        number=whole.count,
        values=[part.value for part in parts],
        mean=float(mean),
        std=math.sqrt(squares(whole) / whole.count),
        upto=[
            (part.count, float(part.total - part.count * mean), float(squares(part)))
            for part in parts
        ],
    )


def sum_of_products(values: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
    """The exact sum of up to 2^16 products of integers of 32 bits and counts.

    64 bits may not hold it, so 15 bits of the counts are added up at a time: a sum of 2^16
    products, each of 32 bits and of 15 bits, stays below 2^63.
    """
    parts = range(0, int(counts.max(initial=0)).bit_length(), 15)
    return sum(int((values * (counts >> bits & 0x7FFF)).sum()) << bits for bits in parts)


class WideSum:
    """A sum of arrays of integers from 0 to 2^62, which may need more than 64 bits."""

    def __init__(self) -> None:
        self._high: Any = 0
        self._low: Any = 0

    def add(self, array: NDArray[np.int64]) -> None:
        """Add an array."""
        self._high = self._high + (array >> _WIDTH)
        self._low = self._low + (array & (2**_WIDTH - 1))

    def as_integers(self) -> NDArray[np.object_]:
        """The sum, as Python's integers."""
        total: NDArray[np.object_] = self._high.astype(object) * 2**_WIDTH + self._low
        return total

    def as_int64(self) -> NDArray[np.int64]:
        """The sum, where 64 bits are known to hold it."""
        total: NDArray[np.int64] = (self._high << _WIDTH) + self._low
        return total


_WIDTH = 30
