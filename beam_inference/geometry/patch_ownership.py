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

Where operators look beyond a chunk, it needs sums in a halo, too: then patches also reach into
chunks before their owner, and nothing is a chunk's alone. The same holds where chunks are of other
voxels than patches, and their values are made of sums around them: then a patch belongs to the
chunk that holds the place of its start.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

from beam_inference.geometry.grids import LatticeAxis
from beam_inference.geometry.resampling import AxisResampling
from beam_inference.geometry.zyx import ceil_div, round_up


@dataclass(frozen=True)
class OwnershipAxis:
    """Chunks, patches and storage blocks on one axis.

    Attributes:
        lattice: the patches.
        volume: start and stop of the input; the lattice may reach beyond.
        start, stop: what the chunks tile, in the output's voxels; each of them shares space with
            the lattice's domain.
        chunk: voxels of a whole chunk; a position is a chunk's number on this axis.
        block: voxels of a storage block of the output; blocks are counted from each chunk's start.
        halo: voxels beyond a chunk, per side, whose values it needs as far as they are made of
            sums in the domain and the volume.
        to_output: from the patches' voxels to the output's; None where they are the same.
    """

    lattice: LatticeAxis
    volume: tuple[int, int]
    start: int
    stop: int
    chunk: int
    block: int
    halo: int = 0
    to_output: AxisResampling | None = None

    @cached_property
    def patches(self) -> range:
        """The patches that share a voxel with the ROI or its halo."""
        return self.lattice.touching(*self._of_sums(self.start, self.stop))

    @property
    def positions(self) -> int:
        """Number of chunks on this axis."""
        return ceil_div(self.stop - self.start, self.chunk)

    def interval(self, position: int) -> tuple[int, int]:
        """Start and stop of a chunk."""
        start = self.start + position * self.chunk
        return start, min(start + self.chunk, self.stop)

    def interval_of_sums(self, position: int) -> tuple[int, int]:
        """Start and stop of the patches' voxels whose sums a chunk needs, with its halo."""
        return self._of_sums(*self.interval(position))

    def owned_patches(self, position: int) -> range:
        """The patches that a chunk computes; there may be none."""
        start, stop = self.interval(position)
        first = self.patches.start if position == 0 else self._first_patch_from(start)
        last = self.patches.stop if stop == self.stop else self._first_patch_from(stop)
        return range(first, max(first, min(last, self.patches.stop)))

    def reach(self, position: int) -> tuple[int, int]:
        """Start and stop of what a chunk's own patches cover, in their voxels; equal if none.

        It ends where the ROI ends, with its halo: nobody needs what lies beyond.
        """
        patches = self.owned_patches(position)
        low, high = self._of_sums(self.start, self.stop)
        if not patches:
            return low, low
        last = self.lattice.patch_start(patches[-1]) + self.lattice.patch
        return max(self.lattice.patch_start(patches[0]), low), min(last, high)

    def private_start(self, position: int) -> int:
        """The start of a chunk's private voxels, those that only its own patches touch.

        They are whole blocks at the chunk's end. If there are none, this is the chunk's stop. It is
        not asked for where there is a halo.
        """
        start, stop = self.interval(position)
        # the last patch of an earlier chunk
        before = min(self.owned_patches(position).start, self.patches.stop) - 1
        if before < self.patches.start:
            return start
        foreign = self.lattice.patch_start(before) + self.lattice.patch
        return min(start + round_up(max(0, foreign - start), self.block), stop)

    def contributors(self, position: int) -> list[int]:
        """The chunks whose patches touch what a chunk needs, in order."""
        touching = self.lattice.touching(*self.interval_of_sums(position))
        candidates = range(self._owner(touching[0]), self._owner(touching[-1]) + 1)
        owned = {p: self.owned_patches(p) for p in candidates}
        return [p for p in candidates if max(owned[p].start, touching.start) < owned[p].stop]

    def touched_voxels(self, position: int) -> int:
        """Voxels that a chunk needs, each as often as there are chunks whose patches touch it."""
        start, stop = self.interval_of_sums(position)
        reaches = map(self.reach, self.contributors(position))
        return sum(max(0, min(high, stop) - max(low, start)) for low, high in reaches)

    def receivers(self, position: int) -> range:
        """The chunks that need what a chunk's patches touch, in order."""
        start, stop = self.reach(position)
        if start == stop:
            return range(0)
        if self.to_output is None:
            return range(self._holder(start - self.halo), self._holder(stop - 1 + self.halo) + 1)
        positions = range(self.positions)
        first = bisect_right(positions, start, key=lambda p: self.interval_of_sums(p)[1])
        return range(first, bisect_left(positions, stop, key=lambda p: self.interval_of_sums(p)[0]))

    def _owner(self, patch: int) -> int:
        return self._holder(self.lattice.patch_start(patch))

    def _holder(self, voxel: int) -> int:
        """The chunk that holds a voxel of the patches, or is nearest to it."""
        if self.to_output is None:
            return min(max(0, voxel - self.start) // self.chunk, self.positions - 1)
        later = range(1, self.positions)
        return bisect_right(later, voxel, key=lambda p: self._place(self.interval(p)[0]))

    def _first_patch_from(self, voxel: int) -> int:
        """The first patch that starts at a voxel of the output or later."""
        return self.lattice.first_from(self._place(voxel))

    def _place(self, voxel: int) -> int:
        """The voxel of the patches in which a voxel of the output starts."""
        return voxel if self.to_output is None else self.to_output.source_voxel(voxel)

    def _of_sums(self, start: int, stop: int) -> tuple[int, int]:
        """The sums that the output's voxels ``start … stop`` are made of, with their halo."""
        low, high = self._finishable
        first = max(start - self.halo, low)
        last = min(stop + self.halo, high)
        return (
            (first, last) if self.to_output is None else self.to_output.source_interval(first, last)
        )

    @cached_property
    def _finishable(self) -> tuple[int, int]:
        """The output's voxels that are made of sums inside alone."""
        if self.to_output is None:
            return self.inside
        return self.to_output.target_made_of(*self.inside)

    @property
    def inside(self) -> tuple[int, int]:
        """Start and stop of the domain within the volume."""
        return max(self.lattice.start, self.volume[0]), min(self.lattice.stop, self.volume[1])
