"""Bounds on what a worker holds in memory: I/O obeys them, the memory projection counts them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = int | NDArray[np.int64]
"""An integer; or an array, where many chunk shapes are judged at once."""

CACHED_CUTOUTS = 2
"""Least number of cutouts whose decoded input blocks a process keeps.

One for each of two runs, whose next chunks may read the same blocks again.
"""

MASK_CACHE_BYTES = 2**26
"""Most bytes of decoded mask blocks that a process keeps, because chunks read them repeatedly."""

WRITTEN_BYTES = 2**23
"""Most bytes of a chunk that are handed to the store at a time, or one layer of blocks."""

SEAM_FILES_AT_ONCE = 4
"""Seam files requested ahead of the one being merged."""


def cached_cutouts(threads: int, stated: int | None) -> int:
    """Number of cutouts whose decoded input blocks a process keeps.

    Args:
        threads: harness threads of the process.
        stated: the number that the job states; None for as many as threads, at least two.
    """
    return max(threads, CACHED_CUTOUTS) if stated is None else stated


def layers_at_once(layer_bytes: Numbers) -> Numbers:
    """Number of layers of blocks that are written at a time, at least one.

    Args:
        layer_bytes: bytes of a layer, an integer or an array of them.
    """
    return maximum(1, WRITTEN_BYTES // layer_bytes)


def minimum(a: Numbers, b: Numbers) -> Numbers:
    """The smaller of two numbers, or of each pair if one of them is an array."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return np.minimum(a, b)


def maximum(a: Numbers, b: Numbers) -> Numbers:
    """The larger of two numbers, or of each pair if one of them is an array."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return np.maximum(a, b)
