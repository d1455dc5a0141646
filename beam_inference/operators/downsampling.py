"""Downsampling: from the voxels of a scale to those of the scale above.

Arrays are (channels, z, y, x); each channel is treated alone. ``start`` is the array's first voxel,
ZYX: cells are anchored at coordinate 0 (see :mod:`beam_inference.pyramid.scale_geometry`). Cells
that the array holds in part are made of that part. The value of a cell depends on its voxels alone,
to the last bit.

TensorStore's own downsampling is not used: its modes prefer small numbers, and its means of cells
that are cut at both ends are arbitrary (0.1.86).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.geometry.zyx import Zyx

Method = Literal["mean", "mode"]


def downsample(array: AnyArray, start: Zyx, factor: Zyx, method: Method) -> AnyArray:
    """Compute the voxels of the scale above that have a part in an array.

    Args:
        array: (channels, z, y, x).
        start: coordinates of its first voxel, ZYX.
        factor: voxels of the array along each side of a cell, ZYX.
        method: "mean" or "mode".

    Returns:
        array of (channels, z, y, x) and the same dtype.
    """
    return mean(array, start, factor) if method == "mean" else mode(array, start, factor)


def mean(array: AnyArray, start: Zyx, factor: Zyx) -> AnyArray:
    """Compute the mean of each cell.

    Means of integers are exact, rounded to the nearest, halves to even; floats are summed in
    float64.
    """
    pad = _padding(array.shape[1:], start, factor)
    cells = _pad_to_cells(array, pad, mode="constant")
    count: Any = np.prod(factor)
    if np.any(pad):
        count = sum(mask.astype(np.uint32) for mask in _inside(array.shape[1:], pad, factor))
    whole: AnyArray
    if array.dtype.kind == "f":
        whole = _sum(_voxels(cells, factor), np.float64) / count
        return whole.astype(array.dtype)
    if array.dtype.itemsize < 8:
        kind = _integers_for_sum(array.dtype, int(np.prod(factor)))
        count = np.asarray(count).astype(kind)
        total = _sum_along_axes(cells, factor, kind)
        whole = total // count
        left = total - whole * count  # NumPy's divmod takes several times as long
    else:  # in two halves: a sum of numbers of 64 bits needs more
        values = _voxels(cells, factor)
        kind = array.dtype.type
        count = np.asarray(count).astype(kind)
        half = kind(32)
        low_bits = kind(2**32 - 1)
        high, carried = np.divmod(_sum((value >> half for value in values), kind), count)
        low, left = np.divmod(
            (carried << half) + _sum((value & low_bits for value in values), kind), count
        )
        whole = (high << half) + low
    whole += left + left + (whole & whole.dtype.type(1)) > count  # halves go up from odd numbers
    return whole.astype(array.dtype)


def mode(array: AnyArray, start: Zyx, factor: Zyx) -> AnyArray:
    """Find the most frequent value of each cell.

    Of values equally frequent, the one met first wins, where x is fastest and z slowest. Cells of
    1 × 2 × 2 are the exception: a value that two of the first three voxels share,
    else the fourth's (W. Silversmith, "COUNTLESS 2D", 2017). Neither prefers small numbers, such as
    0, the background. Both are what igneous does.
    """
    pad = _padding(array.shape[1:], start, factor)
    values = _voxels(_pad_to_cells(array, pad, mode="edge"), factor)
    if factor == (1, 2, 2):  # what the edge repeats changes nothing here
        a, b, c, d = values
        return np.where((a == b) | (a == c), a, np.where(b == c, b, d))
    return _first_of_most(values, _inside(array.shape[1:], pad, factor))


def _padding(shape: tuple[int, ...], start: Zyx, factor: Zyx) -> list[tuple[int, int]]:
    """Numbers of voxels that an array lacks to whole cells, before and after it on each axis."""
    return [(a % f, -(a + n) % f) for a, n, f in zip(start, shape, factor, strict=True)]


def _pad_to_cells(
    array: AnyArray, pad: list[tuple[int, int]], mode: Literal["constant", "edge"]
) -> AnyArray:
    """The array made up to whole cells; itself where it has only these."""
    return np.pad(array, [(0, 0), *pad], mode=mode) if np.any(pad) else array


def _voxels(cells: AnyArray, factor: Zyx) -> list[AnyArray]:
    """Values of each voxel of a cell, z slowest, in all cells, as views."""
    fz, fy, fx = factor
    return [cells[:, i::fz, j::fy, k::fx] for i, j, k in product(range(fz), range(fy), range(fx))]


def _sum(values: Iterable[AnyArray], dtype: type[Any]) -> AnyArray:
    """Sum one by one, so that the last bits of floats depend on no shape."""
    first, *others = iter(values)
    total = first.astype(dtype)
    for value in others:
        total += value
    return total


def _integers_for_sum(dtype: AnyDtype, count: int) -> type[Any]:
    """The smallest integers that hold the sum of a cell: the fewer bytes, the faster."""
    limits = np.iinfo(np.int8 if dtype == np.bool_ else dtype)
    most = count * max(limits.max, -limits.min)
    return next(kind for kind in (np.int16, np.int32, np.int64) if most <= np.iinfo(kind).max)


def _sum_along_axes(cells: AnyArray, factor: Zyx, dtype: type[Any]) -> AnyArray:
    """Sum cells of integers along one axis after the other, so that rows are read as they lie."""
    total = cells
    for axis, count in enumerate(factor, 1):
        lanes = np.moveaxis(total, axis, 0)
        total = lanes[::count].astype(dtype)
        for lane in range(1, count):
            total += lanes[lane::count]
        total = np.moveaxis(total, 0, axis)
    return total


def _inside(
    shape: tuple[int, ...], pad: list[tuple[int, int]], factor: Zyx
) -> list[NDArray[np.bool_]]:
    """Masks of the cells in which a voxel is the array's, for each voxel of a cell.

    Their shapes broadcast to (z, y, x).
    """
    axes = [np.pad(np.ones(n, bool), widths) for n, widths in zip(shape, pad, strict=True)]
    fz, fy, fx = factor
    return [
        axes[0][i::fz, None, None] & axes[1][None, j::fy, None] & axes[2][None, None, k::fx]
        for i, j, k in product(range(fz), range(fy), range(fx))
    ]


def _first_of_most(values: list[AnyArray], inside: list[NDArray[np.bool_]]) -> AnyArray:
    count = np.uint8 if len(values) < 256 else np.uint32
    votes: list[Any] = [np.broadcast_to(mask, values[0].shape).astype(count) for mask in inside]
    for later in range(1, len(values)):
        for earlier in range(later):
            same = values[earlier] == values[later]
            same &= inside[earlier]
            same &= inside[later]
            votes[earlier] += same
            votes[later] += same
    best = values[0].copy()
    most = votes[0]
    for value, count_of_value in zip(values[1:], votes[1:], strict=True):
        np.copyto(best, value, where=count_of_value > most)
        np.maximum(most, count_of_value, out=most)
    return best
