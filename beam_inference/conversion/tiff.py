"""TIFF: files of many pages, slices of one, and what ImageJ and OME say of voxel sizes.

Pages that are not compressed are read through memory maps; of others, only the strips or tiles that
a box touches are decoded.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.protocol import FREE, Read, SourceInfo, library, number_dtype
from beam_inference.conversion.raw_array import RawLayout, RawSource, check_length, file_identity
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, ceil_div
from beam_inference.volumes.opening import length_nm

_PALETTE = 3
_SEPARATE = 2
_CHANNEL_AXES = "CS"

OME_DTYPES = frozenset(
    {"uint8", "uint16", "uint32", "int8", "int16", "int32", "float32", "float64"}
)
"""What an OME-TIFF may hold."""


def tiff_source(path: str, series: str | None) -> RawSource | TiffPages:
    """A file of one or many pages; ``series`` is the number of one of several images in it.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: tifffile is not installed.
    """
    tifffile = library("tifffile", "TIFF")
    try:
        with tifffile.TiffFile(path) as tiff:
            number = _series_number(path, tiff, series)
            return _source(path, tiff, number)
    except (tifffile.TiffFileError, OSError, ValueError, IndexError, KeyError) as error:
        raise VolumeError(f"{path} cannot be read as TIFF: {error}") from None


def _series_number(path: str, tiff: Any, series: str | None) -> int:
    shapes = [each.shape for each in tiff.series]
    if series is None and len(shapes) == 1:
        return 0
    if series is not None and series.isdecimal() and int(series) < len(shapes):
        return int(series)
    raise VolumeError(
        f"{path} holds {len(shapes)} images, of the shapes {', '.join(map(str, shapes[:5]))}: "
        f"choose one with --dataset 0 … {len(shapes) - 1}"
    )


def _source(path: str, tiff: Any, number: int) -> RawSource | TiffPages:
    series = tiff.series[number]
    page = series.keyframe
    ends = (series.pages[0], series.pages[-1]) if series.dataoffset is None else ()
    if any(each is None or each.parent is not tiff for each in ends):
        raise VolumeError(
            f"{path} is one of several files of an OME data set: convert the files as a stack of "
            "slices"
        )
    leading, axes = _axes(path, series, page)
    dtype = number_dtype(page.dtype, path)
    extent = dict(zip(axes, [n for n, _ in leading] + list(_page_shape(page)), strict=True))
    notes = (
        ("its table of colours is not kept, its values are",)
        if page.photometric == _PALETTE
        else ()
    )
    shape: Zyx = (extent.get("Z", 1), extent["Y"], extent["X"])
    bounds = BoundingBox((0, 0, 0), shape)
    size = _voxel_size(tiff)
    if series.dataoffset is not None:
        layout = RawLayout(
            page.dtype.newbyteorder(tiff.byteorder).str,
            tuple(extent.values()),
            axes,
            int(series.dataoffset),
        )
        check_length(path, layout)
        return RawSource(
            path, layout, SourceInfo(bounds, extent.get("C", 1), dtype, size, FREE, notes)
        )
    names = "".join(axis for _, axis in leading)
    info = SourceInfo(bounds, extent.get("C", 1), dtype, size, page_grain(page), notes)
    source = TiffPages(path, number, names, info)
    try:
        source.open()(BoundingBox((0, 0, 0), (1, 1, 1)))
    except PermanentReadError as error:
        raise VolumeError(str(error)) from None
    return source


def _axes(path: str, series: Any, page: Any) -> tuple[list[tuple[int, str]], str]:
    """Length and letter of the axes over pages, and the letters of all axes, slowest first."""
    page_axes = _page_axes(page)
    over_pages = math.prod(series.shape) // math.prod(_page_shape(page))
    leading: list[tuple[int, str]] = []
    rest = over_pages
    for length, axis in zip(series.shape, series.axes, strict=True):
        if length > 1 and rest % length == 0 and rest > 1 and axis not in "YX":
            leading.append((length, "C" if axis in _CHANNEL_AXES else "Z"))
            rest //= length
    axes = "".join(axis for _, axis in leading) + page_axes
    if rest != 1 or len(set(axes)) != len(axes) or "Y" not in axes:
        raise VolumeError(
            f"{path} has the axes {series.axes} of {series.shape}; expected pages along z, and at "
            "most one axis of channels"
        )
    return leading, axes


def _page_axes(page: Any) -> str:
    if page.samplesperpixel == 1:
        return "YX"
    return "CYX" if page.planarconfig == _SEPARATE else "YXC"


def _page_shape(page: Any) -> tuple[int, ...]:
    extent = {"Y": page.imagelength, "X": page.imagewidth, "C": page.samplesperpixel}
    return tuple(int(extent[axis]) for axis in _page_axes(page))


def page_grain(page: Any) -> Zyx:
    """What is decoded at a time of a page, ZYX."""
    return FREE if page.is_final else (1, *_segment_shape(page))


def _segment_shape(page: Any) -> tuple[int, int]:
    if page.is_tiled:
        return int(page.tilelength), int(page.tilewidth)
    return min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth)


@dataclass(frozen=True, slots=True)
class TiffPages:
    """Pages that are compressed, or scattered in their file.

    Attributes:
        path: of the file.
        series: number of the image in it.
        leading: letters of the axes over pages, slowest first: "Z", "CZ", "ZC", "C" or none.
        info: what is known of it.
    """

    path: str
    series: int
    leading: str
    info: SourceInfo

    @property
    def identity(self) -> dict[str, Any]:
        """The file as it is."""
        return file_identity(self.path) | {"series": self.series}

    def open(self) -> Read:
        """The list of pages is read once."""
        tiff = library("tifffile", "TIFF").TiffFile(self.path)
        pages = tiff.series[self.series].pages
        lock = threading.Lock()  # of the file's position, while a page's header is read
        file = os.open(self.path, os.O_RDONLY)
        depth = self.info.bounds.shape[0]
        channels = self.info.channels

        def read(box: BoundingBox) -> NDArray[Any]:
            window = BoundingBox((0, *box.start[1:]), (1, *box.stop[1:]))
            out = np.empty((channels, *box.shape), self.info.dtype)
            for z in range(box.start[0], box.stop[0]):
                for c in range(channels) if "C" in self.leading else (None,):
                    number = (
                        z
                        if c is None
                        else c * depth + z
                        if self.leading[0] == "C"
                        else z * channels + c
                    )
                    with lock:
                        page = pages[number]
                    where = slice(None) if c is None else slice(c, c + 1)
                    out[where, z - box.start[0]] = page_window(self.path, file, page, window)[:, 0]
            return out

        weakref.finalize(read, os.close, file)
        weakref.finalize(read, tiff.close)
        return read


def page_window(path: str, file: int, page: Any, box: BoundingBox) -> NDArray[Any]:
    """The voxels of a box, one slice deep, of a page: (channels, 1, y, x), in native byte order.

    Raises:
        PermanentReadError: they cannot be decoded.
    """
    keyframe = page.keyframe
    try:
        if keyframe.is_final:
            dtype = keyframe.dtype.newbyteorder(page.parent.byteorder).str
            layout = RawLayout(
                dtype, _page_shape(keyframe), _page_axes(keyframe), int(page.dataoffsets[0])
            )
            return layout.read(path, box)
        return _decoded(file, page, box)
    except Exception as error:  # codecs have errors of their own
        advice = (
            "pip install imagecodecs"
            if "imagecodecs" in str(error)
            else "the file is damaged, or unusual"
        )
        raise PermanentReadError(
            f"cannot read {path}, a TIFF with {keyframe.compression.name} compression: {error}: "
            f"{advice}"
        ) from error


def _decoded(file: int, page: Any, box: BoundingBox) -> NDArray[Any]:
    keyframe = page.keyframe
    length, width = _segment_shape(keyframe)
    rows = ceil_div(keyframe.imagelength, length)
    columns = ceil_div(keyframe.imagewidth, width)
    _, y0, x0 = box.start
    _, y1, x1 = box.stop
    out = np.zeros((keyframe.samplesperpixel, *box.shape), keyframe.dtype.newbyteorder("="))
    tables = {}
    if keyframe.compression in {6, 7, 34892, 33007}:  # JPEG, as tifffile itself asks
        tables = {"jpegtables": page.jpegtables, "jpegheader": keyframe.jpegheader}
    for plane in range(keyframe.samplesperpixel if keyframe.planarconfig == _SEPARATE else 1):
        for j in range(y0 // length, ceil_div(y1, length)):
            for i in range(x0 // width, ceil_div(x1, width)):
                index = (plane * rows + j) * columns + i
                count = int(page.databytecounts[index])
                if not count:
                    continue  # a sparse file: zeros
                data = os.pread(file, count, int(page.dataoffsets[index]))
                if len(data) < count:
                    raise ValueError("it was cut off")
                segment = keyframe.decode(data, index, **tables)[0][0]
                tile = BoundingBox(
                    (0, j * length, i * width), (1, j * length + segment.shape[0], (i + 1) * width)
                )
                both = box.intersection(tile)
                source = both.slices_in(tile)[1:]
                target = both.slices_in(box)[1:]
                samples = slice(plane, plane + segment.shape[-1])
                out[(samples, 0, *target)] = np.moveaxis(segment, -1, 0)[(slice(None), *source)]
    return out


def _voxel_size(tiff: Any) -> VoxelSizeNm | None:
    if tiff.is_ome:
        return _of_ome(tiff.ome_metadata)
    if tiff.is_imagej:
        return _of_imagej(tiff.imagej_metadata or {}, tiff.pages[0].tags)
    return None


def _of_ome(text: str) -> VoxelSizeNm | None:
    pixels = ElementTree.fromstring(text).find(".//{*}Pixels")
    if pixels is None:
        return None
    sizes = []
    for axis in "ZYX":
        unit = length_nm(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        size = pixels.get(f"PhysicalSize{axis}")
        if size is None or unit is None or not float(size) > 0:
            return None
        sizes.append(float(f"{float(size) * unit:.9g}"))
    return (sizes[0], sizes[1], sizes[2])


def _of_imagej(metadata: dict[str, Any], tags: Any) -> VoxelSizeNm | None:
    unit = length_nm(str(metadata.get("unit", "")).replace("\\u00B5", "µ"))
    spacing = metadata.get("spacing")
    if (
        unit is None
        or spacing is None
        or not {"XResolution", "YResolution"} <= {tag.name for tag in tags}
    ):
        return None
    xn, xd = tags["XResolution"].value
    yn, yd = tags["YResolution"].value
    if not (xn and yn and float(spacing) > 0):
        return None
    z, y, x = (float(f"{each * unit:.6g}") for each in (float(spacing), yd / yn, xd / xn))
    return (z, y, x)


def create_tiff(path: str, spec: FileSpec) -> RawLayout:
    """A new OME-TIFF with all its pages, one after the other, still empty; BigTIFF where it must be."""
    tifffile = library("tifffile", "TIFF")
    z, y, x = spec.bounds.shape
    metadata: dict[str, Any] = {"axes": "ZCYX"}
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


def read_slice_header(path: str) -> tuple[int, int, int, str, Zyx]:
    """Channels, y, x, dtype and grain of a file of one page.

    Raises:
        VolumeError: it has more pages, or holds no numbers.
    """
    tifffile = library("tifffile", "TIFF")
    try:
        with tifffile.TiffFile(path, is_ome=False) as tiff:
            page = tiff.pages[0]
            if len(tiff.pages) != 1:
                raise VolumeError(f"{path} has {len(tiff.pages)} pages; expected one, of a slice")
            if page.is_final and page.dataoffsets[0] + page.nbytes > Path(path).stat().st_size:
                raise VolumeError(f"{path} was cut off: copy it again")
            channels = int(page.samplesperpixel)
            return (
                channels,
                int(page.imagelength),
                int(page.imagewidth),
                number_dtype(page.dtype, path),
                page_grain(page),
            )
    except (tifffile.TiffFileError, OSError, ValueError, IndexError) as error:
        raise VolumeError(f"{path} cannot be read as TIFF: {error}") from None


def read_slice(path: str, box: BoundingBox) -> NDArray[Any]:
    """The voxels of a box, one slice deep, of a file of one page."""
    file = os.open(path, os.O_RDONLY)
    try:
        with library("tifffile", "TIFF").TiffFile(path, is_ome=False) as tiff:
            return page_window(path, file, tiff.pages[0], box)
    finally:
        os.close(file)
