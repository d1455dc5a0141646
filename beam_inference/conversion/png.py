"""PNG and JPEG slices, read by Pillow; files that would lose bits or colours are refused."""

from __future__ import annotations

import hashlib
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from beam_inference.conversion.jpeg import check_jpeg
from beam_inference.conversion.protocol import (
    COLOURS_LOST,
    ORIENTATION,
    SliceHeader,
    Voxels,
    header_errors,
    import_library,
    orientation_notes,
)
from beam_inference.conversion.stored_files import StoredFile, open_stream
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.block_headers import PNG_SIGNATURE

_CHANNELS = {"L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 1, "I;16B": 1}
_GREY = 0

PNG_CHANNELS = {"uint8": (1, 2, 3, 4), "uint16": (1,)}
"""Numbers of channels that a PNG may have, by dtype."""


def _pillow() -> Any:
    image: Any = import_library("PIL.Image", "PNG and JPEG")
    image.MAX_IMAGE_PIXELS = None  # a slice of a volume is large by right
    return image


def _open(file: str | BinaryIO) -> Any:
    """Open a picture of the two kinds, whatever its name says.

    Pillow would open a file of any other kind, too, some by starting another program.
    """
    return _pillow().open(file, formats=("PNG", "JPEG"))


def read_picture_header(path: StoredFile) -> SliceHeader:
    """Read the header of a slice.

    Raises:
        VolumeError: it is no picture, or Pillow would change its values.
    """
    with (
        header_errors(f"{path} cannot be read as a picture"),
        open_stream(path) as stream,
        _open(stream) as image,
    ):
        width, height = image.size
        mode = image.mode
        is_png = image.format == "PNG"
        frames = getattr(image, "n_frames", 1)
        stated = _pillow().Exif()
        stated.load(image.info.get("exif", b""))  # getexif() would decode the picture
        orientation = stated.get(ORIENTATION, 1)
        palette = bytes(image.getpalette("RGBA") or ()) if mode == "P" else b""
    if frames != 1:
        raise VolumeError(
            f"{path} holds {frames} pictures; expected one, of a slice. Save each as a file."
        )
    is_deep = is_png and _has_16_bits(path)
    if mode not in _CHANNELS:
        raise VolumeError(
            f"{path} is of Pillow's mode {mode}; expected grey, RGB or RGBA with 8 bits, or grey "
            "with 16"
        )
    return SliceHeader(
        channels=_CHANNELS[mode],
        height=height,
        width=width,
        dtype="uint16" if is_deep else "uint8",
        grain=(1, height, width),
        notes=((COLOURS_LOST,) if palette else ()) + orientation_notes(orientation),
        colours=hashlib.sha256(palette).hexdigest() if palette else "",
    )


def _has_16_bits(path: StoredFile) -> bool:
    """Whether the channels of a PNG have 16 bits instead of 8.

    Raises:
        VolumeError: they have fewer than 8 bits, which Pillow would stretch, or are several with
            16, which it would halve.
    """
    with open_stream(path) as file:
        start = file.read(26)
    if start[12:16] != b"IHDR":  # Pillow would take a later one
        raise VolumeError(
            f"{path} is a PNG that does not begin with its header: it is damaged. Save it again."
        )
    bits, colour = start[24:]
    if bits < 8 or (bits == 16 and colour != _GREY):
        raise VolumeError(
            f"{path} has {bits} bits a channel in PNG's colour type {colour}; expected 8, or "
            "16 for grey. Save it as TIFF."
        )
    return bool(bits == 16)


def read_picture(path: str, box: BoundingBox) -> Voxels:
    """Read the voxels of a box, one slice deep: (channels, 1, y, x)."""
    try:
        _, top, left = box.start
        _, bottom, right = box.stop
        status = Path(path).stat()
        _check_complete(path, status.st_size, status.st_mtime_ns)
        with _open(path) as image:
            array = np.asarray(image.crop((left, top, right, bottom)))
    except Exception as error:  # the decoders have errors of their own
        raise PermanentReadError(f"cannot read {path}: {error}") from error
    if array.ndim == 2:
        array = array[..., np.newaxis]
    return np.moveaxis(array, -1, 0)[:, np.newaxis]


@lru_cache(maxsize=10_000)
def _check_complete(path: str, _size: int, _modified_ns: int) -> None:
    """Refuse a picture of which a part is not there: Pillow would leave it black, or grey.

    Raises:
        ValueError: a part is not there.
    """
    with Path(path).open("rb") as file:
        is_png = file.read(len(PNG_SIGNATURE)) == PNG_SIGNATURE
    if is_png:
        _check_rows(Path(path))
    else:
        check_jpeg(Path(path).read_bytes())


def _check_rows(path: Path) -> None:
    """Refuse a PNG with fewer or more rows than its header states.

    Raises:
        ValueError: it has.
    """
    with path.open("rb") as file:
        file.seek(len(PNG_SIGNATURE))
        expected = 0
        found = 0
        unpacked = zlib.decompressobj()
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            content = file.read(length)
            file.seek(4, 1)  # its checksum
            if kind == b"IHDR":
                expected = _bytes_of_rows(content)
            while kind == b"IDAT" and content and not unpacked.eof and found <= expected:
                found += len(unpacked.decompress(content, _AT_A_TIME))
                content = unpacked.unconsumed_tail
    if found != expected:
        more = " or more" if found > expected else ""
        raise ValueError(
            f"it holds {found:,} bytes{more} of rows, and its header requires {expected:,}"
        )


_AT_A_TIME = 2**24


def _bytes_of_rows(header: bytes) -> int:
    """Bytes of a PNG's rows, each behind the byte of its filter, once they are unpacked."""
    width, height, bits, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits *= {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 1)
    total = 0
    for x, y, step_x, step_y in _PASSES if interlaced else [(0, 0, 1, 1)]:
        columns = max(0, -(-(width - x) // step_x))
        rows = max(0, -(-(height - y) // step_y))
        total += rows * (1 + -(-columns * bits // 8)) if columns else 0
    return total


_PASSES = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""First column and row, and the steps from one to the next, of the passes of an interlaced PNG."""


def write_png(path: Path, array: Voxels) -> None:
    """Write a slice (channels, y, x) with a dtype and channels of :data:`PNG_CHANNELS`."""
    image = array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)
    _pillow().fromarray(np.ascontiguousarray(image)).save(path, compress_level=1)
