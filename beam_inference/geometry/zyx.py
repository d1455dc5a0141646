"""Three numbers, one per axis in the order Z, Y, X: their types, and arithmetic axis by axis.

Import the module and call ``zyx.add(a, b)``, so that the functions do not look like Python's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Zyx: TypeAlias = tuple[int, int, int]
"""Three integers, one per axis, in the order Z, Y, X."""

VoxelSizeNm: TypeAlias = tuple[float, float, float]
"""The extent of a voxel on each axis, in nanometres, in the order Z, Y, X."""

SIZE_TOLERANCE = 0.01
"""Relative difference up to which two voxel sizes count as one: metadata are rounded."""


def is_same_size(a: VoxelSizeNm, b: VoxelSizeNm) -> bool:
    """Whether two voxel sizes are one, but for rounding."""
    return all(abs(p - q) <= SIZE_TOLERANCE * q for p, q in zip(a, b, strict=True))


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient of two integers, rounded up. The divisor is positive."""
    return -(-dividend // divisor)


def round_up(number: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not less than ``number``."""
    return ceil_div(number, unit) * unit


def round_down(number: int, unit: int) -> int:
    """The greatest multiple of ``unit`` that is not greater than ``number``."""
    return number // unit * unit


def triple(values: Iterable[int]) -> Zyx:
    """Three values as a tuple.

    Raises:
        ValueError: there are not exactly three.
    """
    z, y, x = values
    return (z, y, x)


def add(a: Zyx, b: Zyx) -> Zyx:
    """Sum on each axis."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def subtract(a: Zyx, b: Zyx) -> Zyx:
    """Difference ``a - b`` on each axis."""
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


def multiply(a: Zyx, b: Zyx) -> Zyx:
    """Product on each axis."""
    return (a[0] * b[0], a[1] * b[1], a[2] * b[2])


def negative(a: Zyx) -> Zyx:
    """The opposite number on each axis."""
    return (-a[0], -a[1], -a[2])


def minimum(a: Zyx, b: Zyx) -> Zyx:
    """The smaller number on each axis."""
    return (min(a[0], b[0]), min(a[1], b[1]), min(a[2], b[2]))


def maximum(a: Zyx, b: Zyx) -> Zyx:
    """The larger number on each axis."""
    return (max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2]))


def ceil_div_each(a: Zyx, b: Zyx) -> Zyx:
    """Quotient on each axis, rounded up: how many boxes of shape ``b`` cover one of shape ``a``."""
    return (ceil_div(a[0], b[0]), ceil_div(a[1], b[1]), ceil_div(a[2], b[2]))


def round_up_each(a: Zyx, unit: Zyx) -> Zyx:
    """The least multiple of ``unit`` on each axis that is not less than ``a``."""
    return multiply(ceil_div_each(a, unit), unit)


def with_axis(a: Zyx, axis: int, value: int) -> Zyx:
    """A copy of three numbers in which one axis has another value."""
    return triple(value if k == axis else n for k, n in enumerate(a))


def as_flag(shape: Zyx) -> str:
    """A shape as flags take it, such as 64x64x64."""
    return "x".join(map(str, shape))
