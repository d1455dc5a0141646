"""Fills in voxels outside the volume, by voxels inside or a constant, in volume coordinates.

The rule depends on the volume only, never on the cutout, so two chunks that share a voxel outside
the volume see the same value there.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox

Fill: TypeAlias = Literal["reflect", "symmetric", "edge", "constant"]
"""How voxels outside the volume are made; the words are those of ``numpy.pad``.

- ``reflect``: mirrored at the outermost voxels, which are not repeated.
- ``symmetric``: mirrored at the volume's faces, so that the outermost voxels are repeated.
- ``edge``: the outermost voxels.
- ``constant``: a value.
"""


def source_box(box: BoundingBox, volume: BoundingBox, fill: Fill) -> BoundingBox:
    """The part of the volume that must be read to know every voxel of a box.

    It can reach beyond the box: a thin box at the volume's border is mirrored from voxels that it
    does not hold itself.

    Args:
        box: the voxels that are wanted; may reach beyond the volume.
        volume: the volume's bounds.
        fill: how voxels outside the volume are made.

    Returns:
        A box inside the volume; empty if ``box`` misses the volume and the fill is constant.
    """
    if fill == "constant":
        inside = box.intersection(volume)
        return inside if inside.size else BoundingBox(volume.start, volume.start)
    ranges = [_source_coordinates(box, volume, axis, fill) for axis in range(3)]
    z, y, x = ((int(r.min()), int(r.max()) + 1) for r in ranges)
    return BoundingBox((z[0], y[0], x[0]), (z[1], y[1], x[1]))


def fill_outside(
    array: AnyArray,
    source: BoundingBox,
    box: BoundingBox,
    volume: BoundingBox,
    fill: Fill,
    fill_value: float,
) -> AnyArray:
    """The voxels of a box that may reach beyond the volume.

    Args:
        array: the voxels of ``source``, shape (channels, *source.shape), in the volume's stored
            dtype.
        source: ``source_box(box, volume, fill)``.
        box: the voxels that are wanted.
        volume: the volume's bounds.
        fill: how voxels outside the volume are made.
        fill_value: their value if the fill is constant, in stored units.

    Returns:
        Shape (channels, *box.shape), of the dtype of ``array``; ``array`` itself if the box lies
        inside the volume.
    """
    if source == box:
        return array
    if fill == "constant":
        filled = arrays.empty((array.shape[0], *box.shape), array.dtype)
        filled.fill(fill_value)
        if source.size:
            filled[(slice(None), *source.slices_in(box))] = array
        return filled
    for axis in range(3):
        origin = _source_coordinates(box, volume, axis, fill) - source.start[axis]
        shape = (*array.shape[: axis + 1], len(origin), *array.shape[axis + 2 :])
        array = np.take(array, origin, axis + 1, arrays.empty(shape, array.dtype), mode="clip")
    return array


def source_sections(box: BoundingBox, volume: BoundingBox, fill: Fill) -> NDArray[np.int64]:
    """The section of the volume that each section of a box along z comes from.

    With a constant fill, sections beyond the volume belong to the nearest one inside.
    """
    return _source_coordinates(box, volume, 0, "edge" if fill == "constant" else fill)


def _source_coordinates(
    box: BoundingBox, volume: BoundingBox, axis: int, fill: Fill
) -> NDArray[np.int64]:
    """The coordinate inside the volume that each voxel of a box has on one axis.

    Mirror images follow one another without end.
    """
    first = volume.start[axis]
    length = volume.shape[axis]
    position = np.arange(box.start[axis], box.stop[axis]) - first
    if fill == "edge" or length == 1:
        return first + np.clip(position, 0, length - 1)
    # What is mirrored begins again after twice the length, less the ends that are not repeated.
    repeated = fill == "symmetric"
    period = 2 * length if repeated else 2 * (length - 1)
    position %= period
    return first + np.minimum(position, period - repeated - position)


def check_fill_value(key: str, value: float, dtype: AnyDtype) -> None:
    """Refuse a fill value that the volume's dtype cannot hold.

    Args:
        key: what messages call it.
        value: in stored units.
        dtype: of the volume, of integers or floats.

    Raises:
        ConfigError: it cannot.
    """
    whole = dtype.kind in "iu"
    info = np.iinfo(dtype) if whole else np.finfo(dtype)
    low, high = (info.min, info.max) if whole else (float(info.min), float(info.max))
    if not low <= value <= high or (whole and value != int(value)):
        raise ConfigError(
            f"{key} {value} is not a value of the volume's dtype {dtype} ({low} … {high}); it is "
            "in stored units"
        )
