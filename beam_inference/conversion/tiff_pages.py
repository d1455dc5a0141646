"""A page of a TIFF file: how its values are stored, and reading a window of them."""

from __future__ import annotations

import lzma
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from beam_inference.conversion.jpeg import check_jpeg
from beam_inference.conversion.picture_headers import stated_extent
from beam_inference.conversion.protocol import FREE, Voxels, import_library
from beam_inference.conversion.raw_array import RawLayout, read_raw
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.errors import PermanentReadError, TransientReadError, VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.volumes.remote_files import RemoteFile

_TOGETHER = 1
_SEPARATE = 2
_NOT_PACKED = 1

_BILEVEL = frozenset({2, 3, 4})
"""Compressions of fax machines."""

_NO_PREDICTOR = 1
_LZW = 5
_DEFLATE = frozenset({8, 32946})
_LZMA = 34925

_BYTE_CODECS = _DEFLATE | {_LZW, _LZMA, 32773, 34926, 50000}
"""Compressions of any bytes: these, PackBits and zstd."""

_OFFSETS = frozenset({273, 324})
"""Tags of where strips and tiles begin."""

_GDAL_TAGS = frozenset({42112, 42113})
"""Tags of files of GDAL, which may leave out strips and tiles without values."""

_MOST_DEFLATED = 1032
"""Most bytes that a byte of deflate unpacks to."""

_SMALL_BYTES = 2**28
"""Bytes that a segment may unpack to without a look at what it unpacks to."""

_BITS_OF_THREE_BYTES = 24

JPEG = frozenset({6, 7, 34892, 33007})
"""Compressions whose decoder takes tables, as in tifffile itself."""

_PICTURES = JPEG | {33003, 33004, 33005, 34712, 34933}
"""Compressions by which a strip is a picture: JPEG, JPEG 2000, PNG."""

_OTHER_PICTURES = frozenset({22610, 34887, 34934, 50001, 50002, 52546})
"""Compressions by which a strip is a picture of another kind: JPEG XR, LERC, WebP, JPEG XL."""

ReadParts: TypeAlias = Callable[[Sequence[tuple[int, int]]], Iterable[bytes]]
"""Reads parts of a file: the first byte of each, and the one behind its last."""


def page_axes(page: Any) -> str:
    """Name the axes of a page's values, slowest first; "C" are its channels, if it has several."""
    if page.samplesperpixel == 1:
        return "YX"
    return "CYX" if page.planarconfig == _SEPARATE else "YXC"


def page_shape(page: Any) -> tuple[int, ...]:
    """Return the extent of a page along each of its axes."""
    extent = {"Y": page.imagelength, "X": page.imagewidth, "C": page.samplesperpixel}
    return tuple(int(extent[axis]) for axis in page_axes(page))


def page_grain(page: Any) -> Zyx:
    """The shape, ZYX, of what is decoded together of a page: a strip, a tile, or any voxel."""
    return FREE if page.is_final else (1, *_segment_shape(page))


def _segment_shape(page: Any) -> tuple[int, int]:
    if page.is_tiled:
        return int(page.tilelength), int(page.tilewidth)
    return min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth)


def _segment_samples(page: Any) -> int:
    """Count the channels that a strip or tile holds."""
    return 1 if page.planarconfig == _SEPARATE else int(page.samplesperpixel)


def _segment_counts(page: Any) -> Zyx:
    """Count the strips or tiles of a page: channels that are apart, rows of them, columns."""
    length, width = _segment_shape(page)
    planes = int(page.samplesperpixel) // _segment_samples(page)
    return planes, ceil_div(page.imagelength, length), ceil_div(page.imagewidth, width)


def check_kind(path: StoredFile, page: Any) -> None:
    """Refuse kinds of pages that are read otherwise than they are meant. Raises VolumeError."""
    kind = None
    if int(getattr(page, "tiledepth", 1) or 1) > 1:
        kind = f"in tiles of {page.tiledepth} slices"
    elif page.compression == _NOT_PACKED and page.predictor != _NO_PREDICTOR:
        kind = "as differences of neighbours (a predictor) without being compressed"
    elif int(page.bitspersample) == _BITS_OF_THREE_BYTES:
        kind = f"with {_BITS_OF_THREE_BYTES} bits each"
    elif page.compression in _BILEVEL and int(page.bitspersample) != 1:
        kind = f"with {page.bitspersample} bits each, in a compression of single bits"
    if kind is not None:
        raise VolumeError(
            f"{path} keeps its values {kind}, which programs read in different ways, and is not "
            "read here. Save it in another way."
        )
    fault = _layout_fault(page)
    if fault is not None:
        raise VolumeError(f"{path} is damaged, or unusual: {fault}. Copy it again.")


def _layout_fault(page: Any) -> str | None:
    """Say what is wrong with where a page says that its values are stored; None if nothing is."""
    return _channels_fault(page) or bytes_fault(page)


def bytes_fault(page: Any) -> str | None:
    """Say what is wrong with the number of bytes of a page that is stored as its values are."""
    first = page.keyframe
    is_one_of_many = page.parent.is_stk or page.parent.is_lsm  # their numbers are others'
    if not first.is_final or is_one_of_many:
        return None
    found = sum(page.databytecounts)
    if found == first.nbytes:
        return None
    return f"its strips or tiles have {found} bytes; expected {first.nbytes} of its values"


def _channels_fault(page: Any) -> str | None:
    """Say what is wrong with how a page says that its channels are stored; None if nothing is."""
    first = page.keyframe
    samples = int(first.samplesperpixel)
    if samples == 1:
        return None
    if first.planarconfig not in (_TOGETHER, _SEPARATE):
        return (
            f"its channels are stored in the way {int(first.planarconfig)}; expected "
            f"{_TOGETHER}, together, or {_SEPARATE}, one after the other (PlanarConfiguration)"
        )
    planes, rows, columns = _segment_counts(first)
    expected = planes * rows * columns
    found = len(page.dataoffsets)
    if page is first:  # tifffile leaves out those beyond what it expects
        found = max([found, *(tag.count for tag in first.tags if tag.code in _OFFSETS)])
    if found == expected:
        return None
    way = "one after the other" if planes > 1 else "together"
    return f"it has {found} strips or tiles; expected {expected} of {samples} channels {way}"


def part_reader(file: StoredFile) -> ReadParts:
    """A function that reads parts of a file, from several threads; what is cut off is shorter."""
    if isinstance(file, RemoteFile):
        return file.read_parts
    descriptor = os.open(file, os.O_RDONLY)

    def read_parts(parts: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        return (os.pread(descriptor, stop - start, start) for start, stop in parts)

    weakref.finalize(read_parts, os.close, descriptor)
    return read_parts


def page_window(path: StoredFile, read_parts: ReadParts, page: Any, box: BoundingBox) -> Voxels:
    """Read the voxels of a box, one slice deep, of a page.

    Args:
        path: the file, for memory maps and messages.
        read_parts: reads parts of it.
        page: tifffile's page.
        box: the box; z is 0 to 1.

    Returns:
        (channels, 1, y, x), in native byte order.

    Raises:
        PermanentReadError: they cannot be decoded.
    """
    keyframe = page.keyframe
    try:
        fault = _layout_fault(page)
        if fault is not None:
            raise ValueError(fault)
        if keyframe.is_final:
            dtype = keyframe.dtype.newbyteorder(page.parent.byteorder).str
            start = int(page.dataoffsets[0])
            _check_place(page, start, start + int(keyframe.nbytes))
            layout = RawLayout(dtype, page_shape(keyframe), page_axes(keyframe), start)
            return read_raw(path, layout, box)
        return _decode(read_parts, page, box)
    except (TransientReadError, WorkerFault):
        raise
    except Exception as error:  # codecs have errors of their own
        advice = (
            "pip install imagecodecs"
            if "imagecodecs" in str(error)
            else "the file is damaged, or unusual"
        )
        raise PermanentReadError(
            f"cannot read {path}, a TIFF with {_compression_name(keyframe)} compression: {error}: "
            f"{advice}"
        ) from error


def _compression_name(page: Any) -> str:
    """The name of a page's compression, or its number where tifffile knows no name."""
    compression = page.compression
    return str(getattr(compression, "name", compression))


def _decode(read_parts: ReadParts, page: Any, box: BoundingBox) -> Voxels:
    """Decode the segments of a page, its strips or tiles, that a box touches."""
    keyframe = page.keyframe
    length, width = _segment_shape(keyframe)
    planes, rows, columns = _segment_counts(keyframe)
    _, y0, x0 = box.start
    _, y1, x1 = box.stop
    shape = (int(keyframe.samplesperpixel), *box.shape)
    out = np.full(shape, keyframe.nodata, keyframe.dtype.newbyteorder("="))
    places = [
        (plane, row, column, (plane * rows + row) * columns + column)
        for plane in range(planes)
        for row in range(y0 // length, ceil_div(y1, length))
        for column in range(x0 // width, ceil_div(x1, width))
    ]
    stored = [place for place in places if _is_stored(page, place[-1])]
    parts = [_part(page, index) for *_, index in stored]
    for (plane, row, column, index), data in zip(stored, read_parts(parts), strict=True):
        if index == stored[0][-1]:  # what the header says wrongly, it says of all
            _check_packed_size(keyframe, index, data)
        segment = _segment(page, index, data)
        start = (0, row * length, column * width)
        tile = BoundingBox(start, (1, start[1] + segment.shape[0], start[2] + width))
        both = box.intersection(tile)
        source = (slice(None), *both.slices_in(tile)[1:])
        target = (slice(plane, plane + segment.shape[-1]), 0, *both.slices_in(box)[1:])
        out[target] = np.moveaxis(segment, -1, 0)[source]
    return out


def _is_stored(page: Any, index: int) -> bool:
    """Whether a strip or tile is there; sparse files of GDAL leave some out. Raises ValueError."""
    if int(page.databytecounts[index]) or int(page.dataoffsets[index]):
        return True
    if not _GDAL_TAGS.intersection(tag.code for tag in page.keyframe.tags):
        raise ValueError("a strip or tile of it was never written, and it is no file of GDAL's")
    return False


def _part(page: Any, index: int) -> tuple[int, int]:
    """The bytes of a strip or tile in its file. Raises ValueError."""
    offset = int(page.dataoffsets[index])
    count = int(page.databytecounts[index])
    if not count:
        raise ValueError("it was cut off")
    _check_place(page, offset, offset + count)
    return offset, offset + count


def _check_place(page: Any, start: int, stop: int) -> None:
    """Refuse voxels that are said to lie in the file's header, or among the page's tags.

    Raises:
        ValueError: they are.
    """
    is_big = page.parent.is_bigtiff
    header, count, tag, following = (16, 8, 20, 8) if is_big else (8, 2, 12, 4)
    tags = int(page.offset)
    behind = tags + count + tag * len(page.keyframe.tags) + following
    if start < header or (start < behind and stop > tags):
        raise ValueError(
            f"a strip or tile of it is said to lie at byte {start}, among the file's own tags"
        )


def _segment(page: Any, index: int, data: bytes) -> Voxels:
    """Decode a strip or tile: (y, x, channels)."""
    if len(data) < int(page.databytecounts[index]):
        raise ValueError("it was cut off")
    _check_unpacked_size(page.keyframe, data)
    _check_plain_size(page.keyframe, index, data)
    tables = {}
    if page.keyframe.compression in JPEG:
        tables = {"jpegtables": page.jpegtables, "jpegheader": page.keyframe.jpegheader}
        shared = page.jpegtables or b""  # a picture of their own, with a beginning and an end
        check_jpeg(shared[:-2] + data[2:] if shared else data)
    if page.keyframe.compression in _OTHER_PICTURES:
        return _decode_picture(page.keyframe, index, data)
    segment: Voxels = page.keyframe.decode(data, index, **tables)[0][0]
    return segment


def _decode_picture(page: Any, index: int, data: bytes) -> Voxels:
    """Decode a strip or tile that is a picture: (y, x, channels).

    Its codec is given an array, and refuses a picture of another extent before it allocates any.

    Raises:
        ValueError: it is of another extent or dtype.
    """
    tifffile = import_library("tifffile", "TIFF")
    if page.predictor != _NO_PREDICTOR:
        raise ValueError("its pictures have a predictor, which is not defined for them")
    decode = tifffile.TIFF.DECOMPRESSORS[page.compression]
    length, width = _segment_shape(page)
    samples = _segment_samples(page)
    for height in _segment_heights(page, index):
        shape = (height, width) if samples == 1 else (height, width, samples)
        try:
            picture: Voxels = decode(data, out=np.empty(shape, page.dtype.newbyteorder("=")))
        except ValueError as error:
            refusal = error
        else:
            return picture.reshape(height, width, samples)
    raise ValueError(
        f"a strip or tile of {length} × {width} holds a picture of another extent or dtype "
        f"({refusal})"
    )


def _segment_heights(page: Any, index: int) -> list[int]:
    """Rows that a strip or tile may have; the last strip those that are left, or all of one."""
    length, _ = _segment_shape(page)
    _, strips, _ = _segment_counts(page)
    left = length if page.is_tiled else page.imagelength - index % strips * length
    return list(dict.fromkeys((min(length, left), length)))


def _segment_bytes(page: Any, index: int) -> list[int]:
    """Bytes that the values of a strip or tile may take, unpacked; see the numbers of rows."""
    _, width = _segment_shape(page)
    samples = _segment_samples(page)
    row = ceil_div(width * samples * int(page.bitspersample), 8)
    return [row * height for height in _segment_heights(page, index)]


def _check_plain_size(page: Any, index: int, data: bytes) -> None:
    """Refuse a strip or tile that is not packed, and has another size than its values.

    Raises:
        ValueError: it has.
    """
    expected = _segment_bytes(page, index)
    if page.compression == _NOT_PACKED and len(data) not in expected:
        raise ValueError(
            f"a strip or tile has {len(data)} bytes, and its values need {expected[0]}"
        )


def _check_packed_size(page: Any, index: int, data: bytes) -> None:
    """Refuse a strip or tile that unpacks to more than its values.

    Only where tifffile does not: it takes as many bytes of LZW as it needs, and bits of others.

    Raises:
        ValueError: it does.
    """
    has_parts_of_bytes = int(page.bitspersample) % 8 and page.compression in _BYTE_CODECS
    if not (page.compression == _LZW or has_parts_of_bytes) or page.fillorder != 1:
        return
    unpack = import_library("tifffile", "TIFF").TIFF.DECOMPRESSORS[page.compression]
    expected = _segment_bytes(page, index)
    found = len(unpack(data, out=max(expected) + 1))
    if found > expected[0] and found not in expected:
        raise ValueError(f"a strip or tile unpacks to more than the {expected[0]} bytes it needs")


def _check_unpacked_size(page: Any, data: bytes) -> None:
    """Refuse a strip or tile that unpacks to much more than its voxels.

    tifffile alone, without imagecodecs, unpacks all of it.

    Raises:
        ValueError: it does.
    """
    length, width = _segment_shape(page)
    extent = stated_extent(data) if page.compression in _PICTURES else None
    if extent is not None and (extent.height > length or extent.width > width):
        raise ValueError(
            f"a strip or tile of {length} × {width} holds a picture of {extent.height} × "
            f"{extent.width}"
        )
    most = length * width * int(page.samplesperpixel) * page.dtype.itemsize + 2**20
    unpacker: Any = None
    if page.compression in _DEFLATE and len(data) * _MOST_DEFLATED > max(_SMALL_BYTES, most):
        unpacker = zlib.decompressobj()
    elif page.compression == _LZMA:
        unpacker = lzma.LZMADecompressor()
    if unpacker is not None and len(unpacker.decompress(data, most)) == most:
        raise ValueError("a strip or tile unpacks to more than its voxels")
