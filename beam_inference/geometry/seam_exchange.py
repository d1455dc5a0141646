"""The geometry of ``strategy: exchange``: every patch is computed once, and chunks share sums.

Which chunk owns a patch is decided axis by axis, in :mod:`beam_inference.geometry.patch_ownership`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.grids import ChunkGrid, PatchLattice
from beam_inference.geometry.patch_ownership import OwnershipAxis
from beam_inference.geometry.resampling import AxisResampling, Resampling
from beam_inference.geometry.zyx import Zyx


@dataclass(frozen=True)
class SeamExchangePlan:
    """The patches that chunks own, and the sums that they give and receive.

    Get it from :attr:`beam_inference.geometry.plan.InferencePlan.exchange`.

    Attributes:
        lattice: the patch lattice over the domain.
        volume: the input's bounds, in the network's voxels.
        chunks: the chunk grid over the ROI.
        block_shape: of the output's storage, ZYX.
        crop_margin: voxels by which the network's input exceeds its patch, ZYX.
        halo: voxels beyond a chunk, per side, whose values it needs, ZYX.
        to_output: from the patches' voxels to the output's; None where they are the same.
    """

    lattice: PatchLattice
    volume: BoundingBox
    chunks: ChunkGrid
    block_shape: Zyx
    crop_margin: Zyx
    halo: Zyx = (0, 0, 0)
    to_output: Resampling | None = None

    @property
    def joins_whole_chunks(self) -> bool:
        """Whether no voxel is finished before its chunk is: chunks need what lies around them."""
        return any(self.halo) or self.to_output is not None

    @cached_property
    def ownership(self) -> tuple[OwnershipAxis, OwnershipAxis, OwnershipAxis]:
        """Which chunk computes which patches, per axis ZYX."""
        roi = self.chunks.roi
        same: list[AxisResampling | None] = [None] * 3
        z, y, x = (
            OwnershipAxis(lattice, volume, start, stop, chunk, block, halo, to_output)
            for lattice, volume, start, stop, chunk, block, halo, to_output in zip(
                self.lattice.axes,
                zip(self.volume.start, self.volume.stop, strict=True),
                roi.start,
                roi.stop,
                self.chunks.chunk_shape,
                self.block_shape,
                self.halo,
                same if self.to_output is None else self.to_output.axes,
                strict=True,
            )
        )
        return (z, y, x)

    def owned_work(self, index: int) -> ChunkWork | None:
        """The patches that a chunk owns, and the voxels that they cover of the ROI and its halo.

        Returns:
            None if the chunk owns no patch.
        """
        axes = self._axes_at(index)
        z, y, x = (axis.owned_patches(position) for axis, position in axes)
        if not (z and y and x):
            return None
        reach = BoundingBox.of_intervals(axis.reach(position) for axis, position in axes)
        return ChunkWork.of_patches(index, reach, self.lattice, (z, y, x), self.crop_margin)

    def contributors(self, index: int) -> list[int]:
        """The chunks that own a patch which touches a chunk or its halo, in order."""
        per_axis = (axis.contributors(position) for axis, position in self._axes_at(index))
        return [self.chunks.index(position) for position in product(*per_axis)]

    def receivers(self, index: int) -> list[int]:
        """The chunks that need what a chunk's own patches touch, in order."""
        if self.owned_work(index) is None:
            return []
        per_axis = (axis.receivers(position) for axis, position in self._axes_at(index))
        return [self.chunks.index(position) for position in product(*per_axis)]

    def private_box(self, index: int) -> BoundingBox | None:
        """The box of whole blocks that no other chunk's patches touch; None if it is empty.

        It is where chunks are finished only when they are put together.
        """
        if self.joins_whole_chunks:
            return None
        core = self.chunks.core_box(index)
        start = zyx.triple(axis.private_start(position) for axis, position in self._axes_at(index))
        if any(a == b for a, b in zip(start, core.stop, strict=True)):
            return None
        return BoundingBox(start, core.stop)

    def shared_boxes(self, index: int) -> list[BoundingBox]:
        """The rest of a chunk beside its private box: at most three disjoint boxes of blocks.

        Where chunks are finished only when they are put together it is one box: what a chunk is
        made of, in the patches' voxels.
        """
        if self.joins_whole_chunks:
            axes = self._axes_at(index)
            return [BoundingBox.of_intervals(axis.interval_of_sums(p) for axis, p in axes)]
        core = self.chunks.core_box(index)
        private = self.private_box(index)
        if private is None:
            return [core]
        boxes = []
        start = core.start
        # a slab before the private box on each axis, within what the earlier slabs leave
        for axis in range(3):
            first_private = private.start[axis]
            if start[axis] < first_private:
                boxes.append(BoundingBox(start, zyx.with_axis(core.stop, axis, first_private)))
            start = zyx.with_axis(start, axis, first_private)
        return boxes

    def _axes_at(self, index: int) -> list[tuple[OwnershipAxis, int]]:
        return list(zip(self.ownership, self.chunks.position(index), strict=True))
