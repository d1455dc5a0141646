"""The inference plan: all geometry of a job, decided once from a few boxes and shapes.

A plan is a small value, made without opening anything. It answers for one chunk in O(1) (its core
box, its input box, its patches), and for the whole job by summing per axis, so a job of 10^9 chunks
is planned in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from beam_inference.errors import AlignmentError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.grids import ChunkGrid, LatticeKind, PatchLattice
from beam_inference.geometry.plan_totals import PlanTotals
from beam_inference.geometry.resampling import Resampling
from beam_inference.geometry.seam_exchange import SeamExchangePlan
from beam_inference.geometry.zyx import Zyx

Strategy: TypeAlias = Literal["exchange", "recompute", "crop"]
"""How chunks get the values of patches that they share with neighbours.

- ``exchange``: every patch is computed once, and chunks exchange sums of shared voxels.
- ``recompute``: every chunk computes all patches that touch it. The same bits.
- ``crop``: every chunk has a lattice of its own. Cheap, but with seams: the only strategy of
  ``seams: crop``, while the others are two ways to the result of ``seams: exact``.
"""


@dataclass(frozen=True)
class InferencePlan:
    """All geometry of a job. Build it with :func:`make_plan`, which checks it.

    Attributes:
        volume: the input's bounds, in the network's voxels, as all boxes of patches are.
        lattice: the patch lattice over the domain.
        chunks: the chunk grid over the ROI, or over all blocks that it touches, in the output's
            voxels.
        crop_margin: voxels by which the network's input exceeds its patch, ZYX.
        strategy: how chunks get the values of patches that they share with neighbours.
        chunk_crop_margin: voxels cropped at chunk borders, ZYX; zero unless the strategy is "crop".
        block_shape: of the output's storage, ZYX.
        halo: voxels beyond its core that are computed for a chunk, for what comes after the
            network, per side, ZYX.
        input_block_shape: of the input's storage, ZYX, whose blocks begin where the volume does.
        to_output: from the network's voxels to the output's; None where they are the same.
    """

    volume: BoundingBox
    lattice: PatchLattice
    chunks: ChunkGrid
    crop_margin: Zyx
    strategy: Strategy
    chunk_crop_margin: Zyx
    block_shape: Zyx
    halo: Zyx = (0, 0, 0)
    input_block_shape: Zyx = (1, 1, 1)
    to_output: Resampling | None = None

    @cached_property
    def exchange(self) -> SeamExchangePlan | None:
        """The exchange between chunks; None if each chunk computes all that it needs."""
        if self.strategy != "exchange":
            return None
        return SeamExchangePlan(
            self.lattice,
            self.volume,
            self.chunks,
            self.block_shape,
            self.crop_margin,
            self.halo,
            self.to_output,
        )

    @cached_property
    def totals(self) -> PlanTotals:
        """Sums and maxima over all chunks."""
        return PlanTotals(self)

    def work(self, index: int) -> ChunkWork:
        """The work for a chunk without its neighbours: all patches that touch its core or halo.

        Raises:
            IndexError: there is no such chunk.
        """
        lattice = self.lattice
        core = self.finished_box(self.chunks.core_box(index))
        if self.to_output is not None:
            core = self.to_output.source_box(core)
        if self.strategy == "crop":
            box = core.grow(self.chunk_crop_margin).intersection(lattice.domain)
            lattice = lattice.over(box.grow_to(lattice.patch_shape, within=lattice.domain))
        patches = lattice.touching(core)
        return ChunkWork.of_patches(index, core, lattice, patches, self.crop_margin)

    def finished_box(self, core: BoundingBox) -> BoundingBox:
        """The box that what comes after the network is given, so as to finish a core box.

        It is the core box and its halo, as far as the values of which they are made lie in
        :attr:`inside`.
        """
        return core.grow(self.halo).intersection(self._finishable)

    @cached_property
    def _finishable(self) -> BoundingBox:
        inside = self.inside
        return inside if self.to_output is None else self.to_output.target_made_of(inside)

    @cached_property
    def inside(self) -> BoundingBox:
        """The domain within the volume, at whose ends operators repeat the last voxel.

        What patches that hang over the volume's end answer beyond it is of filler.
        """
        return self.lattice.domain.intersection(self.volume)

    @cached_property
    def reaches_outside(self) -> bool:
        """Whether some chunk's input lies partly outside the volume."""
        corners = (self.work(0), self.work(self.chunks.count - 1))
        return not all(self.volume.contains(work.input_box) for work in corners)


def make_plan(
    *,
    volume: BoundingBox,
    roi: BoundingBox,
    context: Zyx,
    patch_shape: Zyx,
    patch_overlap: Zyx,
    chunk_shape: Zyx,
    crop_margin: Zyx,
    strategy: Strategy,
    chunk_crop_margin: Zyx,
    block_shape: Zyx,
    halo: Zyx = (0, 0, 0),
    input_block_shape: Zyx = (1, 1, 1),
    lattice: LatticeKind = "stride",
    written: BoundingBox | None = None,
    to_output: Resampling | None = None,
    domain: BoundingBox | None = None,
) -> InferencePlan:
    """Derive a job's geometry.

    The lattice tiles the domain: the ROI grown by ``context`` and clipped to the volume. Where an
    axis of it is shorter than a patch it grows at its stop, then at its start, within the volume,
    and only then beyond, half on each side.

    Args:
        volume: the input's bounds.
        roi: the box to produce, or what it is made of where the output has other voxels.
        context: voxels around the ROI that patches may cover, per side, ZYX.
        patch_shape: voxels of a patch, ZYX.
        patch_overlap: voxels shared by neighbouring patches, ZYX; less than the patch.
        chunk_shape: voxels of a whole chunk, ZYX.
        crop_margin: voxels by which the network's input exceeds its patch, ZYX.
        strategy: how chunks get the values of patches that they share with neighbours.
        chunk_crop_margin: voxels cropped at chunk borders, ZYX, by the strategy "crop".
        block_shape: of the output's storage, ZYX.
        halo: voxels beyond its core that are computed for a chunk, per side, ZYX.
        input_block_shape: of the input's storage, ZYX.
        lattice: where patches lie if they do not fit the domain exactly; with "pad" the domain
            grows at its stop until they do.
        written: the box that chunks tile, in the output's voxels: the ROI, or whole blocks around
            it, which are background beyond the ROI. Default: the ROI.
        to_output: from the network's voxels to the output's; None where they are the same.
        domain: a box around the ROI that the lattice tiles, whatever the ROI is. Default: as above.

    Raises:
        AlignmentError: the ROI is not inside the volume, or the domain is not.
    """
    for name, box in {"roi": roi, "roi.domain": domain or roi}.items():
        if not volume.contains(box):
            raise AlignmentError(
                f"{name} {box} is not inside the input volume {volume} (z, y, x; stop exclusive). "
                f"{box.describe_part_inside(volume)}"
            )
    domain = (domain or roi.grow(context).intersection(volume)).grow_to(patch_shape, within=volume)
    return InferencePlan(
        volume=volume,
        lattice=PatchLattice(domain, patch_shape, patch_overlap, lattice).over(domain),
        chunks=ChunkGrid(written or roi, chunk_shape),
        crop_margin=crop_margin,
        strategy=strategy,
        chunk_crop_margin=chunk_crop_margin if strategy == "crop" else (0, 0, 0),
        block_shape=block_shape,
        halo=halo,
        input_block_shape=input_block_shape,
        to_output=to_output,
    )
