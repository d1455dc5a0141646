"""How a job's chunks are parted among workers: ranges of their numbers, and runs within these. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice


def index_ranges(count: int, workers: int = 1) -> list[tuple[int, int]]:
    """Half-open ranges that cover ``0 … count`` evenly: what a pipeline's graph holds of a job.

    512 of them, or eight for each worker if that is more, as far as there are chunks: some runners
        share the work out by range.
    """
    parts = min(count, max(512, 8 * workers))
    return [(count * k // parts, count * (k + 1) // parts) for k in range(parts)]


def default_run_length(chunks: int, workers: int) -> int:
    """Chunks per Beam element: enough to overlap reading and computing, few enough to balance the load at the end."""
    return max(1, min(8, chunks // (16 * workers)))


def in_runs(indices: Iterable[int], length: int) -> Iterator[tuple[int, ...]]:
    """Indices in tuples of at most ``length``."""
    iterator = iter(indices)
    while run := tuple(islice(iterator, length)):
        yield run
