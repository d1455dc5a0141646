"""Names of blocks that a volume's metadata imply, held against those of its files.

Absent blocks read as the fill value. So where metadata speak of other blocks than those that were
written (another separator, other extents, another offset, shards), every voxel would.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from beam_inference.config.fields import Json
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import ceil_div

logger = logging.getLogger(__name__)

_MOST_ENTRIES = 10_000
"""Entries of folders that are looked at for a block."""

_LIKE_BLOCKS = re.compile(r"(c[./])?-?\d+([._/-]-?\d+)*|[\da-f]+\.shard")
"""Names that some format or other gives to blocks, or to shards."""

IsBlock = Callable[[str], bool]
"""Says whether a path in the folder of the blocks is that of a block."""


def check_block_names(name: str, stored: Json, suffixes: Sequence[str] = ()) -> None:
    """Refuse a local volume whose files are not the blocks that its metadata speak of.

    One file that is a block is enough; a volume without blocks is warned of.

    Args:
        name: the volume's name in messages.
        stored: TensorStore's spec of the stored array.
        suffixes: what the names of its blocks may end with, beyond what the metadata imply.

    Raises:
        VolumeError: there are files with names of blocks, and none is a block's.
    """
    kvstore = stored.get("kvstore")
    if not isinstance(kvstore, dict) or kvstore.get("driver") != "file":
        return
    folder = Path(kvstore["path"])
    is_block: IsBlock | None = None
    if stored["driver"] == "neuroglancer_precomputed":
        folder /= stored["scale_metadata"]["key"]
        is_block = _precomputed_names(stored["scale_metadata"])
    elif stored["driver"] in _GRIDS:
        is_block = _grid_names(*_GRIDS[stored["driver"]](stored["metadata"]))
    if is_block is None:
        return
    other = None
    for file in _files_below(folder):
        suffix = next((each for each in suffixes if file.endswith(each)), "")
        path = file.removesuffix(suffix)
        if is_block(path):
            return
        if other is None and _LIKE_BLOCKS.fullmatch(path):
            other = file
    if other is not None:
        raise VolumeError(
            f"{name} holds files of blocks, such as {other}, and none has a name that its metadata "
            "imply: every voxel would read as the fill value. The extents of blocks, the offset, "
            "the separator or the shards that the metadata state are not those that were written."
        )
    logger.warning("%s has no blocks: every voxel of it reads as the fill value", name)


def _files_below(folder: Path) -> Iterator[str]:
    """Paths of files in a folder and those in it; only so many entries are looked at."""
    return (path for path in islice(_entries_below(str(folder), ""), _MOST_ENTRIES) if path)


def _entries_below(folder: str, prefix: str) -> Iterator[str | None]:
    """The path of each file, and None for each folder."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith((".", "_")):
                    yield None
                elif entry.is_dir():
                    yield None
                    yield from _entries_below(entry.path, f"{prefix}{entry.name}/")
                else:
                    yield f"{prefix}{entry.name}"
    except OSError:
        return  # reading says what is wrong


def _zarr2_grid(metadata: Json) -> tuple[str, str, Sequence[int], Sequence[int]]:
    separator = metadata.get("dimension_separator", ".")
    return "", separator, metadata["shape"], metadata["chunks"]


def _zarr3_grid(metadata: Json) -> tuple[str, str, Sequence[int], Sequence[int]]:
    encoding = metadata.get("chunk_key_encoding", {})
    is_default = encoding.get("name", "default") == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_default else ".")
    chunk_shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    return f"c{separator}" if is_default else "", separator, metadata["shape"], chunk_shape


def _n5_grid(metadata: Json) -> tuple[str, str, Sequence[int], Sequence[int]]:
    return "", "/", metadata["dimensions"], metadata["blockSize"]


_GRIDS = {"zarr": _zarr2_grid, "zarr3": _zarr3_grid, "n5": _n5_grid}
"""How a driver names blocks: what keys begin with, what separates positions, and the extents of
arrays and of blocks."""


def _grid_names(
    prefix: str, separator: str, shape: Sequence[int], chunk_shape: Sequence[int]
) -> IsBlock:
    counts = [ceil_div(n, chunk) for n, chunk in zip(shape, chunk_shape, strict=True)]

    def is_block(path: str) -> bool:
        parts = path.removeprefix(prefix).split(separator)
        if not path.startswith(prefix) or len(parts) != len(counts):
            return False
        return all(
            part.isdecimal() and int(part[:20]) < count
            for part, count in zip(parts, counts, strict=True)
        )

    return is_block


def _precomputed_names(scale: Json) -> IsBlock:
    if scale.get("sharding"):
        digits = max(1, ceil_div(scale["sharding"]["shard_bits"], 4))
        shard = re.compile(rf"[\da-f]{{{digits}}}\.shard")
        return lambda path: shard.fullmatch(path) is not None
    axes = list(zip(scale["voxel_offset"], scale["size"], scale["chunk_size"], strict=True))
    block = re.compile("_".join([r"(-?\d{1,19})-(-?\d{1,19})"] * 3))

    def is_block(path: str) -> bool:
        found = block.fullmatch(path)
        if found is None:
            return False
        numbers = [int(number) for number in found.groups()]
        return all(
            offset <= start < offset + size
            and (start - offset) % chunk == 0
            and stop == min(start + chunk, offset + size)
            for start, stop, (offset, size, chunk) in zip(
                numbers[::2], numbers[1::2], axes, strict=True
            )
        )

    return is_block
