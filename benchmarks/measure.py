"""Shared by benchmarks: ratios of runs in turn, times of a job, peak memory, the machine."""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any


def take_no_arguments(description: str | None) -> None:
    """Show what a benchmark without arguments does to whoever asks for help, and refuse any."""
    argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()


def ratio(
    first: Callable[[], Any],
    second: Callable[[], Any],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of both, run in turn after a warm-up, and the median of ratios first / second.

    Args:
        first: what is measured.
        second: what it is compared with.
        repeats: runs of each that count.
        clock: its seconds; those of :func:`time.process_time` are what one core would take, also
            where others use the machine.
    """
    pairs = []
    for repeat in range(repeats + 1):
        times = []
        for action in (first, second):
            start = clock()
            action()
            times.append(clock() - start)
        if repeat:
            pairs.append((times[0], times[1]))
    return ratio_of_pairs(pairs)


def ratio_of_pairs(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The median and the range of the ratios, and the medians of both."""
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ratio": round(median(ratios), 3),
        "min": round(ratios[0], 3),
        "max": round(ratios[-1], 3),
        "seconds": round(median(a for a, _ in pairs), 4),
        "against_seconds": round(median(b for _, b in pairs), 4),
    }


def work_of(output: str) -> tuple[float, float, list[float]]:
    """Start of a job's first chunk, end of its last, and the network's seconds for each chunk."""
    from beam_inference.job.state import State

    state = State(f"{output}/_beam_inference")
    job = state.load_job()
    assert job is not None
    state = state.of(job)
    chunks = range(job.plan.chunks.count)
    receipts = state.read_receipts(chunks)
    computed = state.read_sums(chunks) or receipts
    first = min(each.finished_at.timestamp() - sum(each.seconds.values()) for each in computed)
    last = max(receipt.finished_at.timestamp() for receipt in receipts)
    return first, last, [each.seconds["infer"] for each in computed]


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most memory that an action takes beyond what the process holds before it (Linux)."""
    from beam_inference.environment import peak_memory, start_peak_memory

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what was freed is not held
    before = start_peak_memory()
    if before is None:
        raise RuntimeError("memory is measured on Linux, where /proc may be written")
    action()
    return peak_memory() - before


def machine(*packages: str) -> dict[str, Any]:
    """What the figures were taken on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    versions = {name: metadata.version(name) for name in packages}
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **versions,
    }
