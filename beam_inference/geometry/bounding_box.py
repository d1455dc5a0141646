"""Half-open voxel boxes, axes ZYX, and their algebra."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

AXES = "zyx"

Zyx: TypeAlias = tuple[int, int, int]
"""Three integers, one per axis, in the order Z, Y, X."""


@dataclass(frozen=True, slots=True)
class BoundingBox:
    """The voxels ``start <= (z, y, x) < stop``.

    Attributes:
        start: first voxel on each axis, ZYX; may be negative.
        stop: one past the last voxel on each axis, ZYX; equal to ``start`` on an axis where the box
            is empty.

    Raises:
        ValueError: ``stop`` lies before ``start`` on some axis.
    """

    start: Zyx
    stop: Zyx

    def __post_init__(self) -> None:
        if any(b < a for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(
                f"a bounding box cannot stop at {self.stop} before it starts at {self.start} (ZYX)"
            )

    @property
    def shape(self) -> Zyx:
        """Extent on each axis, in voxels."""
        z0, y0, x0 = self.start
        z1, y1, x1 = self.stop
        return (z1 - z0, y1 - y0, x1 - x0)

    @property
    def size(self) -> int:
        """Number of voxels."""
        return math.prod(self.shape)

    def grow(self, margin: Zyx) -> BoundingBox:
        """The box with ``margin`` voxels added before its start and after its stop, per axis."""
        return BoundingBox(_add(self.start, margin, -1), _add(self.stop, margin, 1))

    def intersection(self, other: BoundingBox) -> BoundingBox:
        """The voxels in both boxes; an empty box (at this box's clamped start) where there are none."""
        start = _zyx(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = _zyx(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return BoundingBox(start, _zyx(max(a, b) for a, b in zip(start, stop, strict=True)))

    def contains(self, other: BoundingBox) -> bool:
        """Whether every voxel of ``other`` is in this box."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def grown_to(self, shape: Zyx, within: BoundingBox) -> BoundingBox:
        """At least of a shape: grown at its stop, then its start, inside ``within``, and then beyond its stop."""
        starts = []
        stops = []
        for axis in range(3):
            start = self.start[axis]
            stop = self.stop[axis]
            stop = max(stop, min(start + shape[axis], within.stop[axis]))
            start = min(start, max(stop - shape[axis], within.start[axis]))
            starts.append(start)
            stops.append(max(stop, start + shape[axis]))
        return BoundingBox(_zyx(starts), _zyx(stops))

    def slices_in(self, frame: BoundingBox) -> tuple[slice, slice, slice]:
        """Slices of this box in an array whose first voxel is ``frame.start``.

        Raises:
            ValueError: the box is not inside ``frame`` (a negative slice would wrap around
                silently).
        """
        if not frame.contains(self):
            raise ValueError(f"{self} is not inside {frame}")
        z, y, x = (
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, frame.start, strict=True)
        )
        return (z, y, x)

    def __str__(self) -> str:
        return f"[{_commas(self.start)} to {_commas(self.stop)})"


def _zyx(values: Iterable[int]) -> Zyx:
    z, y, x = values
    return (z, y, x)


def grown_shape(shape: Zyx, margin: Zyx) -> Zyx:
    """The shape, in voxels, of a box of ``shape`` that has grown by ``margin`` on both sides of each axis."""
    return _add(_add(shape, margin, 1), margin, 1)


def _add(point: Zyx, margin: Zyx, sign: int) -> Zyx:
    return _zyx(a + sign * m for a, m in zip(point, margin, strict=True))


def _commas(point: Zyx) -> str:
    return ", ".join(map(str, point))
