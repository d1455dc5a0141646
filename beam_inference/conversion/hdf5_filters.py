"""How many bytes a chunk of HDF5 unpacks to, by the filters that it went through.

HDF5's library (2.0.0) does not compare that with the chunk's voxels. It takes what lies in memory
behind a chunk of fewer for the voxels that are missing. Here the sizes are found without it, from
the `registered filters <https://github.com/HDFGroup/hdf5_plugins>`_' own layouts.
"""

from __future__ import annotations

import bz2
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.conversion.protocol import INSTRUMENTS, import_library
from beam_inference.errors import VolumeError
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry.zyx import ceil_div

_DEFLATE = 1
_SHUFFLE = 2
_FLETCHER32 = 3
_NBIT = 5
_SCALE_OFFSET = 6
_BZIP2 = 307
_LZF = 32000
_BLOSC = 32001
_LZ4 = 32004
_BITSHUFFLE = 32008
_ZSTD = 32015

_BITSHUFFLE_CODECS = (2, 3)
"""What it says of blocks that were packed, by LZ4 and by Zstandard; else they are shuffled only."""

_CHECKSUM_BYTES = 4
_FURTHER_BYTES = 2**16
"""Bytes that a packed chunk may have beyond twice its voxels, to be unpacked once more."""


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter that chunks go through before they are stored.

    Attributes:
        number: its registered number.
        name: how the file calls it.
        parameters: numbers that it was given; what each means is the filter's own.
    """

    number: int
    name: str
    parameters: tuple[int, ...]


def list_filters(dataset: Any) -> list[Filter]:
    """The filters that chunks of a dataset go through, in this order."""
    pipeline = dataset.id.get_create_plist()
    found = (pipeline.get_filter(number) for number in range(pipeline.get_nfilters()))
    return [
        Filter(number, name.decode(errors="replace"), tuple(parameters))
        for number, _, parameters, name in found
    ]


def check_filters(name: str, dataset: Any) -> None:
    """Refuse a dataset with chunks whose unpacked size cannot be found here.

    Raises:
        VolumeError: it has such chunks; ``name`` says whose.
        ConfigError: imagecodecs is needed for them, and is not installed.
    """
    filters = list_filters(dataset)
    known = _SIZES_KEPT | _UNPACKERS.keys() | _COUNTERS.keys()
    packers = [each for each in filters if each.number not in _SIZES_KEPT]
    unknown = [each for each in filters if each.number not in known]
    # Of what these have packed, the size alone is found: no other may have packed it before.
    unknown = unknown or [each for each in packers[1:] if each.number not in _UNPACKERS]
    if unknown:
        raise VolumeError(
            f"{name} has chunks that were packed by {' and '.join(map(_describe, packers))}; "
            "whether they hold all their voxels cannot be found out here. Pack them by another "
            "filter, as with h5repack -f GZIP=5."
        )
    if any(each.number == _ZSTD for each in filters):
        import_library("imagecodecs", "HDF5 with Zstandard", INSTRUMENTS)


def _describe(each: Filter) -> str:
    return f"filter {each.number} ({shorten_text(each.name)})"


def fails_on_damage(applied: Sequence[Filter]) -> bool:
    """Whether HDF5 refuses what these filters cannot have packed; for most, it may not."""
    return all(each.number in {_DEFLATE, *_SIZES_KEPT} for each in applied)


def is_size_told(applied: Sequence[Filter]) -> bool:
    """Whether the stored size of a chunk that went through these filters tells its unpacked one."""
    return all(each.number in _SIZES_KEPT for each in applied)


def count_plain(applied: Sequence[Filter], stored: int) -> int:
    """Count the bytes of voxels of a chunk whose size, ``stored``, tells them."""
    return stored - _CHECKSUM_BYTES * [each.number for each in applied].count(_FLETCHER32)


def count_unpacked(applied: Sequence[Filter], stored: bytes, expected: int) -> int:
    """Count the bytes that a chunk holds once it is unpacked.

    Args:
        applied: the filters that it went through, in this order; see :func:`check_filters`.
        stored: its bytes in the file.
        expected: bytes of its voxels.

    Returns:
        The number, or, of more than are expected, any number that is greater.

    Raises:
        OSError: it cannot be unpacked.
    """
    held = stored
    for number, each in reversed(list(enumerate(applied))):
        earlier = applied[:number]
        most = expected + _CHECKSUM_BYTES * len(earlier) + 1
        if not is_size_told(earlier):
            most = 2 * most + _FURTHER_BYTES
        try:
            if each.number == _FLETCHER32:
                held = held[:-_CHECKSUM_BYTES]
            elif each.number == _SHUFFLE and not is_size_told(earlier):
                held = _unshuffle(each.parameters[0], held)
            elif each.number in _UNPACKERS:
                held = _UNPACKERS[each.number](held, most)
            elif each.number in _COUNTERS:
                return count_plain(earlier, _COUNTERS[each.number](each.parameters, held, most))
        except (struct.error, IndexError, ZeroDivisionError):
            raise OSError(f"it cannot have been packed by {each.name}") from None
    return len(held)


def _unshuffle(size: int, data: bytes) -> bytes:
    """Put the bytes of each element together; bytes that are left over stay at the end."""
    count = len(data) // size
    elements = np.frombuffer(data, np.uint8, count * size).reshape(size, count)
    return elements.T.tobytes() + data[count * size :]


def _inflate(data: bytes, most: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, most)
    except zlib.error as error:
        raise OSError(str(error)) from None


def _unpack_bzip2(data: bytes, most: int) -> bytes:
    unpacker = bz2.BZ2Decompressor()
    unpacked = unpacker.decompress(data, most)
    if len(unpacked) < most and not unpacker.eof:
        raise OSError("it ends too early")
    return unpacked


def _unpack_zstd(data: bytes, most: int) -> bytes:
    """Unpack one frame that states its size.

    The plugin makes room for the first frame alone. What it cannot unpack, or has no room for, it
    takes for what memory held.
    """
    codecs = import_library("imagecodecs", "HDF5 with Zstandard", INSTRUMENTS)
    try:
        unpacked = bytes(codecs.zstd_decode(data, out=most))
    except RuntimeError as error:
        raise OSError(str(error)) from None
    if len(unpacked) < most and len(unpacked) != _zstd_frame_size(data):
        raise OSError("it is not one frame of Zstandard, of the size that it states")
    return unpacked


def _zstd_frame_size(data: bytes) -> int | None:
    """The size in the header of a frame, as RFC 8878 has it; None if it states none."""
    if data[:4] != b"\x28\xb5\x2f\xfd":
        return None
    flags = data[4]
    is_alone = flags >> 5 & 1
    size = (is_alone, 2, 4, 8)[flags >> 6]
    start = 5 + (not is_alone) + (0, 1, 2, 4)[flags & 3]
    if size == 0 or len(data) < start + size:
        return None
    return int.from_bytes(data[start : start + size], "little") + 256 * (size == 2)


def _count_lzf(_: Sequence[int], data: bytes, most: int) -> int:
    """Count as `liblzf <http://software.schmorp.de/pkg/liblzf.html>`_ unpacks: runs and copies."""
    at = 0
    count = 0
    end = len(data)
    while at < end and count < most:
        control = data[at]
        if control < 32:  # a run of so many bytes, and one
            at += control + 2
            count += control + 1
        elif control < 224:  # a copy of up to 8 bytes
            at += 2
            count += (control >> 5) + 2
        else:
            count += 9 + data[at + 1]
            at += 3
    if at > end:
        raise OSError("it ends too early")
    return count


def _count_scale_offset(parameters: Sequence[int], data: bytes, _: int) -> int:
    """Count voxels of as many bits as the chunk's first number says, behind a header.

    Integers of all their bits are left as they are.
    """
    _, factor, count, kind, size = parameters[:5]
    if kind == 0 and factor == 8 * size:
        return len(data)
    (bits,) = struct.unpack_from("<I", data)
    packed = 0 if bits == 0 else count * bits // 8 + (bits < 8 * size)
    if bits > 8 * size or len(data) < 21 + packed:
        return 0
    return count * size


def _count_nbit(parameters: Sequence[int], data: bytes, _: int) -> int:
    """Count voxels of as many bits as their dtype needs."""
    if parameters[1]:
        return len(data)  # it was not worth it
    count, kind, size, _, bits, offset = parameters[2:8]
    is_number = kind == 1 and 0 < bits <= 8 * size - offset
    if not is_number or len(data) <= count * bits // 8:
        return 0
    return count * size


def _count_lz4(_: Sequence[int], data: bytes, most: int) -> int:
    """Count what is stated, if all blocks are there."""
    total, block = struct.unpack_from(">QI", data)
    if total >= most:
        return int(total)
    return int(total) if _has_blocks(data, 12, ceil_div(total, min(block, total))) else 0


def _count_bitshuffle(parameters: Sequence[int], data: bytes, most: int) -> int:
    """Count what is stated, if all blocks are there, and the few elements that are left over."""
    size = parameters[2]
    if size == 0:
        raise OSError("its elements are said to have no bytes")
    if len(parameters) < 5 or parameters[4] not in _BITSHUFFLE_CODECS:
        return len(data)
    total, block = struct.unpack_from(">QI", data)
    if total >= most:
        return int(total)
    left = total // size % 8 * size
    has_all = _has_blocks(data, 12, ceil_div(total - left, block // size * size), left)
    return int(total) if total % size == 0 and has_all else 0


def _has_blocks(data: bytes, start: int, count: int, left: int = 0) -> bool:
    """Whether so many blocks, each behind its size in four bytes, and some bytes are there."""
    at = start
    for _ in range(count):
        if at + 4 > len(data):
            return False
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    return at + left <= len(data)


def _count_blosc(_: Sequence[int], data: bytes, __: int) -> int:
    """Count what is stated, if the chunk is as long as it says."""
    total, _, packed = struct.unpack_from("<III", data, 4)
    return int(total) if packed == len(data) else 0


_SIZES_KEPT = frozenset({_SHUFFLE, _FLETCHER32})
"""Filters whose chunks tell by their size alone how much they hold."""

_UNPACKERS: dict[int, Callable[[bytes, int], bytes]] = {
    _BZIP2: _unpack_bzip2,
    _DEFLATE: _inflate,
    _ZSTD: _unpack_zstd,
}
"""From a chunk and a bound: what it unpacks to."""

_COUNTERS: dict[int, Callable[[Sequence[int], bytes, int], int]] = {
    _BITSHUFFLE: _count_bitshuffle,
    _BLOSC: _count_blosc,
    _LZ4: _count_lz4,
    _LZF: _count_lzf,
    _NBIT: _count_nbit,
    _SCALE_OFFSET: _count_scale_offset,
}
"""From a filter's parameters, a chunk and a bound: how many bytes it unpacks to."""
