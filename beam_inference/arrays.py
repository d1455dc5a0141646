"""Arrays as large as a chunk: each in memory of its own, which goes back to the system with it.

From the heap they would leave holes, which what comes next may not fit in; and its small pages take the system longer
to clear than the array to fill (docs/performance.md).
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LEAST = 2**20
"""Bytes from which on an array is mapped: what is less comes and goes with patches, not chunks."""


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
    """An array of zeros, in C order, that can be written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LEAST:
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)
