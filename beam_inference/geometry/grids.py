"""The two grids of a job: chunks over the ROI, and the patch lattice over the domain.

Both answer in O(1), whatever the size of the volume: nothing here ever lists a volume's chunks or
patches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class LatticeAxis:
    """Patch starts on one axis: ``start + k * stride``, the last one moved back to end at ``stop``.

    Attributes:
        start, stop: the domain on this axis; at least ``patch`` voxels long.
        patch: voxels of a patch on this axis.
        stride: voxels from one start to the next.
    """

    start: int
    stop: int
    patch: int
    stride: int

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
        """The most patches that share one voxel of this axis.

        Their number grows at the starts of patches alone, and before the last one, which may be
        moved back, it grows until the second last.
        """
        last = range(max(0, self.count - 2), self.count)
        starts = [self.patch_start(k) for k in last]
        return max(len(self.touching(start, start + 1)) for start in starts)

    def patch_start(self, k: int) -> int:
        """First voxel of patch ``k``, ``0 <= k < count``."""
        return min(self.start + k * self.stride, self.stop - self.patch)

    def first_from(self, start: int) -> int:
        """The first patch that starts at ``start`` or later; the number of patches if none does."""
        first = max(0, ceil_div(start - self.start, self.stride))
        if first < self.count - 1:
            return first
        return self.count - 1 if self.patch_start(self.count - 1) >= start else self.count

    def touching(self, start: int, stop: int) -> range:
        """The patches that share a voxel with ``start … stop``.

        The interval is not empty and lies inside the domain.
        """
        first = max(0, (start - self.patch - self.start) // self.stride + 1)
        last = min(self.count - 1, ceil_div(stop - self.start, self.stride) - 1)
        # The last patch is moved back, so it can start before `stop` although its nominal start
        # does not.
        if last == self.count - 2 and self.patch_start(self.count - 1) < stop:
            last += 1
        return range(min(first, self.count - 1), last + 1)


@dataclass(frozen=True, slots=True)
class PatchLattice:
    """The grid of patches over a domain; a patch's index is one number per axis, ZYX.

    Attributes:
        domain: the box the lattice tiles; at least one patch long on each axis.
        patch_shape: voxels of a patch, ZYX.
        patch_overlap: voxels shared by neighbouring patches, ZYX; less than the patch.
    """

    domain: BoundingBox
    patch_shape: Zyx
    patch_overlap: Zyx

    @property
    def axes(self) -> tuple[LatticeAxis, LatticeAxis, LatticeAxis]:
        """The lattice of each axis, ZYX."""
        z, y, x = (
            LatticeAxis(a, b, p, p - o)
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
