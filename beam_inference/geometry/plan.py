"""The inference plan: all geometry of a job, decided once from a few boxes and shapes, with nothing opened.

A plan is a small value. It answers for one chunk in O(1) (its core box, its input box, its
patches), and for the whole job by summing per axis, so a job of 10^9 chunks is planned in
milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from beam_inference.errors import AlignmentError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid, PatchLattice, most_blocks
from beam_inference.geometry.patch_ownership import OwnershipAxis
from beam_inference.geometry.zyx import Zyx, ceil_div


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What is to be done for one chunk.

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

    @property
    def patch_count(self) -> int:
        """Number of patches to compute."""
        return math.prod(map(len, self.patches))


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """All geometry of a job. Build it with :func:`make_plan`, which checks it.

    Attributes:
        volume: the input's bounds.
        lattice: the patch lattice over the domain.
        chunks: the chunk grid over the ROI.
        crop_margin: voxels by which the network's input exceeds its patch, ZYX.
        seams: "recompute", "exchange" or "crop".
        chunk_crop_margin: voxels cropped at chunk borders, ZYX; zero unless ``seams`` is "crop".
        block_shape: of the output's storage, ZYX.
        halo: voxels beyond its core that are computed for a chunk, for what comes after the
            network, per side, ZYX.
        input_block_shape: of the input's storage, ZYX, whose blocks begin where the volume does.
    """

    volume: BoundingBox
    lattice: PatchLattice
    chunks: ChunkGrid
    crop_margin: Zyx
    seams: str
    chunk_crop_margin: Zyx
    block_shape: Zyx
    halo: Zyx = (0, 0, 0)
    input_block_shape: Zyx = (1, 1, 1)

    def work(self, index: int) -> ChunkWork:
        """What is to be done for chunk ``index`` without its neighbours: every patch that touches its core or halo.

        Raises:
            IndexError: there is no such chunk.
        """
        lattice = self.lattice
        core = self.chunks.core_box(index).grow(self.halo).intersection(lattice.domain)
        if self.seams == "crop":
            box = core.grow(self.chunk_crop_margin).intersection(lattice.domain)
            lattice = replace(
                lattice, domain=box.grown_to(lattice.patch_shape, within=lattice.domain)
            )
        return self._work(index, core, lattice, lattice.touching(core))

    def _work(
        self,
        index: int,
        core: BoundingBox,
        lattice: PatchLattice,
        patches: tuple[range, range, range],
    ) -> ChunkWork:
        first = lattice.patch_box((patches[0][0], patches[1][0], patches[2][0]))
        last = lattice.patch_box((patches[0][-1], patches[1][-1], patches[2][-1]))
        input_box = BoundingBox(first.start, last.stop).grow(self.crop_margin)
        return ChunkWork(index, core, input_box, lattice, patches, self.crop_margin)

    @property
    def ownership(self) -> tuple[OwnershipAxis, OwnershipAxis, OwnershipAxis]:
        """Which chunk computes which patches when every patch is computed once, per axis ZYX."""
        roi = self.chunks.roi
        chunk = self.chunks.chunk_shape
        block = self.block_shape
        z, y, x = (
            OwnershipAxis(axis, roi.start[a], roi.stop[a], chunk[a], block[a])
            for a, axis in enumerate(self.lattice.axes)
        )
        return (z, y, x)

    def owned_work(self, index: int) -> ChunkWork | None:
        """The patches that chunk ``index`` owns, and the voxels of the ROI that they cover; None if it owns none."""
        at = list(zip(self.ownership, self.chunks.position(index), strict=True))
        z, y, x = (axis.owned(position) for axis, position in at)
        if not (z and y and x):
            return None
        reach = BoundingBox(*zip(*(axis.reach(position) for axis, position in at), strict=True))
        return self._work(index, reach, self.lattice, (z, y, x))

    def contributors(self, index: int) -> list[int]:
        """The chunks that own a patch which touches chunk ``index``, in order: the order in which sums are added."""
        at = zip(self.ownership, self.chunks.position(index), strict=True)
        return list(
            map(self.chunks.index, product(*(axis.contributors(position) for axis, position in at)))
        )

    def receivers(self, index: int) -> list[int]:
        """The chunks that a patch owned by chunk ``index`` touches, in order."""
        if self.owned_work(index) is None:
            return []
        at = zip(self.ownership, self.chunks.position(index), strict=True)
        return list(
            map(self.chunks.index, product(*(axis.receivers(position) for axis, position in at)))
        )

    def contributions(self, index: int) -> list[ChunkWork]:
        """Of :meth:`work`, what each contributor owns, in order: the boxes cover the core, and overlap at seams."""
        core = self.chunks.core_box(index)
        works = []
        touching = self.lattice.touching(core)
        for contributor in self.contributors(index):
            owned = self.owned_work(contributor)
            assert owned is not None  # a contributor owns patches
            z, y, x = (
                range(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(owned.patches, touching, strict=True)
            )
            works.append(
                self._work(contributor, owned.core_box.intersection(core), self.lattice, (z, y, x))
            )
        return works

    def private_box(self, index: int) -> BoundingBox | None:
        """The whole blocks of chunk ``index`` that no other chunk's patches touch, a box; None if there are none."""
        core = self.chunks.core_box(index)
        starts = tuple(
            axis.private_start(position)
            for axis, position in zip(self.ownership, self.chunks.position(index), strict=True)
        )
        if any(start == stop for start, stop in zip(starts, core.stop, strict=True)):
            return None
        return BoundingBox((starts[0], starts[1], starts[2]), core.stop)

    def shared_boxes(self, index: int) -> list[BoundingBox]:
        """The rest of chunk ``index``: at most three boxes of whole blocks, disjoint."""
        core = self.chunks.core_box(index)
        private = self.private_box(index)
        if private is None:
            return [core]
        boxes = []
        start = core.start
        # a slab before the private box on each axis, within what the earlier slabs leave
        for axis in range(3):
            if start[axis] < private.start[axis]:
                stop = [*core.stop]
                stop[axis] = private.start[axis]
                boxes.append(BoundingBox(start, (stop[0], stop[1], stop[2])))
            inner = [*start]
            inner[axis] = private.start[axis]
            start = (inner[0], inner[1], inner[2])
        return boxes

    @property
    def patch_count(self) -> int:
        """Network calls of the whole job, for batches of one patch."""
        return math.prod(axis.patches for axis in _axis_totals(self))

    def calls(self, batch_size: int) -> int:
        """Network calls of the whole job: every chunk fills up its last batch."""
        per_axis = [axis.patch_counts.items() for axis in _axis_totals(self)]
        return sum(
            z_times * y_times * x_times * ceil_div(z * y * x, batch_size)
            for (z, z_times), (y, y_times), (x, x_times) in product(*per_axis)
        )

    @property
    def input_voxels(self) -> int:
        """Voxels inside the volume that are read, halo re-reads included (before rounding to storage blocks)."""
        return math.prod(axis.voxels_read for axis in _axis_totals(self))

    @property
    def owners(self) -> int:
        """Chunks that own a patch, of ``seams: exchange``."""
        return math.prod(axis.owners for axis in _axis_totals(self))

    @property
    def seam_pairs(self) -> int:
        """Pairs of chunks, at most, of which one says sums to the other, or to itself; zero unless they exchange."""
        return math.prod(axis.pairs for axis in _axis_totals(self))

    @property
    def seam_voxels(self) -> int:
        """Voxels of all seam files, written once and read once: zero unless ``seams`` is "exchange"."""
        totals = _axis_totals(self)
        return math.prod(axis.reached for axis in totals) - math.prod(
            axis.private for axis in totals
        )

    @property
    def shared_voxels(self) -> int:
        """Voxels of the output that are put together from what several chunks say."""
        alone = math.prod(axis.private for axis in _axis_totals(self))
        return self.chunks.roi.size - alone if self.seams == "exchange" else 0

    @property
    def patch_voxels_per_voxel(self) -> float:
        """Patch voxels computed per output voxel, the job's redundancy."""
        return self.patch_count * math.prod(self.lattice.patch_shape) / self.chunks.roi.size

    @property
    def reaches_outside(self) -> bool:
        """Whether some chunk's input lies partly outside the volume."""
        corners = (self.work(0), self.work(self.chunks.count - 1))
        return not all(self.volume.contains(work.input_box) for work in corners)

    @property
    def extremes(self) -> Extremes:
        """Of all chunks, on each axis."""
        return Extremes(*zip(*(axis.extents for axis in _axis_totals(self)), strict=True))


@dataclass(frozen=True, slots=True)
class AxisTotals:
    """Sums over the chunk positions of one axis; of any, the most patches, and extents as in :class:`Extremes`."""

    patches: int
    largest_patches: int
    voxels_read: int
    reached: int
    private: int
    owners: int
    pairs: int
    extents: tuple[int, int, int, int, int, int]
    patch_counts: dict[int, int]  # chunk positions by their number of patches


class Extremes(NamedTuple):
    """Shapes in voxels, ZYX, each axis for itself the extreme of all chunks.

    Attributes:
        input: of what a chunk reads.
        input_blocks: of the storage blocks that this touches.
        core: of what it computes values or sums for.
        private: of what only its own patches touch, in whole blocks; all of it where nothing is
            exchanged.
        touched: of what it is put together from: its voxels, each as often as there are chunks that
            add to it.
        shared: of these, without those of its private ones.
    """

    input: Zyx
    input_blocks: Zyx
    core: Zyx
    private: Zyx
    touched: Zyx
    shared: Zyx


@lru_cache(maxsize=16)
def _axis_totals(plan: InferencePlan) -> tuple[AxisTotals, ...]:
    """Totals per axis. All about a chunk is a product over axes, so sums over all chunks are products of these."""
    return tuple(totals_on(plan, axis) for axis in range(3))


def totals_on(plan: InferencePlan, axis: int) -> AxisTotals:  # noqa: PLR0915 # to be divided
    """Totals on one axis, looking at no more chunk positions than differ.

    Away from the domain's ends, what a chunk does depends only on where the lattice stands to it,
    which repeats.
    """
    count = plan.chunks.shape[axis]
    chunk = plan.chunks.chunk_shape[axis]
    block = plan.input_block_shape[axis]
    patch = plan.lattice.patch_shape[axis]
    margin = plan.crop_margin[axis] + plan.chunk_crop_margin[axis] + plan.halo[axis]
    stride = patch - plan.lattice.patch_overlap[axis]
    period = stride // math.gcd(chunk, stride)
    end = ceil_div(2 * patch + margin, chunk) + 1
    repeats, rest = divmod(max(0, count - 2 * end), period)
    if repeats < 2:
        counted = [(position, 1) for position in range(count)]
    else:
        counted = [(position, 1) for position in range(end)]
        counted += [(end + k, repeats) for k in range(period)]
        counted += [(position, 1) for position in range(count - end - rest, count)]
    patches = largest_patches = voxels_read = reached = private = owners = pairs = 0
    patch_counts = Counter[int]()
    extents = []
    ownership = plan.ownership[axis]
    for position, times in counted:
        if plan.seams == "exchange":
            owned = ownership.owned(position)
            core = ownership.reach(position)
            low = high = plan.volume.start[axis]
            if owned:
                low = ownership.lattice.patch_start(owned[0]) - plan.crop_margin[axis]
                high = ownership.lattice.patch_start(owned[-1]) + patch + plan.crop_margin[axis]
            owners += times * bool(owned)
            pairs += times * len(ownership.receivers(position))
            reached += times * (core[1] - core[0])
            private += times * (
                alone := ownership.interval(position)[1] - ownership.private_start(position)
            )
            touched = ownership.touched(position)
        else:
            work = plan.work(position * math.prod(plan.chunks.shape[axis + 1 :]))
            owned = work.patches[axis]
            core = (work.core_box.start[axis], work.core_box.stop[axis])
            low = work.input_box.start[axis]
            high = work.input_box.stop[axis]
            touched = alone = core[1] - core[0]
        patches += times * len(owned)
        patch_counts[len(owned)] += times
        largest_patches = max(largest_patches, len(owned))
        first = max(low, plan.volume.start[axis]) - plan.volume.start[axis]
        last = min(high, plan.volume.stop[axis]) - plan.volume.start[axis]
        voxels_read += times * (last - first)
        if times > 1 and period * chunk % block:  # the others stand otherwise to the blocks
            blocks = most_blocks(last - first, block, plan.volume.shape[axis])
        else:
            blocks = ceil_div(last, block) - first // block
        extents.append(
            (high - low, blocks * block, core[1] - core[0], alone, touched, touched - alone)
        )
    a, b, c, d, e, f = map(max, zip(*extents, strict=True))
    most = (a, b, c, d, e, f)
    return AxisTotals(
        patches, largest_patches, voxels_read, reached, private, owners, pairs, most, patch_counts
    )


def make_plan(
    *,
    volume: BoundingBox,
    roi: BoundingBox,
    context: Zyx,
    patch_shape: Zyx,
    patch_overlap: Zyx,
    chunk_shape: Zyx,
    crop_margin: Zyx,
    seams: str,
    chunk_crop_margin: Zyx,
    block_shape: Zyx,
    halo: Zyx = (0, 0, 0),
    input_block_shape: Zyx = (1, 1, 1),
) -> InferencePlan:
    """Derive a job's geometry.

    The lattice tiles the domain: the ROI grown by ``context`` and clipped to the volume. Where an
        axis of it is shorter than a patch it grows at its stop, then at its start, within the
        volume, and only then beyond.

    Raises:
        AlignmentError: the ROI is not inside the volume.
    """
    if not volume.contains(roi):
        raise AlignmentError(
            f"roi {roi} is not inside the input volume {volume} (z, y, x; stop exclusive). "
            f"The part inside is {roi.intersection(volume)}."
        )
    domain = roi.grow(context).intersection(volume).grown_to(patch_shape, within=volume)
    return InferencePlan(
        volume=volume,
        lattice=PatchLattice(domain, patch_shape, patch_overlap),
        chunks=ChunkGrid(roi, chunk_shape),
        crop_margin=crop_margin,
        seams=seams,
        chunk_crop_margin=chunk_crop_margin,
        block_shape=block_shape,
        halo=halo,
        input_block_shape=input_block_shape,
    )
