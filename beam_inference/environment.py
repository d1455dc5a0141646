"""What is set for a whole process: environment variables for a while, and how memory is allocated."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 2**30


def keep_freed_memory() -> None:
    """Let this process keep what it frees, for its next allocation: GNU's allocator, mallopt(3); elsewhere nothing.

    By default arrays of some megabytes are mapped anew at every allocation, and the system clears each page of them
    again: a quarter of the time of a 3-D network in PyTorch on a CPU (docs/performance.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE - 1)
