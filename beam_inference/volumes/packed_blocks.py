"""Blocks of precomputed volumes that cloud-volume has packed: ``0-64_0-64_0-64.gz`` and the like.

TensorStore looks for the names without a suffix. A volume with such blocks is read through a
virtual TensorStore, whose reads take one block each: its file is unpacked, then decoded.
"""

from __future__ import annotations

import lzma
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.fields import Json
from beam_inference.environment import usable_cores
from beam_inference.errors import VolumeError
from beam_inference.foreign_text import describe_error
from beam_inference.volumes.block_headers import PNG_HEADER_BYTES, png_fault
from beam_inference.volumes.views import View
from beam_inference.volumes.volume import TensorStore, Volume

try:  # a quarter faster still, for one member of a known length
    from deflate import DeflateError, gzip_decompress
except ImportError:
    gzip_decompress = None  # type: ignore[assignment]

try:  # nearly twice as fast
    from isal import isal_zlib as inflate
except ImportError:
    import zlib as inflate  # type: ignore[no-redef]

_THREADS_PER_CORE = 2

_HEADERS = 1 << 16
"""Bytes that a packed or encoded block may have beyond twice its voxels."""


def _unpack_gzip(packed: bytes, most: int) -> bytes | bytearray:
    return _unpack_member(packed, most) or _unpack_members(packed, most)


def _unpack_member(packed: bytes, most: int) -> bytearray | None:
    """Unpack what seems to be one member; None if it is not, or damaged."""
    stated = int.from_bytes(packed[-4:], "little")
    if gzip_decompress is None or stated > most:
        return None
    try:
        content = gzip_decompress(packed, stated)
    except (DeflateError, ValueError):
        return None
    return content if len(content) == stated else None


def _unpack_members(packed: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while packed:
        member = inflate.decompressobj(31)
        part = member.decompress(packed, most - size + 1)
        size += len(part)
        parts.append(part)
        _check_end(size, most, is_whole=member.eof)
        packed = member.unused_data
    return b"".join(parts)


def _unpack_xz(packed: bytes, most: int) -> bytes:
    member = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=most + (1 << 28))
    content = member.decompress(packed, most + 1)
    _check_end(len(content), most, is_whole=member.eof and not member.unused_data)
    return content


def _unpack_zstd(packed: bytes, most: int) -> bytes:
    import zstandard

    member = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(packed)
    content = member.read(most + 1)
    stated = zstandard.frame_content_size(packed)  # -1 for unknown; a cut frame reads as it is
    is_whole = stated in (-1, len(content)) and not member.read(1)
    _check_end(len(content), most, is_whole=is_whole)
    return content


def _unpack_brotli(packed: bytes, most: int) -> bytes:
    import brotli

    member = brotli.Decompressor()
    content: bytes = member.process(packed, output_buffer_limit=most + 1)
    _check_end(len(content), most, is_whole=member.is_finished())
    return content


def _check_end(size: int, most: int, *, is_whole: bool) -> None:
    if size > most:
        raise ValueError(f"it unpacks to more than {most:,} bytes, the most that a block has")
    if not is_whole:
        raise ValueError("it ends too early")


_UNPACKERS: dict[str, Callable[[bytes, int], bytes | bytearray]] = {
    ".gz": _unpack_gzip,
    ".br": _unpack_brotli,
    ".zstd": _unpack_zstd,
    ".xz": _unpack_xz,
}

PACKED_SUFFIXES = tuple(_UNPACKERS)
"""Suffixes of the block files that can be unpacked."""

_PACKAGES = {".br": "brotli", ".zstd": "zstandard"}
"""Packages that are not Python's own, by the suffix of the blocks that they unpack."""


def unpack_block(packed: bytes, suffix: str, most: int) -> bytes | bytearray:
    """Unpack the content of a block file.

    Args:
        packed: the content.
        suffix: of the file's name.
        most: bytes that it may unpack to.

    Raises:
        ValueError: it is damaged, or unpacks to more.
    """
    try:
        return _UNPACKERS[suffix](packed, most)
    except Exception as error:  # the libraries have errors of their own
        message = describe_error(error)
    # Raised here, it has no context. TensorStore pickles the errors of functions that it calls;
    # tblib, which Dask uses, pickles their contexts, too; and isal's errors cannot be pickled.
    raise ValueError(message)


def _read_file(path: str, most: int) -> bytes | None:
    """Read a file into just as much memory as it has bytes; None if they are more than ``most``."""
    file = os.open(path, os.O_RDONLY)
    try:
        left = os.fstat(file).st_size
        if left > most:
            return None
        parts = []
        while left and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(file)


@dataclass(frozen=True)
class PackedVolume(Volume):
    """A volume whose block files are packed.

    Attributes:
        stored: what TensorStore says of the volume; it finds none of the blocks.
    """

    stored: TensorStore | None = None

    @cached_property
    def view(self) -> View:
        """What it is made of, as if nothing were packed."""
        return self._as_stored.view

    def _check_blocks(self, window: TensorStore, name: str) -> None:
        """Nothing: a block is looked at when it is unpacked."""

    @property
    def axis_layout(self) -> list[list[int]]:
        """As if nothing were packed."""
        return self._as_stored.axis_layout

    @property
    def encoding(self) -> str | None:
        """Encoding of blocks, once they are unpacked."""
        return self._as_stored.encoding

    @property
    def kvstore(self) -> ts.KvStore:
        """The key-value store that the packed blocks lie in."""
        return self._as_stored.kvstore

    @cached_property
    def _as_stored(self) -> Volume:
        assert self.stored is not None, "open_packed names it"
        values = {each.name: getattr(self, each.name) for each in fields(Volume)}
        return Volume(**values | {"store": self.stored})


def open_packed(volume: Volume, folder: Path, suffix: str, cache_bytes: int) -> PackedVolume:
    """Open a volume with packed blocks, of which TensorStore reads none.

    Args:
        volume: as TensorStore opens it.
        folder: where its scales lie.
        suffix: of its block files.
        cache_bytes: unpacked blocks that are kept for whoever reads them next.

    Raises:
        VolumeError: its metadata are not those of a precomputed volume without shards, or the
            package that unpacks its blocks is absent.
    """
    package = _PACKAGES.get(suffix)
    if package is not None and find_spec(package) is None:
        raise VolumeError(
            f"{volume.url} has blocks packed as {suffix}, which need the package {package}: pip "
            "install 'beam-inference[formats]', here and on the workers"
        )
    scale = volume.precomputed_scale
    if scale is None or scale.get("sharding"):
        raise VolumeError(f"{volume.url} is no precomputed volume of single blocks")
    blocks = _Blocks.of(volume, folder, scale)
    start = [*scale["voxel_offset"], 0]
    virtual = ts.virtual_chunked(
        blocks.read,
        dtype=ts.dtype(volume.stored_dtype),
        domain=ts.IndexDomain(
            inclusive_min=start,
            shape=[*scale["size"], blocks.channels],
            labels=["x", "y", "z", "channel"],
        ),
        chunk_layout=ts.ChunkLayout(
            inner_order=[3, 2, 1, 0],  # as the voxels lie in a raw block
            grid_origin=start,
            read_chunk_shape=[*blocks.shape, blocks.channels],
        ),
        # These threads wait for disks, too: the others, which copy and encode, must not.
        context=ts.Context(
            {
                "cache_pool": {"total_bytes_limit": cache_bytes},
                "data_copy_concurrency": {"limit": _THREADS_PER_CORE * usable_cores()},
            }
        ),
    )
    values = {each.name: getattr(volume, each.name) for each in fields(Volume)}
    return PackedVolume(**values | {"store": volume.view.of_array(virtual), "stored": volume.store})


@dataclass(frozen=True)
class _Blocks:
    """The block files of one scale; axes X, Y, Z, as the format has them.

    Attributes:
        folder: where the block files lie.
        start: first voxel of the scale.
        stop: the voxel after its last.
        shape: of a block.
        channels: number of channels.
        dtype: of the voxels.
        metadata: ``info`` with this scale alone; to decode what is not raw.
    """

    folder: Path
    start: tuple[int, ...]
    stop: tuple[int, ...]
    shape: tuple[int, ...]
    channels: int
    dtype: AnyDtype
    metadata: Json

    @classmethod
    def of(cls, volume: Volume, folder: Path, scale: Json) -> _Blocks:
        multiscale = volume.stored_spec["multiscale_metadata"]
        start = tuple(scale["voxel_offset"])
        return cls(
            folder=folder / str(scale["key"]),
            start=start,
            stop=tuple(a + n for a, n in zip(start, scale["size"], strict=True)),
            shape=tuple(scale["chunk_size"]),
            channels=int(multiscale["num_channels"]),
            dtype=np.dtype(volume.stored_dtype),
            metadata={"multiscale_metadata": multiscale, "scale_metadata": scale},
        )

    def read(self, domain: ts.IndexDomain, array: AnyArray, _: Any) -> None:
        """Fill an array with the voxels of a part of one block, as TensorStore asks for it.

        Raises:
            ValueError: the block's file is damaged.
        """
        first = domain.inclusive_min[:3]
        begin = tuple(
            start + (at - start) // size * size
            for at, start, size in zip(first, self.start, self.shape, strict=True)
        )
        end = tuple(
            min(at + size, stop)
            for at, size, stop in zip(begin, self.shape, self.stop, strict=True)
        )
        name = "_".join(f"{a}-{b}" for a, b in zip(begin, end, strict=True))
        file = self._find(name)
        if file is None:
            array[...] = 0
            return
        shape = (*(b - a for a, b in zip(begin, end, strict=True)), self.channels)
        try:
            content = self._unpack(file, shape)
            if self._is_raw:
                voxels = self._as_voxels(content, shape)
            else:
                voxels = self._decode(content, name, begin, end)
        except (ValueError, OSError) as error:
            text = describe_error(error, with_type=False)
            raise ValueError(f"{file} is damaged: {text}. Copy that file again.") from None
        part = tuple(
            slice(a - b, a - b + n) for a, b, n in zip(first, begin, domain.shape[:3], strict=True)
        )
        array[...] = voxels[part][..., domain.inclusive_min[3] : domain.exclusive_max[3]]

    def _find(self, name: str) -> str | None:
        """The path of a block's file; None if there is none."""
        paths = []
        for suffix in ("", *PACKED_SUFFIXES):
            path = f"{self.folder}/{name}{suffix}"
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue
            if not (stat.S_ISREG(mode) or (stat.S_ISLNK(mode) and os.path.isfile(path))):
                raise ValueError(
                    f"{path} is a folder or the like, or a link that leads nowhere, where the file "
                    "of a block is expected"
                )
            paths.append(path)
        if len(paths) > 1:
            names = ", ".join(map(os.path.basename, paths))
            raise ValueError(
                f"{self.folder} has several files of one block: {names}. Remove those that are old."
            )
        return paths[0] if paths else None

    def _unpack(self, path: str, shape: tuple[int, ...]) -> bytes | bytearray:
        size = math.prod(shape) * self.dtype.itemsize
        most = size if self._is_raw else 2 * size + _HEADERS
        packed = _read_file(path, 2 * most + _HEADERS)
        if packed is None:
            raise ValueError(f"it is larger than a block of {size:,} bytes can be")
        suffix = os.path.splitext(path)[1]
        return unpack_block(packed, suffix, most) if suffix in PACKED_SUFFIXES else packed

    @property
    def _is_raw(self) -> bool:
        return bool(self.metadata["scale_metadata"]["encoding"] == "raw")

    def _as_voxels(self, content: bytes | bytearray, shape: tuple[int, ...]) -> AnyArray:
        size = math.prod(shape) * self.dtype.itemsize
        if len(content) != size:
            raise ValueError(f"it holds {len(content):,} bytes, expected {size:,}")
        voxels = np.frombuffer(content, self.dtype.newbyteorder("<"))
        return voxels.reshape(shape, order="F")

    def _decode(
        self, content: bytes | bytearray, name: str, begin: tuple[int, ...], end: tuple[int, ...]
    ) -> AnyArray:
        """Decode a block by a volume of it alone, in memory."""
        scale = self.metadata["scale_metadata"]
        if scale["encoding"] == "png":
            fault = png_fault(bytes(content[:PNG_HEADER_BYTES]), self.dtype.itemsize, self.channels)
            if fault is not None:
                raise ValueError(f"it {fault}")
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {"driver": "memory"},
            "dtype": self.dtype.name,
            **self.metadata,
            "scale_metadata": {
                **scale,
                "voxel_offset": begin,
                "size": [b - a for a, b in zip(begin, end, strict=True)],
            },
        }
        # This is called on one of TensorStore's few threads: waiting there for another of them
        # would wait for ever.
        context = ts.Context({"data_copy_concurrency": {"limit": 1}})
        store = ts.open(spec, create=True, context=context).result()
        assert store.kvstore is not None, "it lies in memory"
        store.kvstore.write(f"{scale['key']}/{name}", bytes(content)).result()
        voxels: AnyArray = store.read().result()
        return voxels
