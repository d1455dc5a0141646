"""Divides a job's chunks among workers: ranges of their numbers, and runs within ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from beam_inference.geometry.zyx import ceil_div


def index_ranges(count: int, workers: int = 1, run_length: int = 1) -> list[tuple[int, int]]:
    """Half-open ranges that cover ``0 … count`` evenly; a pipeline's graph holds no more of a job.

    There are 512, or eight for each worker if that is more, but no more than runs: some runners
    distribute work by range.

    Args:
        count: number of chunks.
        workers: worker processes that run at a time.
        run_length: chunks of a run, which lies within a range.
    """
    parts = min(ceil_div(count, run_length), max(512, 8 * workers))
    return [(count * k // parts, count * (k + 1) // parts) for k in range(parts)]


def shard_range(count: int, index: int, shards: int) -> tuple[int, int]:
    """Return the half-open range of ``0 … count`` that is the share of one of several shards."""
    return count * index // shards, count * (index + 1) // shards


def in_runs(indices: Iterable[int], length: int) -> Iterator[tuple[int, ...]]:
    """Indices in tuples of at most ``length``."""
    iterator = iter(indices)
    while run := tuple(islice(iterator, length)):
        yield run
