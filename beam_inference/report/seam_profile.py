"""Profiles of seams: differences of neighbouring voxels by distance from the chunk border.

A result without seams differs across a chunk border as much as anywhere else; one that was stitched
from chunks jumps there. Looked at are cut-outs of both sides of some borders, as they were written,
at full resolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import PermanentReadError, TransientReadError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.sampling import spread
from beam_inference.job.records import Receipt
from beam_inference.job.state import State
from beam_inference.volumes.volume import Volume

REACH = 24
"""Voxels on either side of a border, at most."""
ACROSS = 48
"""Voxels of a cut-out along the border, on each of its axes, at most."""
BORDERS = 12
"""Cut-outs on each axis, at most."""
_LOOKED_FOR = 96
_STANDS_OUT = 1.15


@dataclass(frozen=True, slots=True)
class SeamProfile:
    """The profile of one axis.

    Attributes:
        axis: 0, 1 or 2 for z, y, x.
        differences: mean absolute difference of neighbours on this axis, over channels and pairs;
            of those on either side of a border, of those one voxel from a border, two, ….
        pairs: how many each is the mean of.
        cutouts: how many places were looked at.
    """

    axis: int
    differences: NDArray[np.float64]
    pairs: NDArray[np.int64]
    cutouts: int

    @property
    def at_border(self) -> float:
        """Mean over pairs that lie across a border."""
        return float(self.differences[0])

    @property
    def elsewhere(self) -> float:
        """Mean over all other pairs that were looked at; NaN without any."""
        pairs = int(self.pairs[1:].sum())
        return (
            float((self.differences[1:] * self.pairs[1:]).sum() / pairs) if pairs else float("nan")
        )

    @property
    def stands_out(self) -> bool:
        """Whether neighbours differ clearly more across a border than at any distance from it.

        Pairs close by count, too. In smooth values the differences of a few places are much alike,
        and a border may lie where they are largest; but then they are as large beside it.
        """
        others = self.differences[1:]
        return bool(len(others) and self.at_border > _STANDS_OUT * float(others.max()))


def seam_profiles(
    grid: ChunkGrid, receipts: Sequence[Receipt], state: State, output: Volume
) -> list[SeamProfile]:
    """Profiles of the axes on which two finished chunks meet; ``receipts`` are some of the job."""
    profiles = (
        seam_profile(grid, axis, receipts, state, output)
        for axis in range(3)
        if grid.shape[axis] > 1
    )
    return [profile for profile in profiles if profile is not None]


def seam_profile(
    grid: ChunkGrid, axis: int, receipts: Sequence[Receipt], state: State, output: Volume
) -> SeamProfile | None:
    """Profile of one axis at borders of finished chunks, preferably not of one value throughout."""
    sums = np.zeros(REACH)
    pairs = np.zeros(REACH, np.int64)
    cutouts = 0
    for chunk in spread(_before_a_finished_one(grid, axis, receipts, state), BORDERS):
        box = border_box(grid, axis, chunk)
        try:
            array = output.read(box)
        except (PermanentReadError, TransientReadError):
            continue  # verify --deep tells of those
        cutouts += 1
        border = grid.core_box(chunk).stop[axis]
        for distance, total, count in differences(array, axis + 1, border - box.start[axis]):
            sums[distance] += total
            pairs[distance] += count
    if not pairs.any():
        return None
    reach = int(np.flatnonzero(pairs)[-1]) + 1
    return SeamProfile(axis, sums[:reach] / np.maximum(pairs[:reach], 1), pairs[:reach], cutouts)


def differences(array: NDArray[np.generic], axis: int, border: int) -> list[tuple[int, float, int]]:
    """Pairs of neighbours along an axis: distance, sum of absolute differences, and count.

    ``border`` is the position on that axis of the first voxel behind the chunk border: distance 0
    are the pairs of it and the voxel before.
    """
    values = np.moveaxis(array, axis, 0).astype(np.float64)
    steps = np.abs(np.diff(values, axis=0)).reshape(len(values) - 1, -1)
    return [
        (abs(place + 1 - border), float(step.sum()), step.size) for place, step in enumerate(steps)
    ]


def border_box(grid: ChunkGrid, axis: int, chunk: int) -> BoundingBox:
    """Box of the voxels nearer to the border of a chunk and the next one than to other borders."""
    core = grid.core_box(chunk)
    behind = grid.core_box(chunk + _step(grid, axis))
    starts = []
    stops = []
    for each in range(3):
        low = core.start[each]
        high = core.stop[each]
        if each == axis:
            border = high
            end = behind.stop[each]
            # At most half the way to the next border, or to where the volume ends: networks err
            # there, too.
            low = max((low + border) // 2, border - REACH)
            high = min((border + end + 1) // 2, border + REACH)
        elif high - low > ACROSS:
            low = (low + high - ACROSS) // 2
            high = low + ACROSS
        starts.append(low)
        stops.append(high)
    return BoundingBox((starts[0], starts[1], starts[2]), (stops[0], stops[1], stops[2]))


def _step(grid: ChunkGrid, axis: int) -> int:
    """Difference of index between a chunk and the next on an axis."""
    position = [0, 0, 0]
    position[axis] = 1
    return grid.index(position)


def _before_a_finished_one(
    grid: ChunkGrid, axis: int, receipts: Sequence[Receipt], state: State
) -> list[int]:
    """Chunks among those of some receipts behind which, on an axis, lies another finished one."""
    last = grid.shape[axis] - 1
    candidates = [receipt for receipt in receipts if grid.position(receipt.chunk)[axis] < last]
    with_contents = [receipt.chunk for receipt in candidates if has_variation(receipt)]
    chosen = spread(sorted(with_contents) or [receipt.chunk for receipt in candidates], _LOOKED_FOR)
    step = _step(grid, axis)
    behind = {receipt.chunk for receipt in state.read_receipts([chunk + step for chunk in chosen])}
    return [chunk for chunk in chosen if chunk + step in behind]


def has_variation(receipt: Receipt) -> bool:
    """Whether what a chunk wrote is not one value throughout."""
    return any(channel.max > channel.min for part in receipt.parts for channel in part.channels)
