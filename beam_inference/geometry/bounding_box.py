"""Half-open voxel boxes, axes ZYX, and their algebra."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from beam_inference.geometry import zyx
from beam_inference.geometry.zyx import Zyx

AXES = "zyx"


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

    @classmethod
    def of_intervals(cls, intervals: Iterable[tuple[int, int]]) -> BoundingBox:
        """The box of a start and a stop on each axis, ZYX."""
        starts, stops = zip(*intervals, strict=True)
        return cls(zyx.triple(starts), zyx.triple(stops))

    @property
    def shape(self) -> Zyx:
        """Extent on each axis, in voxels."""
        return zyx.subtract(self.stop, self.start)

    @property
    def size(self) -> int:
        """Number of voxels."""
        return math.prod(self.shape)

    def grow(self, margin: Zyx) -> BoundingBox:
        """The box with ``margin`` voxels added before its start and after its stop, per axis."""
        return BoundingBox(zyx.subtract(self.start, margin), zyx.add(self.stop, margin))

    def translate(self, offset: Zyx) -> BoundingBox:
        """The box with every voxel moved by ``offset``."""
        return BoundingBox(zyx.add(self.start, offset), zyx.add(self.stop, offset))

    def coarsen(self, factor: Zyx) -> BoundingBox:
        """The cells of ``factor`` voxels, counted from the origin, that overlap the box."""
        z, y, x = (a // f for a, f in zip(self.start, factor, strict=True))
        return BoundingBox((z, y, x), zyx.ceil_div_each(self.stop, factor))

    def refine(self, factor: Zyx) -> BoundingBox:
        """The voxels of the box's cells if each is ``factor`` voxels, counted from the origin."""
        return BoundingBox(zyx.multiply(self.start, factor), zyx.multiply(self.stop, factor))

    def intersection(self, other: BoundingBox) -> BoundingBox:
        """The voxels in both boxes; where there are none, an empty box at the greater start."""
        start = zyx.maximum(self.start, other.start)
        return BoundingBox(start, zyx.maximum(start, zyx.minimum(self.stop, other.stop)))

    def describe_part_inside(self, other: BoundingBox) -> str:
        """A sentence for a message about a box that is not inside another one."""
        part = self.intersection(other)
        return f"The part inside is {part}." if all(part.shape) else "No part of it is inside."

    def contains(self, other: BoundingBox) -> bool:
        """Whether every voxel of ``other`` is in this box."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def grow_to(self, shape: Zyx, within: BoundingBox) -> BoundingBox:
        """The box, made at least as large as ``shape`` on each axis.

        Args:
            shape: the least extent on each axis, ZYX.
            within: the box in which there is room to grow: first after the stop, then before the
                start. What is still missing is added beyond ``within``, half on each side; an odd
                voxel after the stop.
        """
        stop = zyx.maximum(self.stop, zyx.minimum(zyx.add(self.start, shape), within.stop))
        start = zyx.minimum(self.start, zyx.maximum(zyx.subtract(stop, shape), within.start))
        missing = zyx.maximum((0, 0, 0), zyx.subtract(shape, zyx.subtract(stop, start)))
        start = zyx.subtract(start, zyx.triple(each // 2 for each in missing))
        return BoundingBox(start, zyx.maximum(stop, zyx.add(start, shape)))

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


def grown_shape(shape: Zyx, margin: Zyx) -> Zyx:
    """The shape of a box of ``shape`` after :meth:`BoundingBox.grow` by ``margin``."""
    return zyx.add(zyx.add(shape, margin), margin)


def _commas(point: Zyx) -> str:
    return ", ".join(map(str, point))
