"""Extents of pictures that are stated before they are decoded."""

import io

import numpy as np
import pytest
from PIL import Image, features

from beam_inference.conversion.picture_headers import Extent, stated_extent

KINDS = [
    pytest.param("PNG", {}, id="png"),
    pytest.param("JPEG", {}, id="jpeg"),
    pytest.param("JPEG", {"progressive": True, "exif": b"Exif\0\0" + bytes(100)}, id="progressive"),
    pytest.param(
        "JPEG2000",
        {},
        id="jpeg 2000",
        marks=pytest.mark.skipif(not features.check("jpg_2000"), reason="Pillow without JPEG 2000"),
    ),
    pytest.param(
        "JPEG2000",
        {"no_jp2": True},
        id="code stream",
        marks=pytest.mark.skipif(not features.check("jpg_2000"), reason="Pillow without JPEG 2000"),
    ),
]


@pytest.mark.parametrize(("kind", "keys"), KINDS)
@pytest.mark.parametrize("colours", [(), (3,)], ids=["grey", "colours"])
def test_the_extent_is_read(kind, keys, colours):
    file = io.BytesIO()
    Image.fromarray(np.zeros((37, 53, *colours), np.uint8)).save(file, kind, **keys)
    content = file.getvalue()
    assert stated_extent(content) == Extent(37, 53)
    for length in range(0, min(len(content), 700)):
        stated_extent(content[:length])  # nothing that was cut off is an error


def test_anything_else_has_none():
    assert stated_extent(b"") is None
    assert stated_extent(b"\xff\xd8" + b"\xff\xe0\0\0" * 10) is None
    assert stated_extent(bytes(100)) is None


def test_a_code_stream_is_found_by_its_box():
    signature = b"\0\0\0\x0cjP  \r\n\x87\n"
    size = b"\xff\x4f\xff\x51" + bytes(4)
    decoy = size + bytes(4 * 4)
    box = (len(decoy) + 8).to_bytes(4, "big") + b"uuid" + decoy
    stream = size + (9).to_bytes(4, "big") + (7).to_bytes(4, "big") + bytes(16)
    content = signature + box + bytes(4) + b"jp2c" + stream
    assert stated_extent(content) == Extent(7, 9)
    assert stated_extent(signature + box) is None
