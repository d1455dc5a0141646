"""Which chunk shape is best for a job: searched over whole blocks, per axis, with no volume opened: pure.

What a chunk shape costs is a product over the axes, so some candidates on each axis say all about
their hundreds of thousands of combinations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.plan import AxisTotals, Extremes, InferencePlan, totals_on
from beam_inference.geometry.zyx import Zyx

DENSE = 64
"""Candidates of an axis: so many of the smallest; of the larger each a sixteenth more, and what is whole strides."""
AS_GOOD = 1.02
"""Of shapes whose busiest worker computes at most this much more than the least, other things decide."""


def suggest(
    plan: InferencePlan, fits: Callable[[Extremes], Any], workers: int
) -> InferencePlan | None:
    """The plan with the best chunk shape, in its own seam mode; None if not even one block fits.

    The best are those whose busiest worker computes the fewest patches at worst (Graham 1969,
    "Bounds on multiprocessing timing anomalies": all patches over the workers, and one largest
    chunk at the end), to :data:`AS_GOOD`; of them, that which moves the fewest voxels, read or
    through seam files. ``fits`` says whether a worker has room for chunks of such extremes, on x
    for an array of them at once.
    """
    axes = _candidates(plan, fits)
    if not all(axes):
        return None
    found: list[tuple[int, int, NDArray[np.float64], NDArray[np.float64]]] = []
    on_x = [totals for _, totals in axes[2]]
    x_extents = np.array([totals.extents for totals in on_x]).T
    x_patches, x_largest, x_read, x_reached, x_private = (
        np.array([getattr(totals, name) for totals in on_x], float)
        for name in ("patches", "largest_patches", "voxels_read", "reached", "private")
    )
    for z, on_z in axes[0]:
        for y, on_y in axes[1]:
            fitting = np.asarray(
                fits(Extremes(*zip(on_z.extents, on_y.extents, x_extents, strict=True)))
            )
            if fitting.any():
                patches = on_z.patches * on_y.patches * x_patches
                largest = on_z.largest_patches * on_y.largest_patches * x_largest
                busiest = _busiest(patches, largest, workers)
                seams = (
                    on_z.reached * on_y.reached * x_reached
                    - on_z.private * on_y.private * x_private
                )
                moved = on_z.voxels_read * on_y.voxels_read * x_read + 2 * 4 * seams
                found.append((z, y, np.where(fitting, busiest, np.inf), moved))
    if not found:
        return None
    least = min(busiest.min() for _, _, busiest, _ in found)
    best = np.inf
    shape = plan.block_shape
    for z, y, busiest, moved in found:
        as_good = np.where(busiest <= AS_GOOD * least, moved, np.inf)
        if as_good.min() < best:
            best = as_good.min()
            shape = (z, y, axes[2][int(as_good.argmin())][0])
    return with_chunk_shape(plan, shape)


def with_chunk_shape(plan: InferencePlan, chunk_shape: Zyx) -> InferencePlan:
    """The same plan with another chunk shape."""
    return replace(plan, chunks=ChunkGrid(plan.chunks.roi, chunk_shape))


def busiest_worker(plan: InferencePlan, workers: int) -> float:
    """Patches that the busiest worker computes at worst, over an even share of the fewest possible: 1 is perfect."""
    totals = [totals_on(plan, axis) for axis in range(3)]
    patches, largest = (
        np.prod([float(getattr(t, name)) for t in totals])
        for name in ("patches", "largest_patches")
    )
    return float(_busiest(patches, largest, workers) / (patches / workers))


def _busiest(patches: Any, largest: Any, workers: int) -> Any:
    """Graham's bound: the even share of all patches, and one largest chunk at the end."""
    return patches / workers + largest * (1 - 1 / workers)


def _candidates(
    plan: InferencePlan, fits: Callable[[Extremes], Any]
) -> list[list[tuple[int, AxisTotals]]]:
    """Per axis, multiples of the block that may fit with something on the others, ascending, and what each comes to."""
    all_blocks = ChunkGrid(plan.chunks.roi, plan.block_shape).shape
    few = [
        [_candidate(plan, axis, number) for number in range(1, min(DENSE, all_blocks[axis]) + 1)]
        for axis in range(3)
    ]
    # Not the smallest chunk takes least: one that fits the lattice does.
    least = [
        [min(values) for values in zip(*(t.extents for _, t in candidates), strict=True)]
        for candidates in few
    ]

    def may_fit(axis: int, totals: AxisTotals) -> bool:
        extents = [*least]
        extents[axis] = [*totals.extents]
        return bool(fits(Extremes(*zip(*extents, strict=True))))

    for axis, candidates in enumerate(few):
        block = plan.block_shape[axis]
        lattice = plan.lattice.axes[axis]
        # so many blocks are whole strides
        fit = lattice.stride // math.gcd(block, lattice.stride)
        number = DENSE
        misfits = 0
        while number < all_blocks[axis] and misfits < 3:
            before = number
            number = min(all_blocks[axis], number + max(1, number // 16))
            fitted = number // fit * fit
            for blocks in sorted({number, fitted} if before < fitted else {number}):
                candidates.append(_candidate(plan, axis, blocks))
            misfits = 0 if may_fit(axis, candidates[-1][1]) else misfits + 1
    return [
        [each for each in candidates if may_fit(axis, each[1])]
        for axis, candidates in enumerate(few)
    ]


def _candidate(plan: InferencePlan, axis: int, blocks: int) -> tuple[int, AxisTotals]:
    shape = list(plan.block_shape)
    shape[axis] *= blocks
    return shape[axis], totals_on(with_chunk_shape(plan, (shape[0], shape[1], shape[2])), axis)
