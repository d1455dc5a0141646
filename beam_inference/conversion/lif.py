"""LIF, the files of Leica's microscopes: several images, their planes one after the other."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from beam_inference.conversion.planes import (
    Image,
    PlaneSource,
    ReadPlane,
    choose_volume,
    instrument_source,
)
from beam_inference.conversion.protocol import (
    INSTRUMENTS,
    SourceInfo,
    Voxels,
    as_czyx,
    check_shape,
    import_library,
    number_dtype,
    stated_voxel_size,
)
from beam_inference.errors import VolumeError
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.volumes.axes import length_nm

_AXES = "CSZYX"


def lif_source(path: str, name: str | None) -> PlaneSource:
    """An image of a ``.lif`` file, by its name as Leica's software shows it.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: liffile is not installed.
    """
    import_library("liffile", "LIF", INSTRUMENTS)
    return instrument_source(path, "LIF", name, describe_lif)


def describe_lif(path: str, name: str | None) -> PlaneSource:
    """Read the header of a file, and check that its image is complete."""
    with Path(path).open("rb") as file:
        lif = _open(path, file)
        images = list(lif.images)
        chosen = choose_volume(path, [_image(image) for image in images], name)
        image = images[chosen.image]
        frame = "".join(image.frames.frame_dims)
        if frame not in ("YX", "YXS"):
            raise VolumeError(
                f"the image {chosen.name} of {path} is stored in planes of {frame or 'no axes'}; "
                "expected y, x. Save it as OME-TIFF with the microscope's software."
            )
        sizes = image.sizes
        extent = {axis: int(sizes.get(axis, 1)) for axis in _AXES}
        check_shape(path, extent.values())
        dtype = number_dtype(image.dtype, path)
        _check_complete(path, image)
        shape = (extent["Z"], extent["Y"], extent["X"])
        info = SourceInfo(
            BoundingBox((0, 0, 0), shape),
            extent["C"] * extent["S"],
            dtype,
            _voxel_size(image),
            (1, *shape[1:]),
        )
    return PlaneSource(path, chosen.name, info, open_lif)


def open_lif(path: str, volume: str) -> ReadPlane:
    """Open a file for reading planes."""
    file = Path(path).open("rb")  # noqa: SIM115 - it lives as long as its reader
    images = list(_open(path, file).images)
    chosen = choose_volume(path, [_image(image) for image in images], volume)
    image = images[chosen.image]
    lock = threading.Lock()
    axes = "".join(image.frames.frame_dims)
    channels = range(int(image.sizes.get("C", 1)))

    def read_plane(z: int, window: BoundingBox) -> Voxels:
        import numpy as np

        _, y, x = (slice(a, b) for a, b in zip(window.start, window.stop, strict=True))
        planes = []
        for channel in channels:
            position = chosen.positions | {"Z": z, "C": channel}
            index = {axis: n for axis, n in position.items() if axis in image.sizes}
            with lock:
                frame = image.frame(**index)
            planes.append(as_czyx(frame, axes.replace("S", "C"))[:, 0, y, x])
        whole: Voxels = np.concatenate(planes)
        return whole

    weakref.finalize(read_plane, file.close)
    return read_plane


def _open(path: str, file: Any) -> Any:
    """Open a file that names no others.

    Raises:
        VolumeError: it does, or is another of Leica's formats.
    """
    liffile = import_library("liffile", "LIF", INSTRUMENTS)
    lif = liffile.LifFile(file)
    if lif.type != liffile.LifFileType.LIF:
        raise VolumeError(
            f"{path} is a file of the kind {lif.type.name}, which keeps its images in other files; "
            "expected LIF. Save them as LIF or OME-TIFF with the microscope's software."
        )
    if lif.xml_element.find(".//Children/Reference") is not None:
        raise VolumeError(
            f"{path} names other files, which are not read in its place. Save its images as one "
            "LIF file, or as OME-TIFF, with the microscope's software."
        )
    names = Counter(_image_names(lif.xml_element))
    twice = [name for name, times in names.items() if times > 1]
    if twice:  # the library knows the last one only
        raise VolumeError(
            f"{path} holds several images of the name {shorten_text(twice[0])}: give each a name "
            "of its own, with the microscope's software"
        )
    return lif


def _image_names(root: Any) -> Iterator[str]:
    """The paths of all images, by the names of the elements that hold them."""
    waiting = [("", element) for element in root.iterfind("Element")]
    while waiting:
        above, element = waiting.pop()
        path = f"{above}/{element.get('Name', '')}"
        if element.find("Data/Image") is not None:
            yield path[1:]
        waiting += [(path, inner) for inner in element.iterfind("Children/Element")]


def _image(image: Any) -> Image:
    if not hasattr(image, "frames"):
        return Image(str(image.path))
    further = tuple((axis, int(n)) for axis, n in image.sizes.items() if axis not in _AXES)
    return Image(str(image.path), further)


def _check_complete(path: str, image: Any) -> None:
    """Refuse an image whose planes lie in each other, or reach beyond its part of the file."""
    block = image.memory_block
    frames = image.frames
    samples = frames.frame_sizes.get("S", 1)
    itemsize = image.dtype.itemsize
    plane = math.prod(frames.frame_shape) * itemsize
    starts = [each.bytes_inc for each in image._channels]
    offsets = starts[::samples]
    # Each axis as the distance of its neighbours, and of its first from its last.
    axes = [
        (each.bytes_inc, (each.number_elements - 1) * each.bytes_inc)
        for each in image._dimensions
        if each.label not in frames.frame_sizes and each.number_elements > 1
    ]
    if len(offsets) > 1:
        nearest = min(after - before for before, after in pairwise(offsets))
        axes.append((nearest, offsets[-1] - offsets[0]))
    reached = plane
    is_sound = offsets[0] >= 0 and all(
        start == offsets[number // samples] + number % samples * itemsize
        for number, start in enumerate(starts)
    )
    for distance, length in sorted(axes):
        is_sound = is_sound and distance >= reached
        reached += length
    if not is_sound:
        raise VolumeError(
            f"the image {image.path} of {path} has planes of {plane} bytes that would overlap, as "
            "its header places them: it is damaged. Copy it again."
        )
    needed = max(image.nbytes, offsets[0] + reached)
    if block.size < needed or Path(path).stat().st_size < block.offset + needed:
        raise VolumeError(
            f"{path} ends before its image {image.path} does, which takes {needed} bytes: it was "
            "cut off, or is damaged. Copy it again."
        )


def _voxel_size(image: Any) -> VoxelSizeNm | None:
    """The distance of neighbouring voxels: an axis states that of its first and last voxel."""
    units = {each.label: each.unit for each in getattr(image, "_dimensions", ())}
    sizes = {}
    for axis, values in image.coords.items():
        # Its library takes all lengths for metres, as those are that have no unit.
        unit_nm = length_nm(units.get(axis, "m"))
        if axis in "ZYX" and len(values) > 1 and unit_nm is not None:
            sizes[axis] = abs(float(values[-1]) - float(values[0])) / (len(values) - 1) * unit_nm
    if len(sizes) < 3:
        return None
    return stated_voxel_size(float(f"{sizes[axis]:.7g}") for axis in "ZYX")
