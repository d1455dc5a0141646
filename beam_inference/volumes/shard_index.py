"""The lists of blocks in a shard of a precomputed volume, held against the volume's metadata.

TensorStore looks a block up in the one list in which it must be by its number, and takes one that
is not there for absent, which reads as zeros. So metadata that are not those with which a shard was
written, and lists that are damaged, give zeros without an error.

A shard begins with an index: for each of its lists (minishards), where that begins and ends. A list
holds three rows: numbers of blocks, each less the one before; starts of blocks, each less the end
of the one before; and lengths. (Specification: "Neuroglancer Precomputed volume format", sharded
format.)
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import Json
from beam_inference.volumes.sharding import Sharding

_ENTRY_BYTES = 16
"""Of a list, in the index."""

_BLOCK_BYTES = 24
"""Of a block, in a list that is unpacked."""

_MOST_BYTES = 3 * 2**23
"""Bytes of an index, or of a list, that are looked at: a million blocks and more."""

_FURTHER_BYTES = 2**16
"""Bytes that the encoding of a block may add to its voxels."""

_GZIP = 16 + zlib.MAX_WBITS


def most_block_bytes(stored: Json) -> int:
    """Bytes that a block may have in a shard, whether or not gzip packs it.

    gzip unpacks a byte to 1032 at most, so that this bounds the memory, too, that a block takes.

    Args:
        stored: TensorStore's spec of a precomputed volume.
    """
    channels: int = stored["multiscale_metadata"]["num_channels"]
    voxels: int = math.prod(stored["scale_metadata"]["chunk_size"])
    itemsize = np.dtype(stored["dtype"]).itemsize
    return 2 * voxels * channels * int(itemsize) + _FURTHER_BYTES


@lru_cache(maxsize=10_000)
def shard_fault(
    path: Path, sharding: Sharding, most: int, size: int, _modified_ns: int
) -> str | None:
    """What is wrong with the lists of a local shard; None if nothing is.

    Args:
        path: the file, ``NUMBER.shard``, with the number in hexadecimal.
        sharding: as the metadata state it.
        most: bytes that a block of it may have, see :func:`most_block_bytes`.
        size: bytes of the file.

    Returns:
        The end of a sentence that begins with the file.
    """
    return next(_find_faults(path, sharding, most, size), None)


def _find_faults(path: Path, sharding: Sharding, most: int, size: int) -> Iterator[str]:
    """What is wrong; nothing of lists that TensorStore cannot read, which it says itself."""
    number = int(path.name.partition(".")[0], 16)
    first = _ENTRY_BYTES * sharding.minishards
    if first > _MOST_BYTES:
        yield f"is a shard with an index of {first:,} bytes, more than {_MOST_BYTES:,}"
    if number >= sharding.shards:
        yield f"is a shard of a number that its metadata, with {sharding.shards} shards, know not"
    if size == 0:  # TensorStore takes it for one without blocks
        yield "is an empty file, where a shard has at least its index"
    if size < first:
        return
    extents = [np.empty((0, 2), np.int64)]
    with path.open("rb") as file:
        index = np.frombuffer(file.read(first), "<u8").reshape(-1, 2)
        for minishard in np.nonzero(index[:, 0] != index[:, 1])[0].tolist():
            start, stop = index[minishard].tolist()
            if not start < stop <= size - first:
                yield "is a shard whose index leads beyond its end"
            content = _read_list(file, first + start, stop - start, sharding)
            if content is None or len(content) % _BLOCK_BYTES:
                return
            if len(content) > min(_BLOCK_BYTES * sharding.most_listed, _MOST_BYTES - 1):
                yield "is a shard that lists more blocks in one place than its metadata have there"
            steps, gaps, lengths = np.frombuffer(content, "<u8").reshape(3, -1)
            numbers = np.cumsum(steps, dtype=np.uint64)
            longest = int(lengths.max(initial=0))
            if longest > most:
                yield f"is a shard with a block of {longest:,} bytes, more than {most:,}"
            yield from _faults_of_numbers(numbers, number, minishard, sharding)
            stops = np.cumsum(gaps + lengths, dtype=np.uint64).astype(np.int64)
            extents += [
                np.array([[start, stop]]),
                np.stack([stops - lengths.astype(np.int64), stops], axis=1),
            ]
    yield from _faults_of_extents(np.concatenate(extents), size - first)


def _read_list(file: IO[bytes], start: int, length: int, sharding: Sharding) -> bytes | None:
    """A list of blocks, or more of it than there can be; None if it cannot be unpacked."""
    most = min(_BLOCK_BYTES * (sharding.most_listed + 1), _MOST_BYTES)
    file.seek(start)
    if not sharding.is_index_packed:
        return file.read(min(length, most))
    try:
        return zlib.decompressobj(_GZIP).decompress(file.read(length), most)
    except zlib.error:
        return None


def _faults_of_numbers(
    numbers: NDArray[np.uint64], shard: int, minishard: int, sharding: Sharding
) -> Iterator[str]:
    """What is wrong with the numbers of blocks that one list of a shard holds."""
    if np.unique(numbers).size < numbers.size:
        yield "is a shard that lists a block twice"
    if not sharding.are_blocks(numbers).all():
        yield "is a shard that lists blocks which its volume, by its metadata, has not"
    shards, minishards = sharding.places(numbers)
    if (shards != shard).any() or (minishards != minishard).any():
        yield (
            "is a shard that lists blocks which, by the metadata of the volume, belong elsewhere: "
            "its sharding is not that with which it was written"
        )


def _faults_of_extents(extents: NDArray[np.int64], size: int) -> Iterator[str]:
    """What is wrong with where blocks and lists begin and end, behind the index of a shard.

    They fill it up, and lie apart, but for blocks that are one.
    """
    kept = np.unique(extents[extents[:, 0] != extents[:, 1]], axis=0)
    starts = kept[:, 0]
    stops = kept[:, 1]
    if (starts < 0).any() or (stops > size).any() or (starts > stops).any():
        yield "is a shard that lists blocks beyond its end"
    if (starts[1:] < stops[:-1]).any():
        yield "is a shard in which blocks that it lists overlap"
    missing = size - int((stops - starts).sum())
    if missing:
        yield (
            f"is a shard of which {missing} bytes belong to no block that it lists: a list of "
            "blocks is damaged, or lost"
        )


def local_shards(folder: Path, most: int) -> Iterator[Path]:
    """Files of shards in a folder, of so many entries of which no more are looked at."""
    for _, path in zip(range(most), folder.iterdir(), strict=False):
        if path.suffix == ".shard" and path.is_file():
            yield path
