"""TIFF files of many pages or of one slice, with voxel sizes as ImageJ and OME state them.

Pages that are not compressed are read through memory maps; of others, only the strips or tiles that
a box touches are decoded.
"""

from __future__ import annotations

import hashlib
import logging
import lzma
import math
import os
import re
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.jpeg import check_jpeg
from beam_inference.conversion.picture_headers import stated_extent
from beam_inference.conversion.protocol import (
    COLOURS_LOST,
    FREE,
    ORIENTATION,
    PlaneOfMany,
    Read,
    SliceHeader,
    SourceInfo,
    Voxels,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    orientation_notes,
    stated_voxel_size,
)
from beam_inference.conversion.raw_array import RawLayout, RawSource, check_not_cut, read_raw
from beam_inference.conversion.stored_files import (
    StoredFile,
    count_bytes,
    file_identity,
    open_stream,
)
from beam_inference.errors import (
    ConfigError,
    PermanentReadError,
    TransientReadError,
    VolumeError,
    WorkerFault,
)
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, ceil_div
from beam_inference.volumes.axes import length_nm
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.remote_files import RemoteFile

_PALETTE = 3
_WHITE_IS_ZERO = 0
_BLACK_IS_ZERO = 1
_RGB = 2
_YCBCR = 6
_TOGETHER = 1
_SEPARATE = 2
_CHANNEL_AXES = "CS"
_LOSSES = (
    "shaped series",
    "ImageJ series",
    "missing",
    "cannot handle discontiguous",
    "index out of range",
    "not stitched",
    "incompletely written",
    "frames, got",
)
"""Words of tifffile's warnings after which it leaves out pages, or takes other shapes."""

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

_MOST_LISTED = 8
"""Images and scales that a message names."""

_BITS_OF_THREE_BYTES = 24

_UNITS_OF_LENGTH = (2, 3)
"""Values of the tag ResolutionUnit: inch and centimetre."""

_MICROMETRE_NM = 1e3

_MOST_LABELS = 10**6
"""Values that OME metadata may list along an axis."""

_JPEG = frozenset({6, 7, 34892, 33007})
"""Compressions whose decoder takes tables, as in tifffile itself."""

_STORED_AS = (
    "bitspersample",
    "compression",
    "dtype",
    "fillorder",
    "imagelength",
    "imagewidth",
    "photometric",
    "planarconfig",
    "predictor",
    "rowsperstrip",
    "sampleformat",
    "samplesperpixel",
    "tilelength",
    "tilewidth",
)
"""What tifffile takes from the first page, for all of an image."""

_PICTURES = _JPEG | {33003, 33004, 33005, 34712, 34933}
"""Compressions by which a strip is a picture: JPEG, JPEG 2000, PNG."""

_OTHER_PICTURES = frozenset({22610, 34887, 34934, 50001, 50002, 52546})
"""Compressions by which a strip is a picture of another kind: JPEG XR, LERC, WebP, JPEG XL."""

OME_DTYPES = frozenset(
    {"uint8", "uint16", "uint32", "int8", "int16", "int32", "float32", "float64"}
)
"""Names of the dtypes that an OME-TIFF may hold."""


def tiff_source(path: StoredFile, series: str | None, scale: int = 0) -> RawSource | TiffPages:
    """A file of one or many pages.

    Args:
        path: the file.
        series: number or name of one of several images in it; None if there is one alone, or one
            with coarser scales, such as a whole slide beside its label and thumbnail.
        scale: number of the image's scale.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: there is no such scale, or tifffile is not installed.
    """
    complaint = f"{path} cannot be read as TIFF"
    import_library("tifffile", "TIFF")
    with header_errors(complaint):
        _check_page_list(path)
    with header_errors(complaint), _page_faults() as faults, _open(path) as tiff:
        if tiff.is_ndtiff:
            raise VolumeError(
                f"{path} is described by the file NDTiff.index beside it, which is not read: it "
                "may name any files. Save the data set as OME-TIFF first, with Micro-Manager."
            )
        _check_ome_metadata(path, tiff)
        _check_imagej_metadata(path, tiff)
        number = _series_number(path, tiff, series)
        source = _source(path, tiff, number, scale)
        if len(tiff.pages) and faults:
            raise VolumeError(
                f"the list of pages in {path}, or what describes it, is damaged: {faults[0]}. "
                "Copy it again."
            )
        return source


def _open(file: StoredFile, **options: bool) -> Any:
    """Open a file by tifffile."""
    tifffile = import_library("tifffile", "TIFF")
    if isinstance(file, RemoteFile):
        return tifffile.TiffFile(file.open(), name=file.url.rpartition("/")[2], **options)
    return tifffile.TiffFile(file, **options)


def _check_page_list(path: StoredFile) -> None:
    """Refuse a list of pages that leads back into itself: tifffile follows some without end.

    Raises:
        VolumeError: it does.
    """
    seen: set[int] = set()
    with open_stream(path) as file:
        head = file.read(16)
        order = "<" if head[:2] == b"II" else ">"
        is_big = head[2:4] in (b"+\0", b"\0+")
        place = struct.Struct(order + ("Q" if is_big else "I"))
        count = struct.Struct(order + ("Q" if is_big else "H"))
        tag_bytes = 20 if is_big else 12
        (offset,) = place.unpack_from(head, 8 if is_big else 4)
        while offset:
            if offset in seen:
                raise VolumeError(
                    f"the list of pages in {path} is damaged: after {len(seen)} pages it leads "
                    "back to one of them. Copy it again."
                )
            seen.add(offset)
            file.seek(offset)
            found = file.read(count.size)
            if len(found) < count.size:
                return  # it ends outside of the file, which tifffile notices
            file.seek(count.unpack(found)[0] * tag_bytes, os.SEEK_CUR)
            found = file.read(place.size)
            if len(found) < place.size:
                return
            (offset,) = place.unpack(found)


@contextmanager
def _page_faults() -> Iterator[list[str]]:
    """Collect what tifffile finds wrong with lists of pages, and what describes them.

    It logs that, and leaves out pages, or puts zeros in their place.
    """
    faults: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_of_pages = record.levelno >= logging.ERROR and "TiffPages" in text
        if not is_of_pages and not any(each in text for each in _LOSSES):
            return True
        faults.append(" ".join(text.split())[:200])
        return False

    logger = logging.getLogger("tifffile")
    logger.addFilter(keep)
    try:
        yield faults
    finally:
        logger.removeFilter(keep)


def _series_number(path: StoredFile, tiff: Any, series: str | None) -> int:
    """The number of the image that is meant, by its number or name."""
    images = list(tiff.series)
    if series is None:
        meant = list(range(len(images)))
        if len(images) > 1:
            meant = [number for number in meant if len(images[number].levels) > 1]
    elif series.isdecimal():
        meant = [int(series)] if int(series) < len(images) else []
    else:
        meant = [number for number, image in enumerate(images) if image.name == series]
    if len(meant) == 1:
        return meant[0]
    listed = [f"{k} ({image.name}, {image.shape})" for k, image in enumerate(images[:_MOST_LISTED])]
    more = f" and {len(images) - _MOST_LISTED} more" if len(images) > _MOST_LISTED else ""
    raise VolumeError(
        f"{path} holds {len(images)} images: {', '.join(listed)}{more}. Choose one with --dataset "
        f"0 … {len(images) - 1}"
    )


def _notes(page: Any, tiff: Any, image: Any) -> tuple[str, ...]:
    """What a person should know of an image: colours that are lost, scales, sizes of pixels."""
    notes = list(_meaning_notes(page))
    if len(image.levels) > 1:
        notes.append(
            f"it has {len(image.levels)} scales, of which --scale chooses one: "
            f"{', '.join(str(level.shape) for level in image.levels[:_MOST_LISTED])}"
        )
        pixel_nm = _pixel_nm(page, tiff)
        if pixel_nm is not None and _voxel_size(tiff, tiff.series.index(image)) is None:
            y, x = (f"{size:.6g}" for size in pixel_nm)
            notes.append(
                f"its pixels are {y} × {x} nm (y, x), and a slide states no thickness: give "
                f"--voxel-size Z,{y},{x}"
            )
    return tuple(notes)


def _is_decoded_to_rgb(page: Any) -> bool:
    """Whether tifffile makes red, green and blue of a page, as of slides' JPEG."""
    return page.photometric == _YCBCR and page.compression in _JPEG and not page.extrasamples


def _meaning_notes(page: Any) -> tuple[str, ...]:
    """What the values of a page mean where they are no grey values, row by row from the top."""
    notes = []
    if page.photometric == _PALETTE:
        notes.append(COLOURS_LOST)
    if page.photometric == _WHITE_IS_ZERO:
        notes.append("its values are as stored, of which 0 is white")
    elif page.photometric not in (_PALETTE, _BLACK_IS_ZERO, _RGB) and not _is_decoded_to_rgb(page):
        notes.append(f"its values are those of the colour space {page.photometric!s}")
    orientation = page.tags.valueof(ORIENTATION, default=1)
    return (*notes, *orientation_notes(orientation))


def _pixel_nm(page: Any, tiff: Any) -> tuple[float, float] | None:
    """Height and width of a slide's pixel, as the scanner states it."""
    if tiff.is_svs:
        found = re.search(r"\|\s*MPP\s*=\s*([0-9.]{1,20})", tiff.pages.first.description)
        if found:
            size = float(found[1]) * _MICROMETRE_NM
            ratio = tiff.pages.first.imagewidth / page.imagewidth
            return (size * ratio, size * ratio) if size > 0 else None
    try:
        x, y = page.get_resolution("MICROMETER")
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None
    has_unit = page.resolutionunit in _UNITS_OF_LENGTH
    return (_MICROMETRE_NM / y, _MICROMETRE_NM / x) if has_unit and x > 0 and y > 0 else None


def _source(path: StoredFile, tiff: Any, number: int, scale: int) -> RawSource | TiffPages:
    image = tiff.series[number]
    if scale >= len(image.levels):
        raise ConfigError(
            f"--scale {scale}: {path} has no scales"
            if len(image.levels) == 1
            else f"--scale {scale}: {path} has the scales 0 … {len(image.levels) - 1}"
        )
    series = image.levels[scale]
    page = series.keyframe
    _check_kind(path, page)
    is_contiguous = series.dataoffset is not None and _are_in_a_row(path, series, page)
    _check_one_file(path, tiff, series)
    leading = _leading_axes(path, series, page)
    letters = "".join(axis.letter for axis in leading)
    axes = letters + _page_axes(page)
    shape = (*(axis.length for axis in leading), *_page_shape(page))
    check_shape(str(path), shape)
    extent = dict(zip(axes, shape, strict=True))
    info = SourceInfo(
        BoundingBox((0, 0, 0), (extent.get("Z", 1), extent["Y"], extent["X"])),
        extent.get("C", 1),
        number_dtype(page.dtype, str(path)),
        None if scale else _voxel_size(tiff, number),
        FREE if is_contiguous else page_grain(page),
        _notes(page, tiff, image),
    )
    if is_contiguous:
        dtype = page.dtype.newbyteorder(tiff.byteorder).str
        layout = RawLayout(dtype, shape, axes, int(series.dataoffset))
        check_not_cut(path, layout)
        return RawSource(path, layout, info)
    check_block_memory(str(path), info.grain, info.itemsize)
    source = TiffPages(path, number, scale, letters, info)
    try:
        source.open()(BoundingBox((0, 0, 0), (1, 1, 1)))  # is there a codec?
    except PermanentReadError as error:
        raise VolumeError(str(error)) from None
    return source


def _check_kind(path: StoredFile, page: Any) -> None:
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
    return _channels_fault(page) or _bytes_fault(page)


def _bytes_fault(page: Any) -> str | None:
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


def _are_in_a_row(path: StoredFile, series: Any, first: Any) -> bool:
    """Whether all pages of an image, and all parts of each, follow one another in the file.

    tifffile looks at the parts of the first page only.

    Raises:
        PermanentReadError: a page is stored in another way than the first.
    """
    for number, each in enumerate(series.pages):
        if each is not None and each is not first:
            page = each.aspage()
            _check_like(path, number, page, first)
            fault = _bytes_fault(page)
            if fault is not None:
                raise PermanentReadError(f"page {number} of {path} is damaged: {fault}")
            start = int(series.dataoffset) + number * int(first.nbytes)
            if not page.is_final or int(page.dataoffsets[0]) != start:
                return False
    return True


def _check_one_file(path: StoredFile, tiff: Any, series: Any) -> None:
    """Refuse an image whose pages are in several files. Raises VolumeError."""
    ends = (series.pages[0], series.pages[-1])
    if series.is_multifile or any(page is None or page.parent is not tiff for page in ends):
        raise _one_of_several(path)


def _check_ome_metadata(path: StoredFile, tiff: Any) -> None:
    """Refuse OME metadata that name other files, or that tifffile would count for ever.

    This comes before tifffile opens these files, or makes lists of planes.

    Raises:
        VolumeError: the image is in several files, or has less than its metadata say.
    """
    if not tiff.is_ome:
        return
    root = ElementTree.fromstring(tiff.ome_metadata)
    own = root.get("UUID")
    elsewhere = root.find(".//{*}BinaryOnly")
    if elsewhere is not None:
        name = shorten_text(elsewhere.get("MetadataFile", "") or "another file")
        raise VolumeError(
            f"{path} is one of several files of an OME data set: what its pages are, stands in "
            f"{name}. Save the data set as one OME-TIFF, or convert the files as a stack of slices "
            "if they are that."
        )
    for element in root.iterfind(".//{*}TiffData/{*}UUID"):
        name = element.get("FileName", "").lower()
        if element.text != own and (own is not None or name != tiff.filename.lower()):
            raise _one_of_several(path)
    most = len(tiff.pages) * int(tiff.pages.first.samplesperpixel)
    for pixels in root.iterfind(".//{*}Pixels"):
        planes = math.prod(int(pixels.get(f"Size{axis}", 1)) for axis in "ZCT")
        counts = [
            int(data.get(key, 0))
            for data in pixels.iterfind("{*}TiffData")
            for key in ("PlaneCount", "NumPlanes")
        ]
        if max([planes, *counts]) > most:
            raise VolumeError(
                f"the OME metadata of {path} speak of {max([planes, *counts])} planes, and it has "
                f"{most}: it is damaged, or one of several files. Several are converted as a "
                "stack of slices."
            )
    for along in root.iterfind(".//{*}StructuredAnnotations//*[@End]"):
        length = float(along.get("End", 0)) - float(along.get("Start", 0))
        if not abs(length) <= _MOST_LABELS * abs(float(along.get("Step", 1))):
            raise VolumeError(f"the OME metadata of {path} list too many positions on an axis")


def _check_imagej_metadata(path: StoredFile, tiff: Any) -> None:
    """Refuse a file that has fewer images than its metadata say.

    ImageJ writes one page for a whole volume where it is large: then the file's length counts.

    Raises:
        VolumeError: it has.
    """
    if not tiff.is_imagej:
        return
    stated = int((tiff.imagej_metadata or {}).get("images", 1))
    page = tiff.pages.first
    found = len(tiff.pages)
    if page.is_final:
        rest = count_bytes(path) - int(page.dataoffsets[0])
        found = max(found, rest // max(1, int(page.nbytes)))
    if stated > found:
        raise VolumeError(
            f"{path} says that it holds {stated} images, and has room for {found}: it was cut off, "
            "or is damaged. Copy or save it again."
        )
    listed = math.prod(tiff.series[0].shape) // max(1, math.prod(_page_shape(page)))
    if len(tiff.pages) > max(1, listed):
        raise VolumeError(
            f"{path} says that it holds {listed} images, and has {len(tiff.pages)}: what describes "
            "it is wrong, and slices would be lost. Save it again."
        )


def _one_of_several(path: StoredFile) -> VolumeError:
    return VolumeError(
        f"{path} is one of several files of an OME data set: convert the files as a stack of slices"
    )


@dataclass(frozen=True, slots=True)
class _LeadingAxis:
    """An axis along which pages follow one another: "Z", or "C" for channels."""

    letter: str
    length: int


def _leading_axes(path: StoredFile, series: Any, page: Any) -> list[_LeadingAxis]:
    """The axes over pages, slowest first.

    Raises:
        VolumeError: they are not z, channels, or both.
    """
    leading: list[_LeadingAxis] = []
    rest = math.prod(series.shape) // math.prod(_page_shape(page))  # pages not yet accounted for
    for length, axis in zip(series.shape, series.axes, strict=True):
        if length > 1 and rest % length == 0 and rest > 1 and axis not in "YX":
            leading.append(_LeadingAxis("C" if axis in _CHANNEL_AXES else "Z", length))
            rest //= length
    axes = "".join(axis.letter for axis in leading) + _page_axes(page)
    if rest != 1 or len(set(axes)) != len(axes) or "Y" not in axes:
        raise VolumeError(
            f"{path} has the axes {series.axes} of {series.shape}; expected pages along z, and at "
            "most one axis of channels"
        )
    return leading


def _page_axes(page: Any) -> str:
    if page.samplesperpixel == 1:
        return "YX"
    return "CYX" if page.planarconfig == _SEPARATE else "YXC"


def _page_shape(page: Any) -> tuple[int, ...]:
    extent = {"Y": page.imagelength, "X": page.imagewidth, "C": page.samplesperpixel}
    return tuple(int(extent[axis]) for axis in _page_axes(page))


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


@dataclass(frozen=True, slots=True)
class TiffPages:
    """Pages that are compressed, or scattered in their file.

    Attributes:
        path: the file.
        series: number of the image in it.
        scale: number of the image's scale.
        leading: letters of the axes over pages, slowest first: "Z", "CZ", "ZC", "C" or none.
        info: its extent, dtype, and so on.
    """

    path: StoredFile
    series: int
    scale: int
    leading: str
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """Path, size and time of the file, and the image's number."""
        scale = {"scale": self.scale} if self.scale else {}
        return file_identity(self.path) | {"series": self.series} | scale

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return [self.path]

    def open(self) -> Read:
        """Open the file; its list of pages is read once."""
        tiff = _open(self.path)
        pages = tiff.series[self.series].levels[self.scale].pages
        lock = threading.Lock()  # of the file's position, while a page's header is read
        read_parts = _part_reader(self.path)

        def read_slice(z: int, channel: int, window: BoundingBox) -> Voxels:
            with lock:
                page = self._page(pages, self._page_number(z, channel))
            return page_window(self.path, read_parts, page, window)[:, 0]

        def read(box: BoundingBox) -> Voxels:
            window = BoundingBox((0, *box.start[1:]), (1, *box.stop[1:]))
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)
            for z in range(box.start[0], box.stop[0]):
                target = out[:, z - box.start[0]]
                if "C" in self.leading:
                    for channel in range(self.info.channels):
                        target[channel : channel + 1] = read_slice(z, channel, window)
                else:
                    target[...] = read_slice(z, 0, window)
            return out

        weakref.finalize(read, tiff.close)
        return read

    def _page(self, pages: Any, number: int) -> Any:
        """One of the pages, with a header of its own, which must be as the first one's is.

        Raises:
            PermanentReadError: its header is damaged, or says that it is another kind of page.
        """
        try:
            page = pages[number]
            keyframe = page.keyframe
            own = page.aspage()
            found = (
                int(keyframe.samplesperpixel),
                int(keyframe.imagelength),
                int(keyframe.imagewidth),
                number_dtype(keyframe.dtype, f"page {number}"),
            )
        except Exception as error:  # a header may say anything, as for header_errors
            raise PermanentReadError(
                f"cannot read page {number} of {self.path}: {error}: the file is damaged"
            ) from error
        _check_like(self.path, number, own, keyframe)
        channels = 1 if "C" in self.leading else self.info.channels
        expected = (channels, *self.info.bounds.shape[1:], self.info.dtype)
        if found != expected:
            raise PermanentReadError(
                f"page {number} of {self.path} is another kind of image than the first: its "
                f"channels, height, width and dtype are {found}, expected {expected}. The file is "
                "damaged, or holds several images"
            )
        return own

    def _page_number(self, z: int, channel: int) -> int:
        """Number of the page of a slice; ``channel`` is 0 where a page holds all channels."""
        if "C" not in self.leading:
            return z
        if self.leading[0] == "C":
            return channel * self.info.bounds.shape[0] + z
        return z * self.info.channels + channel


def _check_like(path: StoredFile, number: int, page: Any, first: Any) -> None:
    """Refuse a page that is stored in another way than the first, by which tifffile reads it.

    Raises:
        PermanentReadError: it is.
    """
    for key in _STORED_AS:
        found = getattr(page, key)
        expected = getattr(first, key)
        if found != expected:
            raise PermanentReadError(
                f"page {number} of {path} has {key} {found}, and the first {expected}: they must "
                "be stored alike. Save the file again."
            )


ReadParts: TypeAlias = Callable[[Sequence[tuple[int, int]]], Iterable[bytes]]
"""Reads parts of a file: the first byte of each, and the one behind its last."""


def _part_reader(file: StoredFile) -> ReadParts:
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
            layout = RawLayout(dtype, _page_shape(keyframe), _page_axes(keyframe), start)
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
    if page.keyframe.compression in _JPEG:
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


def _voxel_size(tiff: Any, number: int) -> VoxelSizeNm | None:
    """The voxel size of the image of a number, in its finest scale."""
    if tiff.is_ome:
        stated = _ome_voxel_sizes(tiff.ome_metadata)
        if len(stated) == len(tiff.series):
            return stated[number]
        return stated[0] if len(set(stated)) == 1 else None
    if tiff.is_imagej:
        return _imagej_voxel_size(tiff.imagej_metadata or {}, tiff.pages[0].tags)
    return None


def _ome_voxel_sizes(text: str) -> list[VoxelSizeNm | None]:
    """The voxel size of each image that OME metadata describe."""
    return [_ome_voxel_size(each) for each in ElementTree.fromstring(text).iterfind(".//{*}Pixels")]


def _ome_voxel_size(pixels: ElementTree.Element) -> VoxelSizeNm | None:
    sizes: list[float] = []
    for axis in "ZYX":
        unit = length_nm(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        size = pixels.get(f"PhysicalSize{axis}")
        if size is None or unit is None:
            return None
        sizes.append(float(f"{float(size) * unit:.9g}"))
    return stated_voxel_size(sizes)


def _imagej_voxel_size(metadata: Json, tags: Any) -> VoxelSizeNm | None:
    unit = _imagej_unit_nm(str(metadata.get("unit", "")))
    spacing = metadata.get("spacing")
    if (
        unit is None
        or spacing is None
        or not {"XResolution", "YResolution"} <= {tag.name for tag in tags}
    ):
        return None
    # Resolutions are fractions: pixels per unit.
    x_pixels, x_units = tags["XResolution"].value
    y_pixels, y_units = tags["YResolution"].value
    if not (x_pixels and y_pixels):
        return None
    sizes = (float(spacing), y_units / y_pixels, x_units / x_pixels)
    units = [metadata.get(f"{axis}unit") for axis in "zyx"]  # where it is not that of x
    lengths = [unit if each is None else _imagej_unit_nm(str(each)) for each in units]
    return stated_voxel_size(
        math.nan if length is None else float(f"{size * length:.6g}")
        for size, length in zip(sizes, lengths, strict=True)
    )


def _imagej_unit_nm(unit: str) -> float | None:
    return length_nm(unit.replace("\\u00B5", "µ"))


def create_tiff(path: str, spec: FileSpec) -> RawLayout:
    """Write a new OME-TIFF with all its pages, empty and one after the other.

    It is a BigTIFF if it must be.
    """
    tifffile = import_library("tifffile", "TIFF")
    z, y, x = spec.bounds.shape
    metadata: Json = {"axes": "ZCYX"}
    if spec.voxel_size_nm is not None:
        for axis, size in zip("ZYX", spec.voxel_size_nm, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "nm"}
    shape = (z, spec.channels, y, x)
    tifffile.imwrite(
        path,
        shape=shape,
        dtype=np.dtype(spec.dtype).newbyteorder("<"),
        byteorder="<",
        ome=True,
        photometric="minisblack",
        metadata=metadata,
    )
    with tifffile.TiffFile(path) as tiff:
        offset = int(tiff.pages[0].dataoffsets[0])
    return RawLayout(np.dtype(spec.dtype).newbyteorder("<").str, shape, "ZCYX", offset)


def read_tiff_slice_header(path: StoredFile) -> SliceHeader:
    """Read the header of a file of one page.

    Raises:
        VolumeError: it has more pages, or holds no numbers.
    """
    import_library("tifffile", "TIFF")
    complaint = f"{path} cannot be read as TIFF"
    with header_errors(complaint), _open(path, is_ome=False) as tiff:
        page = tiff.pages[0]
        if len(tiff.pages) != 1:
            raise VolumeError(f"{path} has {len(tiff.pages)} pages; expected one, of a slice")
        if page.is_final and page.dataoffsets[0] + page.nbytes > count_bytes(path):
            raise VolumeError(f"{path} was cut off: copy it again")
        check_shape(str(path), _page_shape(page))
        has_table = page.photometric == _PALETTE and page.colormap is not None
        return SliceHeader(
            channels=int(page.samplesperpixel),
            height=int(page.imagelength),
            width=int(page.imagewidth),
            dtype=number_dtype(page.dtype, str(path)),
            grain=page_grain(page),
            notes=_meaning_notes(page),
            plane=_ome_plane(tiff, page),
            colours=hashlib.sha256(page.colormap.tobytes()).hexdigest() if has_table else "",
        )


def _ome_plane(tiff: Any, page: Any) -> PlaneOfMany | None:
    """What a file of one page is of an OME data set of several, as its metadata say."""
    if not page.is_ome:
        return None
    try:
        root = ElementTree.fromstring(page.description)
    except ElementTree.ParseError:
        return None  # it is no part of the voxels
    own = root.get("UUID")
    name = str(tiff.filename).lower()
    images = list(root.iterfind(".//{*}Pixels"))
    for number, pixels in enumerate(images):
        c, t, depth = (int(pixels.get(f"Size{axis}", 1)) for axis in "CTZ")
        for data in pixels.iterfind("{*}TiffData"):
            uuid = data.find("{*}UUID")
            if uuid is None:
                continue  # some programs state the whole recording in the file of each plane
            is_own = uuid.text == own if own else uuid.get("FileName", "").lower() == name
            if is_own and (depth > 1 or c * t > int(page.samplesperpixel) or len(images) > 1):
                z, channel, time = (int(data.get(f"First{axis}", 0)) for axis in "ZCT")
                return PlaneOfMany(z, f"image {number}, channel {channel}, time {time}", depth)
    return None


def read_tiff_slice(path: str, box: BoundingBox) -> Voxels:
    """Read the voxels of a box, one slice deep, of a file of one page: (channels, 1, y, x)."""
    with _open(path, is_ome=False) as tiff:
        return page_window(path, _part_reader(path), tiff.pages[0], box)
