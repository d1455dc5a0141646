"""What a block's own header says, held against the metadata, before TensorStore decodes it.

TensorStore (0.1.86) believes such a header where the metadata say otherwise. It decodes a PNG at
the depth that the picture states, into memory for voxels as the volume has them: one of 16 bits in
a volume of bytes writes beyond it. Of a block of N5 that states fewer voxels, the others become
zeros. And it takes as much memory as Blosc's header asks for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from beam_inference.config.fields import Json

PNG_HEADER_BYTES = 2**16
"""Bytes of a PNG in which its voxels must begin."""

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""Bytes that every PNG begins with."""

_DEPTH = 24
_COLOUR = 25
_CHANNELS_OF_COLOURS = {0: 1, 2: 3, 4: 2, 6: 4}
"""Channels by PNG's colour type; a palette has none of its own."""

_N5_HEADER = struct.Struct(">HH")
_N5_EXTENT = struct.Struct(">I")
_BLOSC_SIZE = struct.Struct("<4xI")
_LARGEST_VALUE = 16
"""Bytes of a complex number of two float64."""

_FURTHER_BYTES = 2**20
"""Bytes that codecs before Blosc may add to a small block."""


def header_fault(folder: Path, key: str, stored: Json) -> str | None:
    """What is wrong with the header of a local block; None if nothing is, or it has none.

    Args:
        folder: the folder of the array.
        key: of the block's file in it.
        stored: TensorStore's spec of the array.

    Returns:
        The beginning of a sentence, which names the file.
    """
    path = folder / key
    driver = stored["driver"]
    if driver == "neuroglancer_precomputed":
        scale = stored["scale_metadata"]
        if scale["encoding"] != "png" or scale.get("sharding"):
            return None
        itemsize = np.dtype(stored["dtype"]).itemsize
        channels = stored["multiscale_metadata"]["num_channels"]
        fault = png_fault(_start_of(path, PNG_HEADER_BYTES), itemsize, channels)
        return None if fault is None else f"{path} {fault}"
    start = 0
    fault = None
    if driver == "n5":
        metadata = stored["metadata"]
        start = _N5_HEADER.size + _N5_EXTENT.size * len(metadata["blockSize"])
        fault = _n5_fault(_start_of(path, start), key, metadata)
    most = _most_unpacked(stored)
    if fault is None and driver == "zarr3":
        fault = _order_fault([codec["name"] for codec in stored["metadata"]["codecs"]])
    if fault is None and most is not None:
        fault = _blosc_fault(_start_of(path, start + _BLOSC_SIZE.size)[start:], most)
    return None if fault is None else f"{path} {fault}"


def _start_of(path: Path, size: int) -> bytes:
    """The first bytes of a file; fewer where it has no more, or cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError:
        return b""  # it is absent, or TensorStore says what is wrong


def png_fault(start: bytes, itemsize: int, channels: int) -> str | None:
    """What is wrong with a PNG as a block; None if nothing is, or if it is none.

    Args:
        start: the first :data:`PNG_HEADER_BYTES` of the file.
        itemsize: bytes of a voxel's value, in the volume.
        channels: of the volume.

    Returns:
        The end of a sentence that begins with the file.
    """
    if start[: len(PNG_SIGNATURE)] != PNG_SIGNATURE or len(start) <= _COLOUR:
        return None  # TensorStore refuses it
    names = list(_chunk_names(start))
    if names[0] != b"IHDR":
        return "is a PNG that does not begin with its header"
    if b"IDAT" not in names or b"tRNS" in names:
        return "is a PNG with transparency, or with much before its voxels"
    bits = start[_DEPTH]
    found = _CHANNELS_OF_COLOURS.get(start[_COLOUR])
    if (bits, found) != (8 * itemsize, channels):
        return (
            f"is a PNG of {bits} bits and {found or 'coloured'} channels, in a volume of "
            f"{8 * itemsize} bits and {channels}"
        )
    return None


def _chunk_names(start: bytes) -> Iterator[bytes]:
    """Names of a PNG's chunks, until its voxels begin."""
    place = len(PNG_SIGNATURE)
    while place + 8 <= len(start):
        length, name = struct.unpack_from(">I4s", start, place)
        yield name
        if name == b"IDAT":
            return
        place += 12 + length


def _n5_fault(header: bytes, key: str, metadata: Json) -> str | None:
    """What is wrong with the extents that a block of N5 states itself."""
    rank = len(metadata["blockSize"])
    if len(header) < _N5_HEADER.size + _N5_EXTENT.size * rank:
        return None
    _, axes = _N5_HEADER.unpack_from(header)
    extents = [each for (each,) in _N5_EXTENT.iter_unpack(header[_N5_HEADER.size :])]
    places = zip(key.split("/")[-rank:], metadata["blockSize"], metadata["dimensions"], strict=True)
    whole = [(size, min(size, length - int(at) * size)) for at, size, length in places]
    if axes == rank and all(each in both for each, both in zip(extents, whole, strict=True)):
        return None
    expected = " × ".join(
        str(size) if size == least else f"{least} or {size}" for size, least in whole
    )
    found = " × ".join(map(str, extents))
    return f"is a block of {found} voxels where {expected} are expected"


def _most_unpacked(stored: Json) -> int | None:
    """Bytes that a block may unpack to where Blosc has packed it; None where something else has.

    There may be codecs before Blosc that add to a block, so this is no exact number.
    """
    metadata = stored.get("metadata", {})
    itemsize = _LARGEST_VALUE
    shape: list[int] | None = None
    if stored["driver"] == "n5" and metadata["compression"]["type"] == "blosc":
        shape = metadata["blockSize"]
    elif stored["driver"] == "zarr" and (metadata["compressor"] or {}).get("id") == "blosc":
        shape = metadata["chunks"]
        fields = metadata["dtype"]
        if isinstance(fields, list):  # of which one is read
            itemsize = sum(
                np.dtype(kind).itemsize * math.prod(extents[0] if extents else ())
                for _, kind, *extents in fields
            )
    elif stored["driver"] == "zarr3":
        names = [codec["name"] for codec in metadata["codecs"]]
        if "blosc" in names and set(names[names.index("blosc") + 1 :]) <= {"crc32c", "blosc"}:
            shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
    return None if shape is None else 2 * math.prod(shape) * itemsize + _FURTHER_BYTES


def _order_fault(codecs: Sequence[str]) -> str | None:
    """What is wrong with the order of codecs by which blocks are packed, if anything is.

    Before it unpacks with Blosc, TensorStore unpacks whatever comes behind that as a whole.
    """
    behind = codecs[codecs.index("blosc") + 1 :] if "blosc" in codecs else []
    others = [each for each in behind if each not in ("crc32c", "blosc")]
    if not others:
        return None
    return (
        f"is packed by {others[0]} behind blosc, which could take any memory to unpack. Write the "
        "array with one of them"
    )


def _blosc_fault(header: bytes, most: int) -> str | None:
    """What is wrong with the size that Blosc's header states."""
    if len(header) < _BLOSC_SIZE.size:
        return None
    (stated,) = _BLOSC_SIZE.unpack(header)
    if stated <= most:
        return None
    return f"unpacks to {stated:,} bytes, where {most:,} are expected at most"
