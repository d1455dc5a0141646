"""TIFF files of many pages or of one slice, with voxel sizes as ImageJ and OME state them.

Pages that are not compressed are read through memory maps; of others, only the strips or tiles that
a box touches are decoded.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.protocol import (
    COLOURS_LOST,
    FREE,
    ORIENTATION,
    Read,
    SliceHeader,
    SourceInfo,
    Voxels,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    orientation_notes,
)
from beam_inference.conversion.raw_array import RawLayout, RawSource, check_not_cut
from beam_inference.conversion.stored_files import (
    StoredFile,
    count_bytes,
    file_identity,
    open_stream,
)
from beam_inference.conversion.tiff_metadata import (
    check_imagej_metadata,
    check_lsm_pages,
    check_ome_metadata,
    check_ome_pages,
    find_ome_plane,
    find_pixel_nm,
    find_voxel_size,
    one_of_several,
)
from beam_inference.conversion.tiff_pages import (
    JPEG,
    bytes_fault,
    check_kind,
    page_axes,
    page_grain,
    page_shape,
    page_window,
    part_reader,
)
from beam_inference.environment import filter_logs
from beam_inference.errors import ConfigError, PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.remote_files import RemoteFile

_PALETTE = 3
_WHITE_IS_ZERO = 0
_BLACK_IS_ZERO = 1
_RGB = 2
_YCBCR = 6
_CHANNEL_AXES = "CS"
_SLIDE = "Baseline"
"""What tifffile calls the slide itself, beside its label and thumbnail."""

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

_MOST_LISTED = 8
"""Images and scales that a message names."""

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

OME_DTYPES = frozenset(
    {"uint8", "uint16", "uint32", "int8", "int16", "int32", "float32", "float64"}
)
"""Names of the dtypes that an OME-TIFF may hold."""


def tiff_source(path: StoredFile, series: str | None, scale: int = 0) -> RawSource | TiffPages:
    """A file of one or many pages.

    Args:
        path: the file.
        series: number or name of one of several images in it; None if there is one alone, or one
            with coarser scales or of Aperio's, such as a slide beside its label and thumbnail.
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
        check_ome_metadata(path, tiff)
        check_imagej_metadata(path, tiff)
        check_lsm_pages(path, tiff)
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

    def is_shown(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_of_pages = record.levelno >= logging.ERROR and "TiffPages" in text
        if not is_of_pages and not any(each in text for each in _LOSSES):
            return True
        faults.append(" ".join(text.split())[:200])
        return False

    with filter_logs(["tifffile"], is_shown):
        yield faults


def _series_number(path: StoredFile, tiff: Any, series: str | None) -> int:
    """The number of the image that is meant, by its number or name."""
    images = list(tiff.series)
    if series is None:
        meant = list(range(len(images)))
        if len(images) > 1:
            meant = [number for number in meant if len(images[number].levels) > 1]
        if not meant and tiff.is_svs:  # a small slide has one scale
            meant = [number for number, image in enumerate(images) if image.name == _SLIDE]
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
        pixel_nm = find_pixel_nm(page, tiff)
        if pixel_nm is not None and find_voxel_size(tiff, tiff.series.index(image)) is None:
            y, x = (f"{size:.6g}" for size in pixel_nm)
            notes.append(
                f"its pixels are {y} × {x} nm (y, x), and a slide states no thickness: give "
                f"--voxel-size Z,{y},{x}"
            )
    return tuple(notes)


def _time_notes(series: Any) -> tuple[str, ...]:
    """A note on an image of several times: many programs write z as time, and some write times."""
    times = dict(zip(series.axes, series.shape, strict=True)).get("T", 1)
    if times == 1:
        return ()
    return (f"its {times} times (axis T) are read along z: if they are times, it is no volume",)


def _is_decoded_to_rgb(page: Any) -> bool:
    """Whether tifffile makes red, green and blue of a page, as of slides' JPEG."""
    return page.photometric == _YCBCR and page.compression in JPEG and not page.extrasamples


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


def _source(path: StoredFile, tiff: Any, number: int, scale: int) -> RawSource | TiffPages:
    image = tiff.series[number]
    if scale >= len(image.levels):
        raise ConfigError(
            f"--scale {scale}: {path} has no scales"
            if len(image.levels) == 1
            else f"--scale {scale}: {path} has the scales 0 … {len(image.levels) - 1}"
        )
    series = image.levels[scale]
    if tiff.is_ome:
        check_ome_pages(path, series)
    page = series.keyframe
    check_kind(path, page)
    is_contiguous = series.dataoffset is not None and _are_in_a_row(path, series, page)
    _check_one_file(path, tiff, series)
    leading = _leading_axes(path, series, page)
    letters = "".join(axis.letter for axis in leading)
    axes = letters + page_axes(page)
    shape = (*(axis.length for axis in leading), *page_shape(page))
    check_shape(str(path), shape)
    extent = dict(zip(axes, shape, strict=True))
    info = SourceInfo(
        BoundingBox((0, 0, 0), (extent.get("Z", 1), extent["Y"], extent["X"])),
        extent.get("C", 1),
        number_dtype(page.dtype, str(path)),
        None if scale else find_voxel_size(tiff, number),
        FREE if is_contiguous else page_grain(page),
        _notes(page, tiff, image) + _time_notes(series),
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
            fault = bytes_fault(page)
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
        raise one_of_several(path, len(tiff.pages))


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
    rest = math.prod(series.shape) // math.prod(page_shape(page))  # pages not yet accounted for
    for length, axis in zip(series.shape, series.axes, strict=True):
        if length > 1 and rest % length == 0 and rest > 1 and axis not in "YX":
            leading.append(_LeadingAxis("C" if axis in _CHANNEL_AXES else "Z", length))
            rest //= length
    axes = "".join(axis.letter for axis in leading) + page_axes(page)
    if rest != 1 or len(set(axes)) != len(axes) or "Y" not in axes:
        raise VolumeError(
            f"{path} has the axes {series.axes} of {series.shape}; expected pages along z, and at "
            "most one axis of channels"
        )
    return leading


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
        read_parts = part_reader(self.path)

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
        check_shape(str(path), page_shape(page))
        has_table = page.photometric == _PALETTE and page.colormap is not None
        return SliceHeader(
            channels=int(page.samplesperpixel),
            height=int(page.imagelength),
            width=int(page.imagewidth),
            dtype=number_dtype(page.dtype, str(path)),
            grain=page_grain(page),
            notes=_meaning_notes(page),
            plane=find_ome_plane(tiff, page),
            colours=hashlib.sha256(page.colormap.tobytes()).hexdigest() if has_table else "",
        )


def read_tiff_slice(path: str, box: BoundingBox) -> Voxels:
    """Read the voxels of a box, one slice deep, of a file of one page: (channels, 1, y, x)."""
    with _open(path, is_ome=False) as tiff:
        return page_window(path, part_reader(path), tiff.pages[0], box)
