"""Means and modes by brute force: loops over voxels, in Python's exact integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from beam_inference.geometry import zyx
from beam_inference.geometry.zyx import Zyx


def cells(array: np.ndarray, start: Zyx, factor: Zyx) -> Iterator[tuple[Zyx, list[Any]]]:
    """Yield each cell's index in the result and its voxels, x fastest, without box arithmetic."""
    places = [
        [(a + i) // f for i in range(n)] for a, n, f in zip(start, array.shape, factor, strict=True)
    ]
    axes = [sorted(set(axis)) for axis in places]
    for index in product(*(range(len(axis)) for axis in axes)):
        at = [[i for i, p in enumerate(places[k]) if p == axes[k][index[k]]] for k in range(3)]
        yield zyx.triple(index), [array[i, j, k] for i, j, k in product(*at)]


def exact_mean(values: Sequence[Any]) -> Any:
    """Mean of integers, halves to even, or of floats, which are summed in order in float64."""
    if isinstance(values[0], np.floating):
        return values[0].dtype.type(sum(map(float, values)) / len(values))
    total = sum(map(int, values))
    n = len(values)
    down, left = divmod(total, n)
    return down + (2 * left > n or (2 * left == n and down % 2 == 1))


def exact_mode(values: Sequence[Any], factor: Zyx) -> Any:
    """The value that is most frequent, and among equally frequent ones the first."""
    if factor == (1, 2, 2) and len(values) == 4:
        a, b, c, d = values
        return a if a in (b, c) else b if b == c else d
    return max(values, key=lambda value: (values.count(value), -values.index(value)))


def level_above(array: np.ndarray, start: Zyx, factor: Zyx, method: str) -> np.ndarray:
    """The level above an array (channels, z, y, x) whose first voxel is ``start``."""
    above = [
        sorted({(a + i) // f for i in range(n)})
        for a, n, f in zip(start, array.shape[1:], factor, strict=True)
    ]
    result = np.empty((len(array), *map(len, above)), array.dtype)
    for channel, values in enumerate(array):
        for index, voxels in cells(values, start, factor):
            mean = exact_mean(voxels) if method == "mean" else exact_mode(voxels, factor)
            result[(channel, *index)] = mean
    return result
