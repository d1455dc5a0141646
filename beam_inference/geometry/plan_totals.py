"""Totals of a plan over all of its chunks, in constant time.

All about a chunk is a product over the axes, so sums over all chunks are products of sums over the
chunk positions of each axis; and away from the domain's ends these repeat periodically.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from beam_inference.geometry.grids import most_blocks
from beam_inference.geometry.zyx import ceil_div
from beam_inference.limits import Numbers

if TYPE_CHECKING:
    from beam_inference.geometry.plan import InferencePlan
    from beam_inference.geometry.seam_exchange import SeamExchangePlan

N_co = TypeVar("N_co", bound=Numbers, covariant=True)


class AxisExtremes(NamedTuple, Generic[N_co]):
    """The greatest extents of all chunks on one axis, in voxels; :class:`Extremes` says of what."""

    input: N_co
    input_blocks: N_co
    core: N_co
    private: N_co
    touched: N_co
    shared: N_co
    resampled: N_co


class Extremes(NamedTuple, Generic[N_co]):
    """Shapes in voxels, ZYX. Each axis has the maximum of all chunks on that axis.

    On x there may be an array, one number for each of several plans.

    Attributes:
        input: the box that a chunk reads.
        input_blocks: the storage blocks that this box touches.
        core: the box that a chunk computes values or sums for.
        private: the whole blocks that only the chunk's own patches touch; the core box where
            nothing is exchanged.
        touched: the voxels that a chunk is put together from, each counted as often as there are
            chunks that add to it.
        shared: ``touched`` without the private voxels.
        resampled: the output's voxels that a chunk's values are resampled to, with their halo; 0
            where they are the output's as they are.
    """

    input: tuple[int, int, N_co]
    input_blocks: tuple[int, int, N_co]
    core: tuple[int, int, N_co]
    private: tuple[int, int, N_co]
    touched: tuple[int, int, N_co]
    shared: tuple[int, int, N_co]
    resampled: tuple[int, int, N_co]

    @classmethod
    def of_axes(
        cls, z: AxisExtremes[int], y: AxisExtremes[int], x: AxisExtremes[N_co]
    ) -> Extremes[N_co]:
        """The extremes of three axes together."""
        return cls(
            input=(z.input, y.input, x.input),
            input_blocks=(z.input_blocks, y.input_blocks, x.input_blocks),
            core=(z.core, y.core, x.core),
            private=(z.private, y.private, x.private),
            touched=(z.touched, y.touched, x.touched),
            shared=(z.shared, y.shared, x.shared),
            resampled=(z.resampled, y.resampled, x.resampled),
        )


@dataclass(frozen=True, slots=True)
class PositionTotals:
    """One chunk position on one axis.

    Attributes:
        patches: number of patches that are computed there.
        input: start and stop of what they see; may reach beyond the volume. Equal without patches.
        core: voxels for which values or sums are computed.
        private: voxels that nothing is exchanged for.
        touched: voxels that the chunk is put together from, once for each chunk that adds to them.
        receivers: chunk positions that get sums from here, of an exchange.
        resampled: the output's voxels that the chunk's values are resampled to; 0 if they are not.
    """

    patches: int
    input: tuple[int, int]
    core: int
    private: int
    touched: int
    receivers: int = 0
    resampled: int = 0


@dataclass(frozen=True, slots=True)
class AxisTotals:
    """Sums and maxima over the chunk positions of one axis.

    Attributes:
        patches: sum of patches; ``largest_patches`` is the maximum of any position.
        voxels_read: sum of the input voxels inside the volume.
        touched: sum of the voxels that chunks are put together from.
        private: sum of the voxels that nothing is exchanged for.
        owners: positions with a patch.
        pairs: pairs of positions of which one gives sums to the other, or to itself.
        extremes: the greatest extents of any position.
        patch_counts: number of positions by their number of patches.
    """

    patches: int
    largest_patches: int
    voxels_read: int
    touched: int
    private: int
    owners: int
    pairs: int
    extremes: AxisExtremes[int]
    patch_counts: dict[int, int]


@dataclass(frozen=True)
class PlanTotals:
    """Totals of a plan. Get them from :attr:`beam_inference.geometry.plan.InferencePlan.totals`."""

    plan: InferencePlan

    @cached_property
    def axes(self) -> tuple[AxisTotals, AxisTotals, AxisTotals]:
        """Totals per axis, ZYX."""
        return (axis_totals(self.plan, 0), axis_totals(self.plan, 1), axis_totals(self.plan, 2))

    @property
    def patch_count(self) -> int:
        """Patches that are computed."""
        return math.prod(axis.patches for axis in self.axes)

    def calls(self, batch_size: int) -> int:
        """Network calls of the job if every chunk fills up its last batch."""
        per_axis = [axis.patch_counts.items() for axis in self.axes]
        return sum(
            z_times * y_times * x_times * ceil_div(z * y * x, batch_size)
            for (z, z_times), (y, y_times), (x, x_times) in product(*per_axis)
        )

    @property
    def input_voxels(self) -> int:
        """Voxels read inside the volume, as often as they are read, without rounding to blocks."""
        return math.prod(axis.voxels_read for axis in self.axes)

    @property
    def patch_voxels_per_voxel(self) -> float:
        """Patch voxels computed per output voxel, the job's redundancy."""
        patch_voxels = self.patch_count * math.prod(self.plan.lattice.patch_shape)
        return patch_voxels / self.plan.chunks.roi.size

    @property
    def extremes(self) -> Extremes[int]:
        """The greatest extents of all chunks."""
        z, y, x = self.axes
        return Extremes.of_axes(z.extremes, y.extremes, x.extremes)

    @property
    def owners(self) -> int:
        """Chunks that own a patch; zero unless chunks exchange sums."""
        if self.plan.exchange is None:
            return 0
        return math.prod(axis.owners for axis in self.axes)

    @property
    def seam_pairs(self) -> int:
        """Upper bound of pairs of chunks of which one gives sums to the other, or to itself.

        Zero unless chunks exchange sums.
        """
        if self.plan.exchange is None:
            return 0
        return math.prod(axis.pairs for axis in self.axes)

    @property
    def seam_voxels(self) -> int:
        """Voxels of all seam files, each written once and read once.

        Zero unless chunks exchange sums.
        """
        if self.plan.exchange is None:
            return 0
        return math.prod(axis.touched for axis in self.axes) - self._private_voxels

    @property
    def shared_voxels(self) -> int:
        """Voxels of the output that are put together from the sums of several chunks.

        Zero unless chunks exchange sums.
        """
        if self.plan.exchange is None:
            return 0
        return self.plan.chunks.roi.size - self._private_voxels

    @property
    def _private_voxels(self) -> int:
        return math.prod(axis.private for axis in self.axes)


def axis_totals(plan: InferencePlan, axis: int) -> AxisTotals:
    """Totals on one axis."""
    counted = _count_positions(plan, axis)
    if plan.exchange is None:
        positions = [_position_totals(plan, axis, position) for position, _ in counted]
    else:
        exchange = plan.exchange
        positions = [_exchange_position_totals(plan, axis, exchange, p) for p, _ in counted]
    patches = voxels_read = touched = private = owners = pairs = 0
    patch_counts = Counter[int]()
    extremes = []
    for (_, times), totals in zip(counted, positions, strict=True):
        read = _read_interval(plan, axis, totals)
        patches += times * totals.patches
        voxels_read += times * (read[1] - read[0])
        touched += times * totals.touched
        private += times * totals.private
        owners += times * bool(totals.patches)
        pairs += times * totals.receivers
        patch_counts[totals.patches] += times
        extremes.append(
            AxisExtremes(
                input=totals.input[1] - totals.input[0],
                input_blocks=_block_voxels(plan, axis, read, repeats=times > 1),
                core=totals.core,
                private=totals.private,
                touched=totals.touched,
                shared=totals.touched - totals.private,
                resampled=totals.resampled,
            )
        )
    return AxisTotals(
        patches=patches,
        largest_patches=max(patch_counts),
        voxels_read=voxels_read,
        touched=touched,
        private=private,
        owners=owners,
        pairs=pairs,
        extremes=AxisExtremes(*map(max, zip(*extremes, strict=True))),
        patch_counts=patch_counts,
    )


def _count_positions(plan: InferencePlan, axis: int) -> list[tuple[int, int]]:
    """Chunk positions on one axis, and how many others are like each of them.

    Away from the domain's ends, what a chunk does depends only on the phase of the lattice relative
    to the chunk, which is periodic; not so where patches are spread, whose distances differ, or
    where chunks are of other voxels.
    """
    count = plan.chunks.shape[axis]
    if plan.lattice.kind == "spread" or _changes_voxels(plan, axis):
        return [(position, 1) for position in range(count)]
    margin = plan.crop_margin[axis] + plan.chunk_crop_margin[axis] + plan.halo[axis]
    period = _period(plan, axis)
    # positions at either end of the axis that may differ from those in the middle
    end = ceil_div(2 * plan.lattice.patch_shape[axis] + margin, plan.chunks.chunk_shape[axis]) + 1
    repeats, rest = divmod(max(0, count - 2 * end), period)
    if repeats < 2:
        return [(position, 1) for position in range(count)]
    first = [(position, 1) for position in range(end)]
    middle = [(end + k, repeats) for k in range(period)]
    last = [(position, 1) for position in range(count - end - rest, count)]
    return first + middle + last


def _changes_voxels(plan: InferencePlan, axis: int) -> bool:
    """Whether the output has other voxels than the network, on one axis."""
    return plan.to_output is not None and not plan.to_output.axes[axis].is_identity


def _period(plan: InferencePlan, axis: int) -> int:
    """Chunk positions after which the lattice has the same phase again."""
    stride = plan.lattice.patch_shape[axis] - plan.lattice.patch_overlap[axis]
    return stride // math.gcd(plan.chunks.chunk_shape[axis], stride)


def _position_totals(plan: InferencePlan, axis: int, position: int) -> PositionTotals:
    """A chunk position without exchange: as in any chunk at this position."""
    work = plan.work(position * math.prod(plan.chunks.shape[axis + 1 :]))
    core = work.core_box.shape[axis]
    return PositionTotals(
        patches=len(work.patches[axis]),
        input=(work.input_box.start[axis], work.input_box.stop[axis]),
        core=core,
        private=core,
        touched=core,
        resampled=_resampled_length(plan, axis, position),
    )


def _resampled_length(plan: InferencePlan, axis: int, position: int) -> int:
    """The output's voxels that a chunk's values are resampled to, on an axis; 0 if they are not."""
    if plan.to_output is None:
        return 0
    core = plan.chunks.core_box(position * math.prod(plan.chunks.shape[axis + 1 :]))
    return plan.finished_box(core).shape[axis]


def _exchange_position_totals(
    plan: InferencePlan, axis: int, exchange: SeamExchangePlan, position: int
) -> PositionTotals:
    ownership = exchange.ownership[axis]
    owned = ownership.owned_patches(position)
    start = stop = plan.volume.start[axis]
    if owned:
        margin = plan.crop_margin[axis]
        start = ownership.lattice.patch_start(owned[0]) - margin
        stop = ownership.lattice.patch_start(owned[-1]) + ownership.lattice.patch + margin
    reach = ownership.reach(position)
    private_start = private_stop = 0
    if not exchange.joins_whole_chunks:
        _, stop_of_chunk = ownership.interval(position)
        first, last = ownership.inside
        private_start = max(ownership.private_start(position), first)
        private_stop = min(stop_of_chunk, last)
    return PositionTotals(
        patches=len(owned),
        input=(start, stop),
        core=reach[1] - reach[0],
        private=max(0, private_stop - private_start),
        touched=ownership.touched_voxels(position),
        receivers=len(ownership.receivers(position)),
        resampled=_resampled_length(plan, axis, position),
    )


def _read_interval(plan: InferencePlan, axis: int, totals: PositionTotals) -> tuple[int, int]:
    """The input inside the volume, counted from the volume's start, where its blocks begin."""
    origin = plan.volume.start[axis]
    start, stop = totals.input
    return max(start, origin) - origin, min(stop, plan.volume.stop[axis]) - origin


def _block_voxels(plan: InferencePlan, axis: int, read: tuple[int, int], *, repeats: bool) -> int:
    """Voxels of the storage blocks that an interval touches, on one axis.

    Where the position stands for others that are placed differently on the blocks (``repeats``),
    this is the most that an interval of the same length may touch.
    """
    block = plan.input_block_shape[axis]
    first, last = read
    if repeats and _period(plan, axis) * plan.chunks.chunk_shape[axis] % block:
        return most_blocks(last - first, block, plan.volume.shape[axis]) * block
    return (ceil_div(last, block) - first // block) * block
