"""Arrays as large as a chunk: each in memory of its own, and that is kept for the next one of its size.

From the heap they would leave holes, which what comes next may not fit in, and its small pages take
the system longer to clear than the array to fill. And as their memory stays, a process holds after
a few chunks what it will hold at
most: it does not run out of memory on the day when the store is slow.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST = 2**20
"""Bytes from which on an array is mapped: what is less comes and goes with patches, not chunks."""

LARGER = 1.1
"""An array may be in memory that is larger by this factor: cutouts differ by some voxels."""

_lock = threading.Lock()
_idle: list[mmap.mmap] = []


class _Lent(weakref.ref[NDArray[np.uint8]]):
    """An array, and the memory that it lies in."""

    __slots__ = ("memory",)
    memory: mmap.mmap


_lent: dict[int, _Lent] = {}
_returned: list[_Lent] = []
"""Of arrays that are gone. Not a line of Python is run as they go: a thread of TensorStore's may be
the one that lets go of them, with locks of its own in hand, and must not wait for the interpreter
there.
"""


def empty(shape: tuple[int, ...], dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
    """An array in C order that can be written, of any values.

    Raises:
        MemoryError: the system has not so much.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LEAST:
        return np.empty(shape, dtype)
    memory = _memory(size)
    array = np.frombuffer(memory, np.uint8, size)
    lent = _Lent(array, _returned.append)
    lent.memory = memory
    _lent[id(lent)] = lent
    return array.view(dtype).reshape(shape)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any] | type[np.generic]) -> NDArray[Any]:
    """The same, of zeros."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def give_back() -> None:
    """Give the memory that is kept for other arrays, and what the heap has no use for, back to the system."""
    with _lock:
        _take_back()
        _idle.clear()
    # GNU's
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def idle_bytes() -> int:
    """Memory that is kept for other arrays."""
    with _lock:
        _take_back()
        return sum(map(len, _idle))


def _take_back() -> None:
    while _returned:
        lent = _returned.pop()
        _idle.append(_lent.pop(id(lent)).memory)


def _memory(size: int) -> mmap.mmap:
    with _lock:
        _take_back()
        fitting = [memory for memory in _idle if size <= len(memory) <= LARGER * size]
        if fitting:
            memory = min(fitting, key=len)
            _idle.remove(memory)
            return memory
        _idle.clear()  # of other sizes than are needed now
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"no memory for an array of {size} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
