"""The work for one chunk: its boxes and its patches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import PatchLattice
from beam_inference.geometry.zyx import Zyx


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """The patches that are to be computed for one chunk, and its boxes.

    Attributes:
        index: the chunk's number in the grid.
        core_box: the voxels whose values, or whose sums of contributions, are wanted.
        input_box: the voxels its patches see; may reach beyond the volume.
        lattice: the patch lattice its patches belong to.
        patches: per axis ZYX, the indices of the patches to compute; their product, in
            lexicographic order.
        crop_margin: voxels by which the network's input exceeds its patch, ZYX.
    """

    index: int
    core_box: BoundingBox
    input_box: BoundingBox
    lattice: PatchLattice
    patches: tuple[range, range, range]
    crop_margin: Zyx

    @classmethod
    def of_patches(
        cls,
        index: int,
        core_box: BoundingBox,
        lattice: PatchLattice,
        patches: tuple[range, range, range],
        crop_margin: Zyx,
    ) -> ChunkWork:
        """The work for some patches, at least one on each axis; their input box is derived."""
        z, y, x = patches
        first = lattice.patch_box((z[0], y[0], x[0]))
        last = lattice.patch_box((z[-1], y[-1], x[-1]))
        input_box = BoundingBox(first.start, last.stop).grow(crop_margin)
        return cls(index, core_box, input_box, lattice, patches, crop_margin)

    @property
    def patch_count(self) -> int:
        """Number of patches to compute."""
        return math.prod(map(len, self.patches))
