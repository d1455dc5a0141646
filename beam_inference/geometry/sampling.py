"""Samples of chunks: by a hash of their place, at random, or evenly spaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.grids import ChunkGrid

_AT_A_TIME = 1 << 20


def sample_chunks(chunks: ChunkGrid, fraction: float, seed: int) -> Iterator[int]:
    """A sample of about a given share of the chunks, in order.

    A chunk is in the sample if its hash is below the share, so smaller samples are parts of larger
    ones. The hash depends on the seed and the start of the chunk's core box alone, so a sample
    keeps its places when the volume grows.

    Args:
        chunks: the chunk grid.
        fraction: the share, from 0 to 1.
        seed: of the hash.

    Yields:
        The numbers of chunks.
    """
    bound = np.uint64(fraction * 2**64) if fraction < 1 else np.uint64(2**64 - 1)
    for first in range(0, chunks.count, _AT_A_TIME):
        indices = np.arange(first, min(first + _AT_A_TIME, chunks.count))
        _, ny, nx = chunks.shape
        hashed = np.full(len(indices), seed, np.uint64)
        for axis, position in enumerate((indices // (ny * nx), indices // nx % ny, indices % nx)):
            start = chunks.roi.start[axis] + position * chunks.chunk_shape[axis]
            hashed = _mix(hashed ^ start.astype(np.uint64))
        yield from map(int, indices[hashed <= bound])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash values so that each bit changes half of the result's bits.

    This is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def count_and_sample(indices: Iterable[int], size: int) -> tuple[int, list[int]]:
    """Count indices and draw a random sample of them in one pass, in the memory of the sample.

    This is reservoir sampling (Vitter 1985, algorithm R). Workers begin all over a job, so no part
    of its chunks is the latest.

    Args:
        indices: any number of them.
        size: of the sample; fewer if there are fewer indices.

    Returns:
        The number of indices, and the sample in no order.
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
    """Up to ``count`` of some indices, evenly spaced in their order."""
    if len(indices) <= count:
        return list(indices)
    return [indices[round(k * (len(indices) - 1) / max(1, count - 1))] for k in range(count)]
