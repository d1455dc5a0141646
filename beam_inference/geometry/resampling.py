"""Resampling between two grids of voxels that cover the same box of space.

On each axis, voxel i of the target lies at ``(i + 0.5) * n / m - 0.5`` among the n voxels of the
source, where m is the number of the target's; beyond the ends the outermost voxels go on. So it is
the shapes alone that say where voxels lie, as in ``skimage.transform.resize`` with mode "edge" and
no antialiasing, which is ``scipy.ndimage.zoom`` with ``grid_mode`` and mode "nearest".

A voxel's value depends on its own place and on the source's values there, never on the box that is
asked for: weights are made for each place by itself, and values are added in one order. So the same
voxel has the same bits in whatever boxes a volume is resampled.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import FARTHEST, Origin, origin_at
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, ceil_div, triple
from beam_inference.limits import Numbers, minimum

Order: TypeAlias = Literal[0, 1, 3]
"""The order of the spline between voxels: nearest voxel, linear, or cubic."""

ANISOTROPY = 3.0
"""Ratio of voxel extents beyond which ``separate_z: auto`` takes one axis by nearest voxels."""

_REACH = {0: 0, 1: 1, 3: 16}
"""Voxels on each side that a value is made of, by the order.

A cubic spline through all voxels depends on all of them, by 0.27 to the power of the distance:
those 16 voxels away count for 1e-9.
"""

_POLE = math.sqrt(3.0) - 2.0
"""Ratio of the coefficients of a cubic B-spline that is 1 at one voxel and 0 at all others."""

_PLACE_DECIMALS = 9
"""Decimals of places that sizes in nanometres give: half way between voxels is exactly so."""

_TILE = 2**13
"""Values of a row that are worked on at a time, so that the rows they are made of stay in cache."""


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """Where the voxels of a target lie in a source that need not cover the same space.

    Attributes:
        first: the place of the target's first voxel, in voxels from the source's first.
        step: from each voxel of the target to the next, in voxels of the source.
    """

    first: float
    step: float


@dataclass(frozen=True, slots=True)
class AxisResampling:
    """Resampling on one axis.

    Attributes:
        start, length: of the source, in its voxels.
        target_start, target_length: of the target, in its own.
        order: of the spline.
        repeat: how many neighbours of the target lie at the same place of the source, and have one
            value; the target's length is a multiple of it.
        place: where the target's voxels lie, if that does not follow from the lengths, because
            source and target end in different places.
    """

    start: int
    length: int
    target_start: int
    target_length: int
    order: Order
    repeat: int = 1
    place: AxisPlace | None = None

    @property
    def is_identity(self) -> bool:
        """Whether source and target have the same voxels."""
        return self.place is None and self.length == self.target_length and self.repeat == 1

    def coordinates(self, start: int, stop: int) -> NDArray[np.float64]:
        """Where the target's voxels ``start … stop`` lie, in voxels from the source's first."""
        return self._place(np.arange(start, stop))

    def _place(self, voxels: NDArray[np.int64]) -> NDArray[np.float64]:
        number = (voxels - self.target_start) // self.repeat
        if self.place is not None:
            place = self.place.first + number.astype(np.float64) * self.place.step
            return np.round(place, _PLACE_DECIMALS)
        step = self.length / (self.target_length // self.repeat)
        return (number.astype(np.float64) + 0.5) * step - 0.5

    def source_interval(self, start: int, stop: int) -> tuple[int, int]:
        """The source's voxels that the target's voxels ``start … stop`` are made of."""
        if stop <= start:
            return self.start, self.start
        if self.is_identity:
            shift = self.start - self.target_start
            return start + shift, stop + shift
        nearest = self._nearest(self._place(np.array([start, stop - 1])))
        reach = _REACH[self.order]
        low = nearest[0] - max(0, reach - 1)
        high = nearest[1] + reach
        most = self.length - 1
        return (
            self.start + int(np.clip(low, 0, most)),
            self.start + int(np.clip(high, 0, most)) + 1,
        )

    def target_interval(self, start: int, stop: int) -> tuple[int, int]:
        """The target's voxels that cover the source's voxels ``start … stop``."""
        first = (start - self.start) * self.target_length // self.length
        last = ceil_div((stop - self.start) * self.target_length, self.length)
        return self.target_start + first, self.target_start + last

    def target_made_of(self, start: int, stop: int) -> tuple[int, int]:
        """The target's voxels that are made of the source's voxels ``start … stop`` alone."""
        first = self.target_start
        voxels = range(first, first + self.target_length)
        low = bisect_left(voxels, start, key=lambda v: self.source_interval(v, v + 1)[0])
        high = bisect_right(voxels, stop, key=lambda v: self.source_interval(v, v + 1)[1])
        return first + low, first + max(low, high)

    def source_voxel(self, voxel: int) -> int:
        """The source's voxel that holds the start of a voxel of the target, or goes on beyond."""
        return self.start + (voxel - self.target_start) * self.length // self.target_length

    def source_length(self, length: Numbers) -> Numbers:
        """The most voxels of the source that as many neighbours of the target are made of."""
        if self.is_identity:
            return length
        places = length + self.repeat - 1
        if self.place is None:
            voxels = places * self.length // self.target_length
        else:  # an upper bound, of whole numbers
            voxels = places * math.ceil(self.place.step * 1024) // (1024 * self.repeat)
        most: Numbers = np.minimum(voxels + 2 * _REACH[self.order] + 2, self.length)
        return int(most) if isinstance(length, int) else most

    def taps(
        self, start: int, stop: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """What the target's voxels ``start … stop`` are made of.

        A value is that of the nearest voxel below (the nearest at all, of order 0), and the
        weighted differences of others from it. So a constant remains exactly what it is.

        Returns:
            The source's voxel of each; its other voxels, shape (voxels, others); their weights.
        """
        place = self.coordinates(start, stop)
        base = self._nearest(place)
        share = (place - base)[:, None]
        if self.order == 3:
            offset = np.array([k for k in range(1 - _REACH[3], _REACH[3] + 1) if k])
            weights = _spline_weights(share, offset)
        elif self.order == 1:
            offset = np.array([1])
            weights = share
        else:
            offset = np.array([], np.int64)
            weights = share[:, :0]
        most = self.length - 1
        others = np.clip(base[:, None] + offset, 0, most) + self.start
        return np.clip(base, 0, most) + self.start, others, weights.astype(np.float32)

    def _nearest(self, place: NDArray[np.float64]) -> NDArray[np.int64]:
        """The voxel below each place; of order 0 the nearest one, half way the one above."""
        return np.floor(place + 0.5 if self.order == 0 else place).astype(np.int64)


def _spline_weights(share: NDArray[np.float64], offset: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights of voxels at offsets from a voxel, for places a share of a voxel beyond it.

    The cubic spline through values is a sum of B-splines, whose coefficients are a filter of the
    values. Each of the four B-splines that reach a place is filtered by itself here.
    """
    rest = 1.0 - share
    square = share * share
    near = 2.0 / 3.0 - square + 0.5 * square * share
    next_one = 2.0 / 3.0 - rest * rest + 0.5 * rest * rest * rest
    splines = (rest * rest * rest / 6.0, near, next_one, square * share / 6.0)
    weights = np.zeros((len(share), len(offset)))
    for place, spline in zip((-1, 0, 1, 2), splines, strict=True):
        distance = np.abs(place - offset)
        weights += spline * (math.sqrt(3.0) * _POLE**distance)
    return weights


@dataclass(frozen=True, slots=True)
class Resampling:
    """A box of voxels as other voxels that cover the same space.

    Attributes:
        source: the box, in its own voxels.
        target: the same space in the other voxels.
        orders: order of the spline on each axis, ZYX.
        repeat: voxels of the target that have one value, on each axis, ZYX.
        places: where the target's voxels lie on each axis, ZYX, if source and target end in
            different places.

    Raises:
        ValueError: a box is empty, or ``repeat`` is below 1 on some axis.
    """

    source: BoundingBox
    target: BoundingBox
    orders: tuple[Order, Order, Order]
    repeat: Zyx = (1, 1, 1)
    places: tuple[AxisPlace, AxisPlace, AxisPlace] | None = None

    def __post_init__(self) -> None:
        if not (self.source.size and self.target.size and min(self.repeat) > 0):
            raise ValueError(
                f"{self.source} cannot be resampled to {self.target}, in voxels of {self.repeat}"
            )

    @property
    def axes(self) -> tuple[AxisResampling, AxisResampling, AxisResampling]:
        """The resampling of each axis, ZYX."""
        z, y, x = (
            AxisResampling(
                self.source.start[axis],
                self.source.shape[axis],
                self.target.start[axis],
                self.target.shape[axis],
                self.orders[axis],
                self.repeat[axis],
                None if self.places is None else self.places[axis],
            )
            for axis in range(3)
        )
        return (z, y, x)

    def source_box(self, box: BoundingBox) -> BoundingBox:
        """The source's voxels that a box inside the target is made of."""
        intervals = [
            axis.source_interval(start, stop)
            for axis, start, stop in zip(self.axes, box.start, box.stop, strict=True)
        ]
        return BoundingBox.of_intervals(intervals)

    def target_box(self, box: BoundingBox) -> BoundingBox:
        """The target's voxels that cover a box inside the source."""
        intervals = [
            axis.target_interval(start, stop)
            for axis, start, stop in zip(self.axes, box.start, box.stop, strict=True)
        ]
        return BoundingBox.of_intervals(intervals)

    def target_made_of(self, box: BoundingBox) -> BoundingBox:
        """The target's voxels that are made of a box of the source alone."""
        intervals = [
            axis.target_made_of(start, stop)
            for axis, start, stop in zip(self.axes, box.start, box.stop, strict=True)
        ]
        return BoundingBox.of_intervals(intervals)

    def source_shape(self, shape: tuple[Numbers, Numbers, Numbers]) -> tuple[Numbers, ...]:
        """The most voxels of the source, ZYX, that a box of a shape in the target is made of."""
        return tuple(
            axis.source_length(length) for axis, length in zip(self.axes, shape, strict=True)
        )

    def source_blocks(
        self, shape: tuple[Numbers, Numbers, Numbers], block_shape: Zyx
    ) -> tuple[Numbers, ...]:
        """The largest shape of storage blocks that a box of a shape in the target is made of.

        Args:
            shape: of the box, in the target's voxels.
            block_shape: of the source's storage blocks, in its voxels.
        """
        needed = zip(self.source_shape(shape), block_shape, self.source.shape, strict=True)
        return tuple(
            minimum((length + block - 2) // block + 1, ceil_div(whole, block)) * block
            for length, block, whole in needed
        )

    def nearest_voxels(self, wanted: Sequence[slice]) -> list[NDArray[np.int64]]:
        """The source's voxels that lie nearest to some of the target's, on each axis."""
        places = []
        for axis, part in zip(self.axes, wanted, strict=True):
            bases, _, _ = replace(axis, order=0).taps(part.start, part.stop)
            places.append(bases[:: part.step])
        return places

    def resample(self, array: AnyArray, source: BoundingBox, box: BoundingBox) -> AnyArray:
        """Resample the voxels of a box.

        Args:
            array: values of ``source``, shape (channels, *source.shape).
            source: a box that holds ``source_box(box)``.
            box: the voxels wanted, inside the target.

        Returns:
            float32, shape (channels, *box.shape); of order 0 on all axes, the array's dtype.
        """
        wanted = self.source_box(box)
        array = array[(slice(None), *wanted.slices_in(source))]
        axes = self.axes
        # what makes the array smallest comes first
        for axis in sorted(range(3), key=lambda k: axes[k].target_length / axes[k].length):
            if not axes[axis].is_identity:
                first = wanted.start[axis]
                array = _resample_axis(array, axis, axes[axis], first, box)
        return array.astype(np.float32, copy=False) if any(self.orders) else array


def _resample_axis(
    array: AnyArray, axis: int, resampling: AxisResampling, first: int, box: BoundingBox
) -> AnyArray:
    """Resample an array (C, Z, Y, X) on one axis, on which it begins at voxel ``first``."""
    bases, others, weights = resampling.taps(box.start[axis], box.stop[axis])
    bases = bases - first
    if resampling.order == 0:
        return array.take(bases, axis + 1)
    others = others - first
    shape = (*array.shape[: axis + 1], len(bases), *array.shape[axis + 2 :])
    result = arrays.empty(shape, np.float32)
    before = math.prod(array.shape[: axis + 1])
    after = math.prod(array.shape[axis + 2 :])
    values = array.reshape(before, array.shape[axis + 1], after)
    made = result.reshape(before, len(bases), after)
    rows = max(1, _TILE // max(1, after))
    for row in range(0, before, rows):
        for column in range(0, after, _TILE):
            tile = (slice(row, row + rows), slice(None), slice(column, column + _TILE))
            part = np.ascontiguousarray(values[tile].transpose(1, 0, 2), np.float32)
            made[tile] = _combine(part, bases, others, weights).transpose(1, 0, 2)
    return result


def _combine(
    part: NDArray[np.float32],
    bases: NDArray[np.int64],
    others: NDArray[np.int64],
    weights: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Values along the first axis: those of ``bases``, and weighted differences from them."""
    result = part[bases]
    difference = np.empty_like(part[0])
    for row, base, voxels, shares in zip(result, bases, others, weights, strict=True):
        for voxel, share in zip(voxels, shares, strict=True):
            if voxel != base:  # beyond the end, where there is no difference
                np.subtract(part[voxel], part[base], out=difference)
                difference *= share
                np.add(row, difference, out=row)
    return result


def extend_to_cells(resampling: Resampling, cell: Zyx) -> Resampling:
    """The resampling to more voxels beyond the target's stop, up to a multiple of a cell's.

    Those have the values of the outermost ones; all others stay what they are.
    """
    target = resampling.target
    shape = triple(ceil_div(n, k) * k for n, k in zip(target.shape, cell, strict=True))
    if shape == target.shape:
        return resampling
    steps = [
        source * repeat / made
        for source, made, repeat in zip(
            resampling.source.shape, target.shape, resampling.repeat, strict=True
        )
    ]
    z, y, x = (AxisPlace(step / 2 - 0.5, step) for step in steps)
    stop = triple(start + length for start, length in zip(target.start, shape, strict=True))
    return replace(resampling, target=BoundingBox(target.start, stop), places=(z, y, x))


@dataclass(frozen=True, slots=True)
class Grid:
    """The voxels that cover a volume.

    Attributes:
        bounds: the voxels.
        voxel_size_nm: their extent, ZYX.
        rest: how far the first lies beyond its whole coordinates, in voxels, ZYX.
    """

    bounds: BoundingBox
    voxel_size_nm: VoxelSizeNm
    rest: tuple[float, float, float]

    def with_voxel_size(self, voxel_size_nm: VoxelSizeNm) -> Grid:
        """The grid of the nearest whole number of voxels of another size, at least one.

        Their size is such that they cover the same space exactly.

        Raises:
            ValueError: a size is not above 0, or there would be more voxels than can be counted.
        """
        shape = self.bounds.shape
        sizes = list(zip(self.voxel_size_nm, voxel_size_nm, strict=True))
        wanted_counts = [
            own / wanted * length if own > 0 and wanted > 0 else math.nan
            for (own, wanted), length in zip(sizes, shape, strict=True)
        ]
        if not all(count <= FARTHEST for count in wanted_counts):  # NaN is not
            raise ValueError(
                f"{list(shape)} voxels of {list(self.voxel_size_nm)} nm (z, y, x) cannot be made "
                f"into voxels of {list(voxel_size_nm)} nm: expected sizes above 0, and at most "
                f"{FARTHEST:,} voxels along an axis"
            )
        counts = triple(max(1, round(count)) for count in wanted_counts)
        if counts == shape:
            return self
        position = [
            (start + rest) * count / length
            for start, rest, count, length in zip(
                self.bounds.start, self.rest, counts, shape, strict=True
            )
        ]
        origin: Origin = origin_at(position)
        z, y, x = (
            own * length / count
            for own, length, count in zip(self.voxel_size_nm, shape, counts, strict=True)
        )
        stop = triple(start + count for start, count in zip(origin.voxel, counts, strict=True))
        return Grid(BoundingBox(origin.voxel, stop), (z, y, x), origin.rest)

    def join(self, by: Zyx) -> Grid:
        """The grid with several voxels as one on each axis; it must have a multiple of them."""
        position = [
            (start + rest) / n
            for start, rest, n in zip(self.bounds.start, self.rest, by, strict=True)
        ]
        origin = origin_at(position)
        stop = triple(
            start + length // n
            for start, length, n in zip(origin.voxel, self.bounds.shape, by, strict=True)
        )
        z, y, x = (size * n for size, n in zip(self.voxel_size_nm, by, strict=True))
        return Grid(BoundingBox(origin.voxel, stop), (z, y, x), origin.rest)

    def divide(self, by: Zyx) -> Grid:
        """The grid with each voxel divided into several.

        Raises:
            ValueError: it begins so far between voxels that the smaller ones would not lie in it.
        """
        z, y, x = (part * n for part, n in zip(self.rest, by, strict=True))
        if not all(-0.5 <= part < 0.5 for part in (z, y, x)):
            parts = [float(f"{part:.3g}") for part in self.rest]
            raise ValueError(
                f"it begins between the voxels that the network sees, {parts} of one beyond them. "
                "Copy it to another position first (beam-inference convert --offset)"
            )
        size_z, size_y, size_x = (size / n for size, n in zip(self.voxel_size_nm, by, strict=True))
        return Grid(self.bounds.refine(by), (size_z, size_y, size_x), (z, y, x))


def coarse_axis(
    size: VoxelSizeNm, other: VoxelSizeNm, separate_z: bool | Literal["auto"]
) -> int | None:
    """The axis that is resampled by nearest voxels because its voxels are much longer, as nnU-Net.

    Args:
        size: voxel size of the source, ZYX.
        other: voxel size of the target, ZYX, as it was asked for.
        separate_z: whether there is to be one; "auto" if it depends on the sizes.

    Returns:
        The axis of the longest voxel extent of the source, or else of the target; None if there is
        no such axis, or none that is longest by itself.
    """
    if separate_z == "auto":
        anisotropic = [each for each in (size, other) if max(each) / min(each) > ANISOTROPY]
    else:
        anisotropic = [size] if separate_z else []
    if not anisotropic:
        return None
    longest = [axis for axis in range(3) if anisotropic[0][axis] == max(anisotropic[0])]
    return longest[0] if len(longest) == 1 else None


def make_resampling(
    source: Grid, target: Grid, order: Order, coarse: int | None, repeat: Zyx = (1, 1, 1)
) -> Resampling:
    """The resampling from one grid to another one over the same space.

    Args:
        source: the grid to read.
        target: the grid to make.
        order: of the spline.
        coarse: the axis that is resampled by nearest voxels, see :func:`coarse_axis`; None for
            none.
        repeat: voxels of the target that have one value, on each axis.
    """
    orders: list[Order] = [0 if axis == coarse else order for axis in range(3)]
    return Resampling(source.bounds, target.bounds, (orders[0], orders[1], orders[2]), repeat)
