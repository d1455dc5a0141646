"""The extent that a picture inside of another file states, before a library decodes all of it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from beam_inference.volumes.block_headers import PNG_SIGNATURE

_JPEG2000 = b"\xff\x4f\xff\x51"
"""Begin of a code stream, and of its size."""

_JPEG_FRAMES = frozenset({*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC})
"""Markers that begin a frame, also of JPEG-LS: those that define tables and the like do not."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Height and width of a picture, in pixels."""

    height: int
    width: int


def stated_extent(content: bytes) -> Extent | None:
    """The extent of a PNG, a JPEG, a JPEG-LS or a JPEG 2000; None where none is stated.

    By the specifications: PNG (ISO 15948), the chunk IHDR; JPEG (ITU T.81) and JPEG-LS
    (ITU T.87), the frame header; JPEG 2000 (ITU T.800), the marker SIZ.
    """
    if content.startswith(PNG_SIGNATURE) and len(content) >= 24:
        width, height = struct.unpack_from(">II", content, 16)
        return Extent(height, width)
    if content.startswith(b"\xff\xd8"):
        return _jpeg_extent(content)
    start = _code_stream(content)
    if content[start : start + len(_JPEG2000)] == _JPEG2000 and start + 24 <= len(content):
        right, bottom, left, top = struct.unpack_from(">4I", content, start + 8)
        return Extent(bottom - top, right - left)
    return None


def _code_stream(content: bytes) -> int:
    """Where the code stream of a JPEG 2000 begins: at once, or in a box of a file."""
    place = 0
    if content[4:8] != b"jP  ":
        return place
    while place + 16 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, place)
        header = 8
        if length == 1:  # a longer one follows
            (length,) = struct.unpack_from(">Q", content, place + 8)
            header = 16
        if kind == b"jp2c":
            return place + header
        place += max(length, header)
    return len(content)


def _jpeg_extent(content: bytes) -> Extent | None:
    place = 2
    while place + 9 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", content, place + 5)
            return Extent(height, width)
        # padding, and markers that stand alone
        is_alone = marker in (0x01, 0xFF) or 0xD0 <= marker <= 0xD8
        (length,) = struct.unpack_from(">H", content, place + 2)
        place += (1 if marker == 0xFF else 2) if is_alone else 2 + length
    return None
