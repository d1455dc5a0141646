"""The best chunk shape for a job: a search over whole blocks, without opening a volume.

What a chunk shape costs is a product over the axes, so a few hundred candidates on each axis
describe all of their combinations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry import zyx
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.plan_totals import (
    AxisExtremes,
    AxisTotals,
    Extremes,
    axis_totals,
)
from beam_inference.geometry.zyx import Zyx, round_down

DENSE = 64
"""The smallest numbers of blocks on an axis are all candidates, up to this one.

Each larger candidate has about a sixteenth more blocks, or is a whole number of strides.
"""

AS_GOOD = 1.02
"""Shapes within this factor of the best load balance count as equal.

Of these, the shape that moves the fewest voxels wins.
"""

_SEAM_TRANSFERS = 2 * 4
"""Bytes moved per seam voxel and channel: float32, written and read."""

Fits: TypeAlias = Callable[[Extremes[Any]], bool | NDArray[np.bool_]]
"""Whether a worker has room for chunks of such extremes; on x for an array of them at once."""

Floats: TypeAlias = float | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An extent of chunks on one axis, in voxels, and the plan's totals on that axis with it."""

    extent: int
    totals: AxisTotals


@dataclass(frozen=True, slots=True)
class _Row:
    """Chunk shapes with the same extents on z and y, one for each candidate on x.

    Attributes:
        z, y: the extents, in voxels.
        busiest: patches of the busiest worker; infinite where chunks do not fit.
        moved: a measure of the bytes that are read or go through seam files.
    """

    z: int
    y: int
    busiest: NDArray[np.float64]
    moved: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Columns:
    """The totals of all candidates on x, as arrays."""

    patches: NDArray[np.float64]
    largest_patches: NDArray[np.float64]
    voxels_read: NDArray[np.float64]
    touched: NDArray[np.float64]
    private: NDArray[np.float64]
    extremes: AxisExtremes[NDArray[np.int64]]

    @classmethod
    def of_totals(cls, totals: list[AxisTotals]) -> _Columns:
        extremes = np.array([each.extremes for each in totals]).T
        return cls(
            patches=np.array([each.patches for each in totals], float),
            largest_patches=np.array([each.largest_patches for each in totals], float),
            voxels_read=np.array([each.voxels_read for each in totals], float),
            touched=np.array([each.touched for each in totals], float),
            private=np.array([each.private for each in totals], float),
            extremes=AxisExtremes(*extremes),
        )


def with_best_chunk_shape(plan: InferencePlan, fits: Fits, workers: int) -> InferencePlan | None:
    """The plan with the best chunk shape, by its own strategy.

    The best are those whose busiest worker computes the fewest patches at worst (Graham 1969,
    "Bounds on multiprocessing timing anomalies": all patches over the workers, and one largest
    chunk at the end), to :data:`AS_GOOD`; of them, that which moves the fewest voxels, read or
    through seam files.

    Args:
        plan: the job's geometry, with any chunk shape.
        fits: whether a worker has room for chunks of such extremes.
        workers: processes that share the chunks.

    Returns:
        None if not even chunks of one block fit.
    """
    on_z, on_y, on_x = _candidates(plan, fits)
    if not (on_z and on_y and on_x):
        return None
    columns = _Columns.of_totals([candidate.totals for candidate in on_x])
    rows = [row for z in on_z for y in on_y if (row := _row(z, y, columns, fits, workers))]
    if not rows:
        return None
    least = min(row.busiest.min() for row in rows)
    fewest_moved = np.inf
    shape = plan.block_shape
    for row in rows:
        moved = np.where(row.busiest <= AS_GOOD * least, row.moved, np.inf)
        if moved.min() < fewest_moved:
            fewest_moved = moved.min()
            shape = (row.z, row.y, on_x[int(moved.argmin())].extent)
    return with_chunk_shape(plan, shape)


def with_chunk_shape(plan: InferencePlan, chunk_shape: Zyx) -> InferencePlan:
    """The plan with another chunk shape."""
    return replace(plan, chunks=ChunkGrid(plan.chunks.roi, chunk_shape))


def busiest_worker(plan: InferencePlan, workers: int) -> float:
    """Patches of the busiest worker at worst, relative to an even share of all: 1 is perfect."""
    axes = plan.totals.axes
    patches = float(np.prod([float(axis.patches) for axis in axes]))
    largest = float(np.prod([float(axis.largest_patches) for axis in axes]))
    return float(_busiest(patches, largest, workers) / (patches / workers))


def _busiest(patches: Floats, largest: Floats, workers: int) -> Floats:
    """Graham's bound: the even share of all patches, and one largest chunk at the end."""
    return patches / workers + largest * (1 - 1 / workers)


def _row(z: _Candidate, y: _Candidate, x: _Columns, fits: Fits, workers: int) -> _Row | None:
    """The shapes with these extents on z and y; None if none of them fits."""
    on_z = z.totals
    on_y = y.totals
    fitting = np.asarray(fits(Extremes.of_axes(on_z.extremes, on_y.extremes, x.extremes)))
    if not fitting.any():
        return None
    patches = on_z.patches * on_y.patches * x.patches
    largest = on_z.largest_patches * on_y.largest_patches * x.largest_patches
    touched = on_z.touched * on_y.touched * x.touched
    private = on_z.private * on_y.private * x.private
    read = on_z.voxels_read * on_y.voxels_read * x.voxels_read
    return _Row(
        z.extent,
        y.extent,
        busiest=np.where(fitting, _busiest(patches, largest, workers), np.inf),
        moved=read + _SEAM_TRANSFERS * (touched - private),
    )


def _candidates(plan: InferencePlan, fits: Fits) -> list[list[_Candidate]]:
    """Multiples of the block, ascending, that may fit with some extents on the other axes."""
    all_blocks = ChunkGrid(plan.chunks.roi, plan.block_shape).shape
    few = [
        [_candidate(plan, axis, number) for number in range(1, min(DENSE, all_blocks[axis]) + 1)]
        for axis in range(3)
    ]
    # Not the smallest chunk takes least: one that fits the lattice does.
    least = [_least_extremes(candidates) for candidates in few]

    def may_fit(axis: int, candidate: _Candidate) -> bool:
        z, y, x = (candidate.totals.extremes if each == axis else least[each] for each in range(3))
        return bool(fits(Extremes.of_axes(z, y, x)))

    return [
        [
            candidate
            for candidate in few[axis] + _large_candidates(plan, axis, all_blocks[axis], may_fit)
            if may_fit(axis, candidate)
        ]
        for axis in range(3)
    ]


def _large_candidates(
    plan: InferencePlan, axis: int, all_blocks: int, may_fit: Callable[[int, _Candidate], bool]
) -> list[_Candidate]:
    """Candidates of more than :data:`DENSE` blocks, until three in a row cannot fit."""
    stride = plan.lattice.axes[axis].stride
    # as many blocks are whole strides
    fit = stride // math.gcd(plan.block_shape[axis], stride)
    candidates = []
    number = DENSE
    misfits = 0
    while number < all_blocks and misfits < 3:
        before = number
        number = min(all_blocks, number + max(1, number // 16))
        fitted = round_down(number, fit)
        for blocks in sorted({number, fitted} if before < fitted else {number}):
            candidates.append(_candidate(plan, axis, blocks))
        misfits = 0 if may_fit(axis, candidates[-1]) else misfits + 1
    return candidates


def _least_extremes(candidates: list[_Candidate]) -> AxisExtremes[int]:
    """The least of each extent among candidates, each for itself."""
    return AxisExtremes(*map(min, zip(*(c.totals.extremes for c in candidates), strict=True)))


def _candidate(plan: InferencePlan, axis: int, blocks: int) -> _Candidate:
    extent = plan.block_shape[axis] * blocks
    shape = zyx.with_axis(plan.block_shape, axis, extent)
    return _Candidate(extent, axis_totals(with_chunk_shape(plan, shape), axis))


AUTO_MEMORY_BYTES = 2 * 2**30
"""Memory that ``chunk_shape: auto`` lets the chunks of a worker process take, by projection."""
