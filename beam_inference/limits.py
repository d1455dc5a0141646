"""Bounds on what a worker process keeps in memory at a time, which I/O obeys and the memory projection counts."""

from __future__ import annotations

from typing import Any

import numpy as np

CACHED_CUTOUTS = 2
"""Input that a process keeps at least, as decoded blocks: what the next chunk of each of two runs may read again."""


MASK_CACHE_BYTES = 2**26
"""Decoded blocks of masks that a process keeps at most: a chunk's are asked for more than once."""


WRITTEN_BYTES = 2**23
"""Of a chunk, what is handed to the store at a time, as far as that is whole layers of blocks."""


SEAM_FILES_AT_ONCE = 4
"""That are asked for before they are needed."""


def cached_cutouts(threads: int) -> int:
    """How much input a process keeps that so many threads share, in the blocks of a cutout."""
    return max(threads, CACHED_CUTOUTS)


def layers_at_once(layer_bytes: Any) -> Any:
    """How many layers of blocks are written at a time, of so many bytes each: integers, or arrays of them."""
    return maximum(1, WRITTEN_BYTES // layer_bytes)


def minimum(a: Any, b: Any) -> Any:
    """Of numbers, or of arrays of them: shapes may be those of many chunks at once."""
    return np.minimum(a, b) if np.ndim(a) or np.ndim(b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The same of the larger one."""
    return -minimum(-a, -b)
