"""The two grids of a job: chunks over the ROI, and the patch lattice over the domain.

Both answer in O(1), whatever the size of the volume: nothing here ever lists a volume's chunks or
patches.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, ceil_div


def most_blocks(length: int, block: int, extent: int) -> int:
    """The most storage blocks that an interval may touch on one axis, wherever it lies.

    Args:
        length: of the interval, in voxels.
        block: voxels of a block.
        extent: of the volume, in voxels.
    """
    return min(ceil_div(length - 1, block) + 1, ceil_div(extent, block))


def largest_block_cover(shape: Zyx, block_shape: Zyx, volume_shape: Zyx) -> Zyx:
    """The largest shape of the storage blocks that a box may touch in a volume, wherever it lies.

    All shapes are in voxels, ZYX.
    """
    return zyx.triple(
        most_blocks(n, b, w) * b for n, b, w in zip(shape, block_shape, volume_shape, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Chunks that tile an ROI, numbered in ZYX order with x fastest.

    The last ones on each axis are clipped to the ROI.

    Attributes:
        roi: the box that the chunks' core boxes tile exactly.
        chunk_shape: voxels of a whole chunk, ZYX.
    """

    roi: BoundingBox
    chunk_shape: Zyx

    @property
    def shape(self) -> Zyx:
        """Chunks on each axis, ZYX."""
        return zyx.ceil_div_each(self.roi.shape, self.chunk_shape)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return math.prod(self.shape)

    def core_box(self, index: int) -> BoundingBox:
        """The voxels that chunk ``index`` writes.

        Raises:
            IndexError: there is no such chunk.
        """
        if not 0 <= index < self.count:
            raise IndexError(
                f"chunk {index} is not one of the {self.count} chunks 0 … {self.count - 1}"
            )
        offset = zyx.multiply(self.position(index), self.chunk_shape)
        start = zyx.add(self.roi.start, offset)
        return BoundingBox(start, zyx.minimum(zyx.add(start, self.chunk_shape), self.roi.stop))

    def position(self, index: int) -> Zyx:
        """The position of chunk ``index`` among the chunks, on each axis."""
        _, ny, nx = self.shape
        return (index // (ny * nx), index // nx % ny, index % nx)

    def index(self, position: Sequence[int]) -> int:
        """The number of the chunk at a position."""
        z, y, x = position
        _, ny, nx = self.shape
        return (z * ny + y) * nx + x

    def axis_interval(self, axis: int, position: int) -> tuple[int, int]:
        """Start and stop of the chunks at a position on one axis."""
        start = self.roi.start[axis] + position * self.chunk_shape[axis]
        return start, min(start + self.chunk_shape[axis], self.roi.stop[axis])


LatticeKind: TypeAlias = Literal["stride", "spread", "pad"]
"""Where patches lie in a domain that they do not fit exactly.

- ``stride``: patch after patch at the same distance; the last one is moved back into the domain.
- ``spread``: as many patches, at distances that are equal but for rounding: those of nnU-Net.
- ``pad``: as ``stride``, but the last patch hangs over the end, into what ``fill`` says.
"""


@dataclass(frozen=True, slots=True)
class LatticeAxis:
    """Patch starts on one axis, from the domain's start to where a patch ends at its stop.

    They are ``start + k * stride``, the last one moved back to end at ``stop``; or spread evenly,
    each rounded to a whole voxel, halves to even.

    Attributes:
        start, stop: the domain on this axis; at least ``patch`` voxels long.
        patch: voxels of a patch on this axis.
        stride: voxels from one start to the next; the most there are if starts are spread.
        is_spread: whether starts are spread evenly.
    """

    start: int
    stop: int
    patch: int
    stride: int
    is_spread: bool = False

    def __post_init__(self) -> None:
        if self.stop - self.start < self.patch:
            raise ValueError(
                f"a patch of {self.patch} voxels does not fit the domain {self.start} … {self.stop}"
            )
        if not 1 <= self.stride <= self.patch:
            raise ValueError(
                f"the stride {self.stride} must be between 1 and the patch's {self.patch} voxels"
            )

    @property
    def count(self) -> int:
        """Number of patches on this axis."""
        return ceil_div(self.stop - self.start - self.patch, self.stride) + 1

    @property
    def most_patches(self) -> int:
        """The most patches that share one voxel of this axis; at most, if they are spread.

        Their number grows at the starts of patches alone, and before the last one, which may be
        moved back, it grows until the second last.
        """
        if self.is_spread and self.count > 1:
            # Rounding brings two starts nearer to each other by a voxel at most, where one half is
            # rounded up and another one down; between whole numbers there are none.
            gaps = self.count - 1
            room = self.stop - self.start - self.patch
            if room % gaps:
                return min(self.count, self.patch * gaps // room + 1)
            return min(self.count, ceil_div(self.patch * gaps, room))
        last = range(max(0, self.count - 2), self.count)
        starts = [self.patch_start(k) for k in last]
        return max(len(self.touching(start, start + 1)) for start in starts)

    def patch_start(self, k: int) -> int:
        """First voxel of patch ``k``, ``0 <= k < count``."""
        room = self.stop - self.start - self.patch
        if self.is_spread and k:
            return self.start + round(room / (self.count - 1) * k)
        return self.start + min(k * self.stride, room)

    def first_from(self, start: int) -> int:
        """The first patch that starts at ``start`` or later; the number of patches if none does."""
        return bisect_left(range(self.count), start, key=self.patch_start)

    def touching(self, start: int, stop: int) -> range:
        """The patches that share a voxel with ``start … stop``.

        The interval is not empty and lies inside the domain.
        """
        numbers = range(self.count)
        first = bisect_right(numbers, start - self.patch, key=self.patch_start)
        return range(first, bisect_left(numbers, stop, key=self.patch_start))


@dataclass(frozen=True, slots=True)
class PatchLattice:
    """The grid of patches over a domain; a patch's index is one number per axis, ZYX.

    Attributes:
        domain: the box the lattice tiles; at least one patch long on each axis.
        patch_shape: voxels of a patch, ZYX.
        patch_overlap: voxels shared by neighbouring patches, ZYX; less than the patch. The least
            there are if patches are spread.
        kind: where patches lie if they do not fit the domain exactly.
    """

    domain: BoundingBox
    patch_shape: Zyx
    patch_overlap: Zyx
    kind: LatticeKind = "stride"

    def over(self, box: BoundingBox) -> PatchLattice:
        """This lattice over a box of at least one patch; over more if patches hang over."""
        if self.kind == "pad":
            strides = zyx.subtract(self.patch_shape, self.patch_overlap)
            room = zyx.subtract(box.shape, self.patch_shape)
            covered = zyx.multiply(zyx.ceil_div_each(room, strides), strides)
            stop = zyx.add(zyx.add(box.start, covered), self.patch_shape)
            box = BoundingBox(box.start, stop)
        return replace(self, domain=box)

    @property
    def axes(self) -> tuple[LatticeAxis, LatticeAxis, LatticeAxis]:
        """The lattice of each axis, ZYX."""
        z, y, x = (
            LatticeAxis(a, b, p, p - o, self.kind == "spread")
            for a, b, p, o in zip(
                self.domain.start,
                self.domain.stop,
                self.patch_shape,
                self.patch_overlap,
                strict=True,
            )
        )
        return (z, y, x)

    @property
    def count(self) -> int:
        """Number of patches."""
        return math.prod(axis.count for axis in self.axes)

    @property
    def most_patches(self) -> int:
        """The most patches that share one voxel."""
        return math.prod(axis.most_patches for axis in self.axes)

    def touching(self, box: BoundingBox) -> tuple[range, range, range]:
        """Per axis, the indices of the patches that share a voxel with a box inside the domain."""
        z, y, x = (
            axis.touching(a, b) for axis, a, b in zip(self.axes, box.start, box.stop, strict=True)
        )
        return (z, y, x)

    def patch_box(self, index: Zyx) -> BoundingBox:
        """The voxels that patch ``index`` predicts."""
        start = zyx.triple(axis.patch_start(k) for axis, k in zip(self.axes, index, strict=True))
        return BoundingBox(start, zyx.add(start, self.patch_shape))
