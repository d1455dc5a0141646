"""What a process may use of its machine; what is set for it: variables for a while, and how memory is allocated."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")
_lock = threading.RLock()


@contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """An environment variable has a value for a while, and then what it had before; one thread at a time."""
    with _lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def usable_cores() -> int:
    """How many cores this process may use at a time: those it may run on, or its container's share (cgroup v2)."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _limit("cpu.max").partition(" ")
    return (
        min(cores, math.ceil(int(quota) / int(period)))
        if quota.isdigit() and period.isdigit()
        else cores
    )


def usable_memory() -> int:
    """Bytes of memory that this machine, or the container on it (cgroup v2), may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _limit(name: str) -> str:
    """A container's, as Linux tells it within; "max" where there is none."""
    file = _CONTAINER / name
    return file.read_text().strip() if file.is_file() else "max"


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ON_THE_HEAP = 32 * 2**20
"""What is smaller comes from the heap: the most that GNU's allocator lets one ask for."""


def use_one_heap() -> None:
    """Let all threads of this process allocate from one heap: GNU's allocator, mallopt(3); elsewhere nothing.

    By default each thread has a heap of its own, and each keeps what was freed in it: a worker's
        memory grows with the number of chunks that it has done. With one, arrays of some megabytes
        may stay in it from one chunk to the next. If
    not, the system maps them anew each time, and clears their pages: a tenth of a network's time in
        PyTorch on a CPU. Of heaps that exist already nothing changes, so this comes before threads
        are made, and is told to processes that this one starts.
    """
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    _mallopt((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _ON_THE_HEAP), (_M_TRIM_THRESHOLD, 128 * 2**20))


@contextmanager
def heap_left_alone() -> Iterator[None]:
    """For a while all but small arrays are mapped by themselves, and given back as they are freed; after use_one_heap.

    So a process holds no more than is in use: on the heap freed memory lies between, now more and
        now less of it.
    """
    # what another process's heap was like could not be restored
    if os.environ.get("MALLOC_ARENA_MAX") != "1":
        yield
        return
    _mallopt((_M_MMAP_THRESHOLD, 2**16))
    try:
        yield
    finally:
        _mallopt((_M_MMAP_THRESHOLD, _ON_THE_HEAP))


def _mallopt(*options: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in options:
            mallopt(option, value)
