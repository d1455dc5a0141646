"""Which chunk computes which patch on one axis, if every patch is computed once.

A patch belongs to the chunk that holds its start, clamped to the ROI. So a chunk's patches reach
into itself and into chunks after it, never into one before::

    chunks   ├──────── 0 ────────┼──────── 1 ────────┤
    patches  ├──────┤                                      owner 0
                ├──────┤                                   owner 0
                   ├──────┤     ...
                               ├──────┤                    owner 0, reaches into 1
                                  ├──────┤                 owner 1
                                     ├──────┤              owner 1
    shared                       └ 0, 1 ┘└─── 1 alone ──   in whole blocks

In three dimensions all of this is a product over the axes: a voxel is a chunk's alone if it is so
on every axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from beam_inference.geometry.grids import LatticeAxis
from beam_inference.geometry.zyx import ceil_div, round_up


@dataclass(frozen=True)
class OwnershipAxis:
    """Chunks, patches and storage blocks on one axis.

    Attributes:
        lattice: the patches.
        start, stop: the ROI, which lies inside the lattice's domain.
        chunk: voxels of a whole chunk; a position is a chunk's number on this axis.
        block: voxels of a storage block of the output; blocks are counted from each chunk's start.
    """

    lattice: LatticeAxis
    start: int
    stop: int
    chunk: int
    block: int

    @cached_property
    def patches(self) -> range:
        """The patches that share a voxel with the ROI."""
        return self.lattice.touching(self.start, self.stop)

    @property
    def positions(self) -> int:
        """Number of chunks on this axis."""
        return ceil_div(self.stop - self.start, self.chunk)

    def interval(self, position: int) -> tuple[int, int]:
        """Start and stop of a chunk."""
        start = self.start + position * self.chunk
        return start, min(start + self.chunk, self.stop)

    def owned_patches(self, position: int) -> range:
        """The patches that a chunk computes; there may be none."""
        start, stop = self.interval(position)
        first = self.patches.start if position == 0 else self.lattice.first_from(start)
        last = self.patches.stop if stop == self.stop else self.lattice.first_from(stop)
        return range(first, max(first, min(last, self.patches.stop)))

    def reach(self, position: int) -> tuple[int, int]:
        """Start and stop of what a chunk's own patches cover in the ROI; equal if it has none."""
        patches = self.owned_patches(position)
        if not patches:
            start, _ = self.interval(position)
            return start, start
        last = self.lattice.patch_start(patches[-1]) + self.lattice.patch
        return max(self.lattice.patch_start(patches[0]), self.start), min(last, self.stop)

    def private_start(self, position: int) -> int:
        """The start of a chunk's private voxels, those that only its own patches touch.

        They are whole blocks at the chunk's end. If there are none, this is the chunk's stop.
        """
        start, stop = self.interval(position)
        # the last patch of an earlier chunk
        before = min(self.owned_patches(position).start, self.patches.stop) - 1
        if before < self.patches.start:
            return start
        foreign = self.lattice.patch_start(before) + self.lattice.patch
        return min(start + round_up(max(0, foreign - start), self.block), stop)

    def contributors(self, position: int) -> list[int]:
        """The chunks whose patches touch a chunk, in order, itself last if it owns any."""
        touching = self.lattice.touching(*self.interval(position))
        candidates = range(self._owner(touching[0]), position + 1)
        return [
            p
            for p in candidates
            if self.owned_patches(p).start < touching.stop and self.owned_patches(p)
        ]

    def touched_voxels(self, position: int) -> int:
        """Voxels of a chunk, each as often as there are chunks whose patches touch it."""
        start, stop = self.interval(position)
        reaches = map(self.reach, self.contributors(position))
        return sum(max(0, min(high, stop) - max(low, start)) for low, high in reaches)

    def receivers(self, position: int) -> range:
        """The chunks that a chunk's patches touch, in order."""
        start, stop = self.reach(position)
        if start == stop:
            return range(0)
        return range(position, (stop - 1 - self.start) // self.chunk + 1)

    def _owner(self, patch: int) -> int:
        return max(0, self.lattice.patch_start(patch) - self.start) // self.chunk
