"""Arrays as large as a chunk, each in memory of its own, which is kept for the next of its size.

On the heap they would leave holes, which the next array may not fit into; and clearing the heap's
small pages takes the system longer than filling the array. Because the memory stays, a process
holds after a few chunks as much as it ever will: it does not run out of memory on the day when the
store is slow.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

AnyArray: TypeAlias = NDArray[Any]
"""An array of any dtype: that of a volume is known only when it is opened."""

AnyDtype: TypeAlias = np.dtype[Any]
"""Any dtype."""

LEAST = 2**20
"""Least bytes of an array with memory of its own; smaller ones come and go with patches."""

LARGER = 1.1
"""Kept memory may be larger than an array by this factor: cutouts differ by some voxels."""


class _Lent(weakref.ref[NDArray[np.uint8]]):
    """An array, and the memory that it lies in."""

    __slots__ = ("memory",)
    memory: mmap.mmap


class ArrayPool:
    """Memory of large arrays, in use or kept for later ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []
        self._lent: dict[int, _Lent] = {}
        # Weak references append themselves here as their arrays go. They must not run Python code:
        # TensorStore may drop the last reference in a thread that holds its own locks, and must not
        # wait for the interpreter there.
        self._returned: list[_Lent] = []

    @property
    def kept_sizes(self) -> list[int]:
        """Bytes of each piece of memory that is kept for another array."""
        with self._lock:
            self._take_back()
            return list(map(len, self._idle))

    @property
    def lent_sizes(self) -> list[int]:
        """Bytes of each piece of memory that an array lies in."""
        with self._lock:
            self._take_back()
            return [len(lent.memory) for lent in list(self._lent.values())]

    def empty(self, shape: tuple[int, ...], dtype: AnyDtype | type[np.generic]) -> AnyArray:
        """A writable array in C order, of any values.

        Raises:
            MemoryError: the system has too little memory.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < LEAST:
            return np.empty(shape, dtype)
        memory = self._memory_of(size)
        array = np.frombuffer(memory, np.uint8, size)
        lent = _Lent(array, self._returned.append)
        lent.memory = memory
        self._lent[id(lent)] = lent
        return array.view(dtype).reshape(shape)

    def clear(self) -> None:
        """Give the kept memory back to the system."""
        with self._lock:
            self._take_back()
            self._idle.clear()

    def _take_back(self) -> None:
        while self._returned:
            lent = self._returned.pop()
            self._idle.append(self._lent.pop(id(lent)).memory)

    def _memory_of(self, size: int) -> mmap.mmap:
        with self._lock:
            self._take_back()
            fitting = [memory for memory in self._idle if size <= len(memory) <= LARGER * size]
            if fitting:
                memory = min(fitting, key=len)
                self._idle.remove(memory)
                return memory
            self._idle.clear()  # of other sizes than are needed now
        return _map_memory(size)


pool = ArrayPool()
"""The memory of this process."""


def empty(shape: tuple[int, ...], dtype: AnyDtype | type[np.generic]) -> AnyArray:
    """A writable array in C order, of any values.

    Raises:
        MemoryError: the system has too little memory.
    """
    return pool.empty(shape, dtype)


def zeros(shape: tuple[int, ...], dtype: AnyDtype | type[np.generic]) -> AnyArray:
    """A writable array in C order, of zeros.

    Raises:
        MemoryError: the system has too little memory.
    """
    array = empty(shape, dtype)
    array.fill(0)
    return array


def give_back() -> None:
    """Give unused memory back to the system: what is kept for other arrays, and on the heap."""
    pool.clear()
    # GNU's
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def idle_bytes() -> int:
    """Bytes of memory that are kept for other arrays."""
    return sum(pool.kept_sizes)


def _map_memory(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"no memory for an array of {size} bytes: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):  # built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
