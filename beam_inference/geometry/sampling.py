"""Samples of chunks: by a hash of where they start, so that one keeps its places when the volume grows; or by lot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.grids import ChunkGrid

_AT_A_TIME = 1 << 20


def sampled(chunks: ChunkGrid, fraction: float, seed: int) -> Iterator[int]:
    """About so large a share of the chunks, in order: those whose hash lies below it, so that shares are nested.

    A chunk's hash depends on the seed and the start of its core box alone.
    """
    bound = np.uint64(fraction * 2**64) if fraction < 1 else np.uint64(2**64 - 1)
    for first in range(0, chunks.count, _AT_A_TIME):
        indices = np.arange(first, min(first + _AT_A_TIME, chunks.count))
        _, ny, nx = chunks.shape
        hashed = np.full(len(indices), seed, np.uint64)
        for axis, position in enumerate((indices // (ny * nx), indices // nx % ny, indices % nx)):
            start = chunks.roi.start[axis] + position * chunks.chunk_shape[axis]
            hashed = _mixed(hashed ^ start.astype(np.uint64))
        yield from map(int, indices[hashed <= bound])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every bit of a value changes half of the result's."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def counted_and_sampled(indices: Iterable[int], size: int) -> tuple[int, list[int]]:
    """How many there are, and ``size`` of them, each as likely as any other, all if they are fewer; in no order.

    Reservoir sampling (Vitter 1985, algorithm R): one pass, in the memory of the sample. Workers
        begin all over a job, so no part of it is the latest.
    """
    random = Random(0)
    sample = list[int]()
    count = 0
    for count, index in enumerate(indices, 1):  # its last value is meant
        if count <= size:
            sample.append(index)
        elif (place := random.randrange(count)) < size:
            sample[place] = index
    return count, sample


def spread(indices: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of some chunks, evenly through their order."""
    if len(indices) <= count:
        return list(indices)
    return [indices[round(k * (len(indices) - 1) / max(1, count - 1))] for k in range(count)]
