"""What OME, ImageJ and scanners of slides state in a TIFF file beside its pages."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from beam_inference.config.fields import Json
from beam_inference.conversion.protocol import PlaneOfMany, stated_voxel_size
from beam_inference.conversion.stored_files import StoredFile, count_bytes
from beam_inference.conversion.tiff_pages import page_shape
from beam_inference.errors import VolumeError
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.volumes.axes import length_nm

_MICROMETRE_NM = 1e3

_UNITS_OF_LENGTH = (2, 3)
"""Values of the tag ResolutionUnit: inch and centimetre."""

_MOST_LABELS = 10**6
"""Values that OME metadata may list along an axis."""


def check_ome_metadata(path: StoredFile, tiff: Any) -> None:
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
            raise one_of_several(path, len(tiff.pages))
    images = list(root.iterfind(".//{*}Pixels"))
    if len(tiff.pages) > 1 and all(pixels.find("{*}TiffData") is None for pixels in images):
        raise VolumeError(
            f"the OME metadata of {path} do not say which of its {len(tiff.pages)} pages are of "
            "which z, channel and time (they have no TiffData): save it again, as OME-TIFF."
        )
    most = len(tiff.pages) * int(tiff.pages.first.samplesperpixel)
    for pixels in images:
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
    _check_ome_planes(path, len(tiff.pages), images)
    for along in root.iterfind(".//{*}StructuredAnnotations//*[@End]"):
        length = float(along.get("End", 0)) - float(along.get("Start", 0))
        if not abs(length) <= _MOST_LABELS * abs(float(along.get("Step", 1))):
            raise VolumeError(f"the OME metadata of {path} list too many positions on an axis")


def _check_ome_planes(path: StoredFile, count: int, images: Sequence[ElementTree.Element]) -> None:
    """Refuse OME metadata by which a page is of two planes, or a plane of two pages.

    Args:
        path: of the file.
        count: how many pages it has.
        images: the element ``Pixels`` of each of its images.

    Raises:
        VolumeError: there is such a page or plane, or a page or plane of a negative number.
    """
    used: set[int] = set()
    for pixels in images:
        filled: set[int] = set()
        for data in pixels.iterfind("{*}TiffData"):
            first = int(data.get("IFD", 0))
            length = int(data.get("NumPlanes", 1 if "IFD" in data.keys() else 0))  # noqa: SIM118
            length = int(data.get("PlaneCount", length)) or count
            plane = _number_of_plane(pixels, data)
            pages = range(first, min(first + length, count))
            planes = range(plane, plane + len(pages))
            if first < 0 or plane < 0 or used.intersection(pages) or filled.intersection(planes):
                raise VolumeError(
                    f"the OME metadata of {path} place a page twice, or two pages at one place, or "
                    f"below 0 (at page {first}): it is damaged. Copy or save it again."
                )
            used.update(pages)
            filled.update(planes)


def _number_of_plane(pixels: ElementTree.Element, data: ElementTree.Element) -> int:
    """The first plane of a ``TiffData``, counted in the order that the image states."""
    channel = pixels.find("{*}Channel")
    samples = 1 if channel is None else int(channel.get("SamplesPerPixel", 1))
    number = 0
    for axis in reversed(pixels.get("DimensionOrder", "XYZCT")[2:]):
        position = int(data.get(f"First{axis}", 0))
        if position < 0:
            return position
        size = int(pixels.get(f"Size{axis}", 1))
        number = number * (size // samples if axis == "C" else size) + position
    return number


def check_ome_pages(path: StoredFile, series: Any) -> None:
    """Refuse an image of which OME metadata leave planes out, of which nobody knows the values.

    Raises:
        VolumeError: they do.
    """
    missing = [number for number, page in enumerate(series.pages) if page is None]
    if missing:
        raise VolumeError(
            f"the OME metadata of {path} name no page for {len(missing)} of its "
            f"{len(series.pages)} planes, such as number {missing[0]} (axes {series.axes} of "
            f"{series.shape}): it lacks them, or goes on in other files. Save the data set as one "
            "OME-TIFF, with all planes."
        )


def check_imagej_metadata(path: StoredFile, tiff: Any) -> None:
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
    listed = math.prod(tiff.series[0].shape) // max(1, math.prod(page_shape(page)))
    if len(tiff.pages) > max(1, listed):
        raise VolumeError(
            f"{path} says that it holds {listed} images, and has {len(tiff.pages)}: what describes "
            "it is wrong, and slices would be lost. Save it again."
        )


def check_lsm_pages(path: StoredFile, tiff: Any) -> None:
    """Refuse an LSM file that does not have a thumbnail behind each of its pages.

    tifffile takes every second page for one.

    Raises:
        VolumeError: it has not, or other pages than it says.
    """
    if not tiff.is_lsm:
        return
    image = tiff.series[0]
    stated = math.prod(image.shape) // max(1, math.prod(page_shape(tiff.pages.first)))
    is_thumbnail = [bool(page.aspage().is_reduced) for page in tiff.pages]
    if is_thumbnail != [False, True] * stated:
        raise VolumeError(
            f"{path} is an LSM file that says it holds {stated} pages, each with a thumbnail, and "
            f"has {is_thumbnail.count(False)} with {is_thumbnail.count(True)} thumbnails: which "
            "page is which, is not known. Save it as OME-TIFF with the microscope's program."
        )


def one_of_several(path: StoredFile, pages: int) -> VolumeError:
    """Return the refusal of a file of so many pages, whose image goes on in others."""
    advice = "convert the files as a stack of slices"
    if pages > 1:
        advice = "save the data set as one OME-TIFF"
    return VolumeError(
        f"{path} holds a part of an image, which goes on in other files of an OME data set, or "
        f"lacks pages: {advice}"
    )


def find_voxel_size(tiff: Any, number: int) -> VoxelSizeNm | None:
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


def find_pixel_nm(page: Any, tiff: Any) -> tuple[float, float] | None:
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


def find_ome_plane(tiff: Any, page: Any) -> PlaneOfMany | None:
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
