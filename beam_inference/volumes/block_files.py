"""Files of blocks that TensorStore would silently read as zeros, or wait for without end.

A block that is absent reads as the fill value. So does one whose name is another than expected, one
that is a folder or a link that leads nowhere, and one that its shard does not list where it must. A
pipe in place of a file never answers.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from beam_inference.config.fields import Json
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import triple
from beam_inference.volumes.block_headers import header_fault
from beam_inference.volumes.shard_index import most_block_bytes, shard_fault
from beam_inference.volumes.sharding import Sharding, shard_keys

_MOST_VOXEL_BYTES = 64
_MOST_HEADER_BYTES = 2**24
_BLOCK_NAME = r"-?\d+--?\d+_-?\d+--?\d+_-?\d+--?\d+"
_OTHER_SUFFIX = re.compile(rf"{_BLOCK_NAME}(\.(?!__lock)\w+)")
"""A block of a precomputed volume with a suffix; TensorStore's own files have ``.__lock``."""


def unread_suffix(name: str) -> str | None:
    """The suffix of a precomputed block's name, under which TensorStore does not look for it.

    >>> unread_suffix("0-64_0-64_-64-0.xz"), unread_suffix("0-64_0-64_-64-0")
    ('.xz', None)
    """
    match = _OTHER_SUFFIX.fullmatch(name)
    return None if match is None else match[1]


def block_fault(stored: Json, spans: Sequence[tuple[int, int]]) -> str | None:
    """What is wrong with a local block that would be read as zeros; None if nothing is.

    Looking costs a request to the file system for each block, which TensorStore makes again.

    Args:
        stored: TensorStore's spec of the stored array.
        spans: first and last position on each of its axes of what is to be read.

    Returns:
        The beginning of a sentence, which names the file.
    """
    kvstore = stored.get("kvstore")
    if not isinstance(kvstore, dict) or kvstore.get("driver") != "file":
        return None
    scale = stored.get("scale_metadata", {})
    sharding = Sharding.of(scale) if scale.get("sharding") else None
    most = _most_bytes(stored) if sharding is None else most_block_bytes(stored)
    for key in _block_keys(stored, spans):
        path = Path(kvstore["path"])
        fault = _file_fault(path, key, sharding, most) or header_fault(path, key, stored)
        if fault is not None:
            return fault
    return None


def _most_bytes(stored: Json) -> int:
    """Bytes that the file of a block, or of a shard, may have, however badly it is compressed."""
    return _MOST_VOXEL_BYTES * math.prod(_stored_shape(stored)) + _MOST_HEADER_BYTES


def _stored_shape(stored: Json) -> list[int]:
    """Shape of what a file holds, a block or a shard, in the formats that are known here."""
    driver = stored["driver"]
    metadata = stored.get("metadata", {})
    if driver == "neuroglancer_precomputed":
        channels = stored.get("multiscale_metadata", {}).get("num_channels", 1)
        return [*stored["scale_metadata"]["chunk_size"], channels]
    if driver == "n5":
        return list(metadata["blockSize"])
    if driver == "zarr":
        return list(metadata["chunks"])
    if driver == "zarr3":
        return list(metadata["chunk_grid"]["configuration"]["chunk_shape"])
    return []


def _file_fault(folder: Path, key: str, sharding: Sharding | None, most: int) -> str | None:
    path = folder / key
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        irregular = _place_of_no_folder(folder, key)
    except OSError:
        return None  # TensorStore says what is wrong
    else:
        irregular = None if stat.S_ISREG(status.st_mode) else path
        if sharding is None and irregular is None and status.st_size > most:
            return f"{path} has {status.st_size:,} bytes, more than a block can have"
        if sharding is not None and irregular is None:
            fault = shard_fault(path, sharding, most, status.st_size, status.st_mtime_ns)
            if fault is not None:
                return f"{path} {fault}"
    if irregular is None:
        return None
    return (
        f"{irregular} is a folder or the like, or a link that leads nowhere, where the file of a "
        "block is expected"
    )


def _place_of_no_folder(folder: Path, key: str) -> Path | None:
    """What is in the way of a block that cannot be found: a broken link, or a file for a folder."""
    parts = key.split("/")
    for count in range(len(parts), 0, -1):
        place = folder.joinpath(*parts[:count])
        if os.path.lexists(place):
            return None if place.is_dir() else place
    return None


def _block_keys(stored: Json, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Keys of the files that hold the voxels of a window, in the formats that are known here."""
    driver = stored["driver"]
    if driver == "neuroglancer_precomputed":
        return _precomputed_keys(stored["scale_metadata"], spans)
    metadata = stored.get("metadata", {})
    if driver == "n5":
        return _grid_keys(spans, _stored_shape(stored), "", "/")
    if driver == "zarr":
        separator = metadata.get("dimension_separator", ".")
        return _grid_keys(spans, _stored_shape(stored), "", separator)
    if driver == "zarr3":
        encoding = metadata.get("chunk_key_encoding", {})
        is_default = encoding.get("name", "default") == "default"
        separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
        prefix = f"c{separator}" if is_default else ""
        return _grid_keys(spans, _stored_shape(stored), prefix, separator)
    return iter(())


def _grid_keys(
    spans: Sequence[tuple[int, int]], shape: list[int], prefix: str, separator: str
) -> Iterator[str]:
    ranges = [
        range(first // size, last // size + 1)
        for (first, last), size in zip(spans, shape, strict=True)
    ]
    for position in product(*ranges):
        yield prefix + separator.join(map(str, position))


def _precomputed_keys(scale: Json, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    origin = scale["voxel_offset"]
    stops = [start + size for start, size in zip(origin, scale["size"], strict=True)]
    xyz = spans[:3]
    if scale.get("sharding"):
        first = triple(span[0] for span in xyz[::-1])
        stop = triple(span[1] + 1 for span in xyz[::-1])
        yield from shard_keys(scale, BoundingBox(first, stop))
        return
    ranges = []
    for (first_voxel, last), start, size, stop_voxel in zip(
        xyz, origin, scale["chunk_size"], stops, strict=True
    ):
        begin = start + (first_voxel - start) // size * size
        ranges.append([(a, min(a + size, stop_voxel)) for a in range(begin, last + 1, size)])
    for block in product(*ranges):
        yield f"{scale['key']}/" + "_".join(f"{a}-{b}" for a, b in block)


def sample_block_keys(stored: Json, samples: Iterable[Sequence[tuple[int, int]]]) -> list[str]:
    """Keys of the files, of blocks or shards, that hold some places of an array.

    Args:
        stored: TensorStore's spec of the stored array.
        samples: for each place, first and last position on each axis of the stored array.
    """
    keys = (key for spans in samples for key in _block_keys(stored, spans))
    return list(dict.fromkeys(keys))


def block_with_suffix(folder: Path, most: int) -> str | None:
    """The name of a block with another suffix in a local folder of a scale, or None.

    Args:
        folder: the folder.
        most: number of names to look at.
    """
    with os.scandir(folder) as entries:
        for _, entry in zip(range(most), entries, strict=False):
            if unread_suffix(entry.name) is not None:
                return entry.name
    return None
