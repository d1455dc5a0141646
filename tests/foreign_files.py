"""Files as other programs write them, byte by byte, after the formats' specifications."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

ByteOrder: TypeAlias = Literal["<", ">"]

_NIFTI_CODES = {"uint8": 2, "int16": 4, "int32": 8, "float32": 16, "uint16": 512, "uint64": 1280}


def nifti_bytes(
    array: np.ndarray,
    zooms: Sequence[float],
    matrix: ArrayLike | None = None,
    origin: Sequence[float] = (0, 0, 0),
    *,
    unit: int = 2,
    slope: float = 1.0,
    intercept: float = 0.0,
    order: ByteOrder = "<",
    qform: int = 0,
) -> bytes:
    """A NIfTI-1 file of an array (z, y, x) or (c, z, y, x).

    Zooms, matrix and origin are in the order x, y, z; unit 2 is millimetres.
    """
    header = bytearray(348)
    shape = array.shape[::-1]
    dim = [len(shape), *shape, *[1] * (7 - len(shape))]
    struct.pack_into(f"{order}i", header, 0, 348)
    struct.pack_into(f"{order}8h", header, 40, *dim)
    struct.pack_into(
        f"{order}2h", header, 70, _NIFTI_CODES[array.dtype.name], 8 * array.dtype.itemsize
    )
    struct.pack_into(f"{order}8f", header, 76, 1, *zooms, 1, 1, 1, 1)
    struct.pack_into(f"{order}3f", header, 108, 352, slope, intercept)
    header[123] = unit
    struct.pack_into(f"{order}2h", header, 252, qform, 1)
    rows = np.column_stack([np.diag(zooms) if matrix is None else matrix, origin])
    struct.pack_into(f"{order}12f", header, 280, *rows.ravel())
    header[344:348] = b"n+1\0"
    return bytes(header) + bytes(4) + array.astype(array.dtype.newbyteorder(order)).tobytes()


def nrrd_bytes(
    array: np.ndarray, lines: Sequence[str], *, encoding: str = "raw", endian: str = "little"
) -> bytes:
    """An NRRD file of an array with its axes, slowest first; ``lines`` go into the header."""
    types = {
        "float32": "float",
        "float64": "double",
        "uint8": "unsigned char",
        "uint64": "unsigned long long int",
    }
    head = [
        "NRRD0004",
        "# written by hand",
        f"type: {types.get(array.dtype.name, array.dtype.name)}",
        f"dimension: {array.ndim}",
        f"sizes: {' '.join(map(str, array.shape[::-1]))}",
        f"endian: {endian}",
        f"encoding: {encoding}",
        *lines,
    ]
    data = array.astype(array.dtype.newbyteorder("<" if endian == "little" else ">")).tobytes()
    return ("\n".join(head) + "\n\n").encode() + (
        gzip.compress(data) if encoding == "gzip" else data
    )


def mrc_bytes(
    array: np.ndarray,
    size_angstrom: Sequence[float],
    start: Sequence[int] = (0, 0, 0),
    *,
    order: ByteOrder = "<",
    extended: int = 0,
    imod: int | None = None,
) -> bytes:
    """An MRC2014 file of an array (z, y, x); size and start are in the order x, y, z.

    ``imod`` are IMOD's flags, if it is to have written the file.
    """
    modes = {"int8": 0, "uint8": 0, "int16": 1, "float32": 2, "uint16": 6, "float16": 12}
    header = bytearray(1024)
    nx, ny, nz = array.shape[::-1]
    cell = [n * s for n, s in zip((nx, ny, nz), size_angstrom, strict=True)]
    struct.pack_into(
        f"{order}10i", header, 0, nx, ny, nz, modes[array.dtype.name], *start, nx, ny, nz
    )
    struct.pack_into(f"{order}6f", header, 40, *cell, 90, 90, 90)
    struct.pack_into(f"{order}3i", header, 64, 1, 2, 3)
    struct.pack_into(f"{order}2i", header, 88, 1, extended)
    if imod is not None:
        struct.pack_into(f"{order}2i", header, 152, 1146047817, imod)
    header[208:212] = b"MAP "
    header[212:216] = b"DD\0\0" if order == "<" else b"\x11\x11\0\0"
    return bytes(header) + bytes(extended) + array.astype(array.dtype.newbyteorder(order)).tobytes()


def tiff_bytes(
    array: np.ndarray,
    *,
    order: ByteOrder = ">",
    tile: int | None = None,
    rows: int | None = None,
) -> bytes:
    """An uncompressed TIFF file of the slices of an array (z, y, x).

    Slices are in strips of ``rows`` rows, or in square tiles with an edge of ``tile``.
    """
    array = array.astype(array.dtype.newbyteorder(order))
    data = bytearray()
    pages = []
    for plane in array:
        y, x = plane.shape
        if tile:
            padded = np.pad(plane, ((0, -y % tile), (0, -x % tile)))
            parts = [
                padded[j : j + tile, i : i + tile]
                for j in range(0, padded.shape[0], tile)
                for i in range(0, padded.shape[1], tile)
            ]
        else:
            parts = [plane[j : j + (rows or y)] for j in range(0, y, rows or y)]
        where = []
        for part in parts:
            where.append((8 + len(data), part.nbytes))
            data += part.tobytes() + b"\0" * 3  # not one after the other
        pages.append(where)
    kinds = {"u": 1, "i": 2, "f": 3}
    out = bytearray(
        (b"MM" if order == ">" else b"II") + struct.pack(f"{order}HI", 42, 8 + len(data)) + data
    )
    for number, where in enumerate(pages):
        offsets, counts = zip(*where, strict=True)
        lists = {273 if not tile else 324: offsets, 279 if not tile else 325: counts}
        tags = {
            256: (4, x),
            257: (4, y),
            258: (3, 8 * array.dtype.itemsize),
            259: (3, 1),
            262: (3, 1),
            277: (3, 1),
        }
        tags |= {322: (4, tile), 323: (4, tile)} if tile else {278: (4, rows or y)}
        tags[339] = (3, kinds[array.dtype.kind])
        begin = len(out)
        extra = begin + 2 + 12 * (len(tags) + len(lists)) + 4
        entries = []
        tail = bytearray()
        for tag in sorted({**tags, **lists}):
            if tag in tags:
                kind, value = tags[tag]
                packed = (
                    struct.pack(f"{order}HH", value, 0)
                    if kind == 3
                    else struct.pack(f"{order}I", value)
                )
                entries.append(struct.pack(f"{order}HHI", tag, kind, 1) + packed)
            else:
                values = lists[tag]
                packed = struct.pack(f"{order}{len(values)}I", *values)
                if len(values) > 1:
                    tail += packed
                    packed = struct.pack(f"{order}I", extra + len(tail) - len(packed))
                entries.append(struct.pack(f"{order}HHI", tag, 4, len(values)) + packed)
        following = 0 if number == len(pages) - 1 else extra + len(tail)
        out += (
            struct.pack(f"{order}H", len(entries))
            + b"".join(entries)
            + struct.pack(f"{order}I", following)
            + tail
        )
    return bytes(out)


def write_file(path: Path, content: bytes) -> str:
    """Write a file, compressed if its name ends with .gz, and return its path."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)
