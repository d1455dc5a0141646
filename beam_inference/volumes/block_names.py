"""Names of blocks that a volume's metadata imply, held against those of its files.

Absent blocks read as the fill value. So where metadata speak of other blocks than those that were
written (another separator, other extents, another offset, shards), every voxel would; and where one
file has another name than the others (``0-64_0-64_0-64.gz.part``), the voxels of that one.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from beam_inference.config.fields import Json
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import ceil_div
from beam_inference.volumes.drafts import file_of_draft
from beam_inference.volumes.shard_index import local_shards, most_block_bytes, shard_fault
from beam_inference.volumes.sharding import Sharding

logger = logging.getLogger(__name__)

_MOST_ENTRIES = 10_000
"""Entries of folders that are looked at."""

_MOST_SHARDS = 16
"""Shards whose lists of blocks are looked at before any is read; all are before they are read."""

_LIKE_BLOCKS = re.compile(r"(c[./])?-?\d+([._/-]-?\d+)*|[\da-f]+\.shard")
"""Names that some format or other gives to blocks, or to shards."""

_SHARD = re.compile(r"([\da-fA-F]{1,16})\.shard(?:[^/]*)")

BlockOf = Callable[[str], str | None]
"""The path, by the metadata, of the block that a file is, or by its name seems to be meant as; None
of other files; :data:`_BEYOND` of files of blocks that lie outside of the volume."""

_BEYOND = ""


def check_block_names(name: str, stored: Json, suffixes: Sequence[str] = ()) -> None:
    """Refuse a local volume whose files are not the blocks that its metadata speak of.

    A block may be absent, but not where a file is that seems to be meant as it; and none may lie
    outside of the volume. A volume without blocks is warned of.

    Args:
        name: the volume's name in messages.
        stored: TensorStore's spec of the stored array.
        suffixes: what the names of its blocks may end with, beyond what the metadata imply.

    Raises:
        VolumeError: there are files with names of blocks, and none is a block's, or one is that of
            a block outside; or a file seems to be meant as a block that is absent.
    """
    kvstore = stored.get("kvstore")
    if not isinstance(kvstore, dict) or kvstore.get("driver") != "file":
        return
    folder = Path(kvstore["path"])
    driver = stored["driver"]
    if driver == "neuroglancer_precomputed":
        metadata = stored["scale_metadata"]
        folder /= metadata["key"]
        _check_shards(name, folder, stored)
    elif driver in _GRIDS:
        metadata = stored["metadata"]
    else:
        return
    _check_files(name, folder, _names_of(driver, metadata), suffixes)


def is_block_of(driver: str, metadata: Json) -> Callable[[str], bool]:
    """Make a test of whether a path is that of a block of an array.

    Args:
        driver: "neuroglancer_precomputed", "n5", "zarr" or "zarr3".
        metadata: of the array as its file states them; of a precomputed volume, a scale.

    Returns:
        A function of paths within the array's folder; of a precomputed volume, without a suffix.

    Raises:
        KeyError, TypeError, ValueError: the metadata are not understood.
    """
    variants = [metadata]
    if driver == "neuroglancer_precomputed":
        scale = {"voxel_offset": [0, 0, 0], **metadata}
        variants = [{**scale, "chunk_size": each} for each in metadata["chunk_sizes"]]
    names = [_names_of(driver, each) for each in variants]
    return lambda path: any(block_of(path) == path for block_of in names)


def _names_of(driver: str, metadata: Json) -> BlockOf:
    """How an array names its blocks; of a precomputed volume, a scale with its ``chunk_size``."""
    if driver != "neuroglancer_precomputed":
        return _grid_names(*_GRIDS[driver](metadata))
    return _shard_names(metadata) if metadata.get("sharding") else _precomputed_names(metadata)


@dataclass
class _Found:
    """What the files of a volume are.

    Attributes:
        has_blocks: whether one is a block.
        other: one whose name some format or other gives to blocks.
        stray: one that seems to be meant as a block which is absent, and that block.
        beyond: one that is a block outside of the volume.
    """

    has_blocks: bool = False
    other: str | None = None
    stray: tuple[str, str] | None = None
    beyond: str | None = None


def _look_at_files(folder: Path, block_of: BlockOf, suffixes: Sequence[str]) -> _Found:
    found = _Found()
    for file in _files_below(folder):
        block = block_of(file)
        paths = [f"{block}{suffix}" for suffix in ("", *suffixes)] if block else []
        if file in paths:
            found.has_blocks = True
        elif block == _BEYOND:
            found.beyond = file
        elif block is not None:
            if found.stray is None and not any(os.path.lexists(folder / path) for path in paths):
                found.stray = (file, block)
        elif found.other is None and _is_like_block(file, suffixes):
            found.other = file
    return found


def _check_files(name: str, folder: Path, block_of: BlockOf, suffixes: Sequence[str]) -> None:
    found = _look_at_files(folder, block_of, suffixes)
    if found.has_blocks and found.stray is not None:
        file, block = found.stray
        raise VolumeError(
            f"{name} holds the file {file}, which seems to be meant as the block {block}, and "
            "there is none of that name: its voxels would read as the fill value. Was it copied "
            "completely? Give it that name, or remove it if the block is to be absent; or mend the "
            "metadata, if what they state is not what was written."
        )
    if found.has_blocks and found.beyond is not None:
        raise VolumeError(
            f"{name} holds the file {found.beyond}, a block that by the metadata lies outside of "
            "the volume: the extents that they state, of the volume or of its blocks, are not "
            "those that were written. Mend the metadata, or remove the file."
        )
    if found.has_blocks:
        return
    example = found.beyond or found.other if found.stray is None else found.stray[0]
    if example is not None:
        raise VolumeError(
            f"{name} holds files of blocks, such as {example}, and none has a name that its "
            "metadata imply: every voxel would read as the fill value. The extents of blocks, the "
            "offset, the separator or the shards that the metadata state are not those that were "
            "written."
        )
    logger.warning("%s has no blocks: every voxel of it reads as the fill value", name)


def _is_like_block(file: str, suffixes: Sequence[str]) -> bool:
    """Whether some format or other gives such a path to a block, or to a shard."""
    suffix = next((each for each in suffixes if file.endswith(each)), "")
    return _LIKE_BLOCKS.fullmatch(file.removesuffix(suffix)) is not None


def _check_shards(name: str, folder: Path, stored: Json) -> None:
    """Refuse a volume whose shards were written by other metadata, by those that come first.

    Raises:
        VolumeError: a shard lists what it cannot list, or its name is none of the volume's.
    """
    scale = stored["scale_metadata"]
    if not scale.get("sharding") or not folder.is_dir():
        return
    sharding = Sharding.of(scale)
    most = most_block_bytes(stored)
    for number, path in enumerate(local_shards(folder, _MOST_ENTRIES)):
        is_named = _SHARD.fullmatch(path.name) is not None
        if not is_named or (number >= _MOST_SHARDS and int(path.stem, 16) < sharding.shards):
            continue
        status = path.stat()
        fault = shard_fault(path, sharding, most, status.st_size, status.st_mtime_ns)
        if fault is not None:
            raise VolumeError(
                f"{name}: {path.name} {fault}. Its blocks would read as zeros: mend the metadata, "
                "or copy the file again."
            )


def _files_below(folder: Path) -> Iterator[str]:
    """Paths of files in a folder and those in it, but for drafts; only so many entries are seen."""
    return (
        path
        for path in islice(_entries_below(str(folder), ""), _MOST_ENTRIES)
        if path and file_of_draft(path.rpartition("/")[2]) is None
    )


def _entries_below(folder: str, prefix: str) -> Iterator[str | None]:
    """The path of each file, and None for each folder."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith((".", "_")) and not entry.name[1:2].isdecimal():
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
) -> BlockOf:
    counts = [ceil_div(n, chunk) for n, chunk in zip(shape, chunk_shape, strict=True)]
    # A name with a dot before it is that of a file that rsync has not copied to its end.
    positions = re.compile(r"\.?(?:c[./])?(\d{1,19}(?:[./]\d{1,19}|[-_]\d{1,19})*)(?:[^\d/][^/]*)?")

    def block_of(path: str) -> str | None:
        found = positions.fullmatch(path)
        numbers = [] if found is None else [int(part) for part in re.split("[./_-]", found[1])]
        if len(numbers) != len(counts):
            return None
        name = prefix + separator.join(map(str, numbers))
        if all(map(int.__lt__, numbers, counts)):
            return name
        return _BEYOND if path == name else None

    return block_of


def _shard_names(scale: Json) -> BlockOf:
    bits = scale["sharding"]["shard_bits"]
    digits = max(1, ceil_div(bits, 4))

    def block_of(path: str) -> str | None:
        found = _SHARD.fullmatch(path)
        number = -1 if found is None else int(found[1], 16)
        return f"{number:0{digits}x}.shard" if 0 <= number < 1 << bits else None

    return block_of


def _precomputed_names(scale: Json) -> BlockOf:
    axes = list(zip(scale["voxel_offset"], scale["size"], scale["chunk_size"], strict=True))
    extents = "_".join([r"(-?\d{1,19})-(-?\d{1,19})"] * 3)
    block = re.compile(rf"{extents}(?:\D[^/]*)?")

    def block_of(path: str) -> str | None:
        found = block.fullmatch(path)
        if found is None:
            return None
        starts = [int(number) for number in found.groups()[::2]]
        parts = []
        for start, (offset, size, chunk) in zip(starts, axes, strict=True):
            if not offset <= start < offset + size:
                return _BEYOND
            begin = start - (start - offset) % chunk
            parts.append(f"{begin}-{min(begin + chunk, offset + size)}")
        return "_".join(parts)

    return block_of
