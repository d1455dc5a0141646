"""The cores and memory that a process may use, and its settings: variables, logs, the heap.

Nothing else in the package changes the environment or the allocator, or filters what libraries log.
``use_one_heap`` is called by the command line and by each worker, also where a worker lives in
somebody else's process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CONTAINER = Path("/sys/fs/cgroup")
_lock = threading.RLock()
_bound_lock = threading.RLock()


@contextmanager
def set_variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while, and restore it afterwards; one thread at a time."""
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


@contextmanager
def filter_logs(
    names: Sequence[str], is_shown: Callable[[logging.LogRecord], bool]
) -> Iterator[None]:
    """Show only some of what libraries log in this thread.

    Args:
        names: of the loggers of a library: a logger's filter is not that of the loggers below it.
        is_shown: whether a record is; it may as well remember it.
    """
    thread = threading.get_ident()

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != thread or is_shown(record)

    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def usable_cores(container: Path = _CONTAINER) -> int:
    """Number of CPU cores that this process may use at a time.

    These are the cores that it may run on, or fewer if its container has a quota (cgroup v2).

    Args:
        container: where the system tells the container's limits.
    """
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _limit(container, "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return min(cores, math.ceil(int(quota) / int(period)))
    return cores


def usable_memory(container: Path = _CONTAINER) -> int:
    """Bytes of memory that this machine, or the container on it (cgroup v2), may use.

    Args:
        container: where the system tells the container's limits.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit(container, "memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def format_bytes(count: float) -> str:
    """A number of bytes in a binary unit, such as 1.5 GiB."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        count /= 1024
        if count < 999.5:  # three digits, never 1.02e+03
            return f"{count:.3g} {unit}"
    return f"{count / 1024:,.0f} EiB"


def available_memory(
    container: Path = _CONTAINER, machine: Path = Path("/proc/meminfo")
) -> int | None:
    """Bytes of memory that can be taken now without anything being killed; None where unknown.

    Files that the system keeps in memory count as available, because it drops them on demand.

    Args:
        container: where the system tells the container's limits (cgroup v2).
        machine: where the system tells the machine's memory.
    """
    if not machine.is_file():
        return None
    kilobytes = _numbers_of(machine)
    available = 1024 * (kilobytes.get("MemAvailable:", 0) + kilobytes.get("SwapFree:", 0))
    limit = _limit(container, "memory.max")
    used = container / "memory.current"
    if not (limit.isdigit() and used.is_file()):
        return available
    files = _numbers_of(container / "memory.stat")
    kept = files.get("active_file", 0) + files.get("inactive_file", 0)
    return min(available, max(0, int(limit) - int(used.read_text()) + kept))


_PROCESS = Path("/proc/self")


def start_peak_memory(process: Path = _PROCESS) -> int | None:
    """Have the system count the most memory of this process anew; see :func:`peak_memory`.

    Args:
        process: where the system tells of it.

    Returns:
        Bytes that it holds now; None where this cannot be asked for: on other systems than Linux,
        and in sandboxes that do not let a process write to /proc.
    """
    try:
        (process / "clear_refs").write_text("5")
    except OSError:
        return None
    return 1024 * _numbers_of(process / "status")["VmRSS:"]


def peak_memory(process: Path = _PROCESS) -> int:
    """The most bytes that this process has held since :func:`start_peak_memory`, which told some.

    Args:
        process: as there.
    """
    return 1024 * _numbers_of(process / "status")["VmHWM:"]


def _numbers_of(file: Path) -> dict[str, int]:
    """Numbers in a file of the system's with a name and a number on each line."""
    pairs = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) > 1 and words[1].isdigit()}


@contextmanager
def bound_memory() -> Iterator[None]:
    """Fail an allocation beyond the memory that is available now, instead of being killed for it.

    The bound is the process's, for a while, and concerns what it takes beyond what it has; one
    thread at a time sets it. It is there on Linux only.
    """
    available = available_memory()
    if available is None or sys.platform != "linux":
        yield
        return
    import resource

    held = 1024 * _numbers_of(Path("/proc/self/status")).get("VmData:", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [held + available, *(each for each in (soft, hard) if each >= 0)]
    with _bound_lock:
        resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _limit(container: Path, name: str) -> str:
    """A limit of a container as Linux tells it, or "max" if there is none."""
    file = container / name
    return file.read_text().strip() if file.is_file() else "max"


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_ON_THE_HEAP = 32 * 2**20
"""Bytes below which arrays come from the heap: the most that GNU's allocator can be asked for."""


def end_without_collecting() -> None:
    """Have this process end without a last search for garbage.

    With PyTorch, OpenVINO and Beam imported it takes seconds, for memory that is given back anyway.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


def use_one_heap() -> None:
    """Let all threads of this process allocate from one heap.

    This concerns GNU's allocator, see mallopt(3); elsewhere nothing happens. It changes the process
    and, through ``MALLOC_ARENA_MAX``, those that it starts.

    By default each thread has a heap of its own, which keeps what was freed in it: a worker's
    memory grows with the number of chunks that it has done. With one heap, arrays of some megabytes
    may stay in it from one chunk to the next. Otherwise the system maps them anew each time and
    clears their pages, which takes a tenth of a network's time in PyTorch on a CPU. Heaps that
    exist already do not change, so this comes before threads are made.
    """
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")
    _mallopt((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _ON_THE_HEAP), (_M_TRIM_THRESHOLD, 128 * 2**20))


@contextmanager
def avoid_heap() -> Iterator[None]:
    """Map all but small arrays by themselves for a while, so that they are given back when freed.

    Then the process holds no more than is in use: on the heap there is an unpredictable amount of
    freed memory between arrays. It has an effect only after :func:`use_one_heap`.
    """
    # the settings of somebody else's heap could not be restored
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
