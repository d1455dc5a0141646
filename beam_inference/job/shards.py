"""Shards of a job: fixed shares of its chunks, for schedulers that know only a number."""

from __future__ import annotations

from dataclasses import dataclass

from beam_inference.geometry.partition import shard_range

MOST_SHARDS = 1_000_000
"""Most shards of a job; schedulers allow fewer tasks in an array."""


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Progress of a job that is divided into shards.

    Attributes:
        count: number of shards.
        ended: number of these that have come to their end.
    """

    count: int
    ended: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the shares that the chunks of a job are divided into: a range of their numbers.

    Attributes:
        index: its number, from 0.
        count: number of all shards.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def chunk_range(self, chunks: int) -> tuple[int, int]:
        """First chunk of the shard, and the one after its last, of a job of ``chunks`` chunks."""
        return shard_range(chunks, self.index, self.count)
