"""Metadata of OME-Zarr: groups of arrays that are one image at several scales.

Version 0.4 is of zarr v2 arrays, 0.5 of zarr v3 ones.

A voxel lies at its centre there, and elsewhere here it begins at its coordinates. The two agree if
the finest scale's first voxel begins at its translation: then a scale that is f times as coarse has
(f - 1) / 2 voxels of the finest more translation where it begins at the same place.

Specification: https://ngff.openmicroscopy.org, "multiscales" metadata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import Json
from beam_inference.errors import VolumeError
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.origin import AT_ZERO, NO_REST, Origin, Rest, origin_at
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

NM_PER_UNIT = {
    **dict.fromkeys(("nm", "nanometer", "nanometers", "nanometre"), 1.0),
    **dict.fromkeys(
        ("um", "µm", "μm", "micron", "microns", "micrometer", "micrometers", "micrometre"), 1e3
    ),
    **dict.fromkeys(("mm", "millimeter", "millimeters", "millimetre"), 1e6),
    **dict.fromkeys(("cm", "centimeter", "centimeters", "centimetre"), 1e7),
    **dict.fromkeys(("dm", "decimeter", "decimeters", "decimetre"), 1e8),
    **dict.fromkeys(("m", "meter", "meters", "metre"), 1e9),
    **dict.fromkeys(("inch", "inches", "in", '"'), 2.54e7),
    **dict.fromkeys(("thou", "mil"), 2.54e4),
    **dict.fromkeys(("angstrom", "angstroms", "Å"), 0.1),
    **dict.fromkeys(("pm", "picometer", "picometre"), 1e-3),
}
"""Nanometres of a unit of length, by the names that volumes give it."""


_MOST_DATASETS = 1000
"""Arrays that an image may list: each is looked at."""

_MOST_AXES = 32
"""Axes that TensorStore's arrays may have."""


class GroupScale(NamedTuple):
    """An array of a group.

    Attributes:
        path: its path in the group.
        axes: names of its axes.
        voxel_size_nm: its voxel size along each; None where it is not known.
        origin: where its index zero lies.
    """

    path: str
    axes: list[str]
    voxel_size_nm: list[float | None]
    origin: Origin = AT_ZERO


class Transformation(NamedTuple):
    """A scale and, after it, a translation along each axis, in the axes' units."""

    scale: list[float]
    translation: list[float]


def scales_of_group(attributes: Json, url: str) -> list[GroupScale]:
    """The arrays that a group's attributes describe, the finest first; none if it is no image.

    Raises:
        VolumeError: the metadata are there, and damaged.
    """
    if not isinstance(attributes, dict):
        raise VolumeError(f"the attributes of the group {url} are no JSON object: they are damaged")
    image = attributes.get("ome", attributes)
    multiscales = image.get("multiscales") if isinstance(image, dict) else None
    if not multiscales:
        return []
    try:
        return _scales_of_image(multiscales[0])
    except (
        KeyError,
        TypeError,
        IndexError,
        ValueError,
        AttributeError,
        OverflowError,
    ) as error:
        raise VolumeError(
            f"{url} says it is an OME-Zarr image, but its multiscales cannot be understood: "
            f"{describe_error(error, with_type=not isinstance(error, ValueError))}"
        ) from None


def _scales_of_image(image: Json) -> list[GroupScale]:
    # Version 0.3 knew axes by their names alone.
    axes = [{"name": axis} if isinstance(axis, str) else axis for axis in image["axes"]]
    names = [str(axis["name"]) for axis in axes]
    if len(image["datasets"]) > _MOST_DATASETS:
        raise ValueError(f"it lists {len(image['datasets'])} arrays, more than {_MOST_DATASETS}")
    placed = [transformation_of(dataset, image, len(axes)) for dataset in image["datasets"]]
    origins = _origins(names, placed)
    return [
        GroupScale(
            _path_inside(dataset["path"]),
            names,
            [
                _size_nm(axis, size) if _is_transformed(dataset, image) else None
                for axis, size in zip(axes, each.scale, strict=True)
            ],
            origin,
        )
        for dataset, each, origin in zip(image["datasets"], placed, origins, strict=True)
    ]


def _is_transformed(dataset: Json, image: Json) -> bool:
    """Whether anything says how large an array's voxels are: nothing means that nobody knows."""
    key = "coordinateTransformations"
    return bool(dataset.get(key) or image.get(key))


def _size_nm(axis: Json, size: float) -> float | None:
    """The voxel size along an axis; None where its unit is no length."""
    if axis.get("unit") not in NM_PER_UNIT:
        return None
    size_nm = float(size * NM_PER_UNIT[axis["unit"]])
    if not (size_nm > 0 and math.isfinite(size_nm)):
        raise ValueError(f"the axis {axis['name']} has the scale {size}; expected one above 0")
    return size_nm


def _path_inside(path: object) -> str:
    """The path of an array in its group. Raises ValueError if it may lead anywhere else.

    It becomes a part of a URL, in which a percent sign would stand for another character, and a bar
    for another kind of store.
    """
    parts = path.split("/") if isinstance(path, str) else []
    is_plain = str(path).isprintable() and not set("%?#\\|").intersection(str(path))
    if not parts or {"", ".", ".."}.intersection(parts) or not is_plain:
        raise ValueError(f"the path of an array must lie inside the group; found {path}")
    return "/".join(parts)


def transformation_of(dataset: Json, image: Json, count: int) -> Transformation:
    """Compose an array's transformations with those of all arrays of its image.

    Args:
        dataset: the array's entry.
        image: the entry of the image, in the list of multiscales.
        count: number of axes.

    Raises:
        KeyError, TypeError, ValueError: they are damaged.
    """
    if count > _MOST_AXES:
        raise ValueError(f"it has {count} axes, more than {_MOST_AXES}")
    whole = Transformation([1.0] * count, [0.0] * count)
    for entry in (
        *(dataset.get("coordinateTransformations") or []),
        *(image.get("coordinateTransformations") or []),
    ):
        each = _transformation(entry, count)
        whole = Transformation(
            [a * b for a, b in zip(whole.scale, each.scale, strict=True)],
            [
                a * b + c
                for a, b, c in zip(whole.translation, each.scale, each.translation, strict=True)
            ],
        )
    return whole


def _transformation(entry: Json, count: int) -> Transformation:
    """One transformation as scale and translation. Raises ValueError if it is no such thing."""
    kind = entry["type"]
    if kind not in ("identity", "scale", "translation", "affine"):
        raise ValueError(
            f"a coordinate transformation is of the type {kind!r}; expected scale, translation or "
            "identity. To take the voxels as they are stored, without any, open one of its arrays "
            "by its own path"
        )
    matrix = np.eye(count, count + 1)
    if kind == "scale":
        matrix[:, :count] = np.diag(_numbers(entry["scale"], (count,)))
    elif kind == "translation":
        matrix[:, count] = _numbers(entry["translation"], (count,))
    elif kind == "affine":
        matrix = _numbers(entry["affine"], (count, count + 1))
        if np.any(matrix[:, :count] != np.diag(np.diag(matrix))):
            raise ValueError(
                "an affine coordinate transformation turns or shears the axes, which a voxel size "
                "and an offset cannot say. To take the voxels as they are stored, open one of its "
                "arrays by its own path"
            )
    return Transformation(np.diag(matrix).tolist(), matrix[:, count].tolist())


def _numbers(values: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Numbers of a JSON list. Raises ValueError if they are none, or not as many."""
    array = np.array(values)
    if array.dtype.kind not in "iuf" or array.shape != shape:
        raise ValueError(f"expected numbers of the shape {shape}, found {values!r}")
    return array.astype(np.float64)


def _origins(names: Sequence[str], placed: Sequence[Transformation]) -> list[Origin]:
    """Where index zero of each scale lies; at 0 on axes along which no scale has a translation."""
    axes = {name.lower(): axis for axis, name in enumerate(names)}
    stated = [
        axis if axis is not None and any(each.translation[axis] for each in placed) else None
        for axis in (axes.get(name) for name in "zyx")
    ]
    return [
        origin_at([0.0 if axis is None else _position(each, placed[0], axis) for axis in stated])
        for each in placed
    ]


def _position(scale: Transformation, finest: Transformation, axis: int) -> float:
    """Where a scale begins on an axis, in its own voxels."""
    size = scale.scale[axis]
    if not (size > 0 and math.isfinite(size)):
        raise ValueError(f"a translation needs a scale greater than 0, found {size}")
    # In this order a translation of whole voxels gives a whole number, to the last bits.
    return scale.translation[axis] / size - (1 - finest.scale[axis] / size) / 2


def translation_nm(start: Zyx, voxel_size_nm: VoxelSizeNm, rest: Rest = NO_REST) -> VoxelSizeNm:
    """The translation of a new finest scale, ZYX in nm, whose first voxel is ``start``."""
    z, y, x = ((n + part) * size for n, part, size in zip(start, rest, voxel_size_nm, strict=True))
    return (z, y, x)


def attributes(
    version: str,
    name: str,
    scales: Sequence[tuple[str, tuple[float, float, float], tuple[float, float, float]]],
    *,
    labels: bool = False,
    has_channels: bool = True,
) -> Json:
    """The attributes of a group of arrays (c, z, y, x) or (z, y, x), version "0.4" or "0.5".

    ``scales`` are paths with the voxel size and the translation, both ZYX in nm. ``labels`` says
    that values are names of objects, ``has_channels`` that arrays have an axis of channels.
    """
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}] if has_channels else []
    axes += [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    datasets = [
        {
            "path": path,
            "coordinateTransformations": [
                {"type": "scale", "scale": [1.0, *size][-len(axes) :]},
                *(
                    [{"type": "translation", "translation": [0.0, *shift][-len(axes) :]}]
                    if any(shift)
                    else []
                ),
            ],
        }
        for path, size, shift in scales
    ]
    image = {"name": name, "axes": axes, "datasets": datasets}
    if version == "0.4":
        kind = {"image-label": {"version": "0.4"}} if labels else {}
        return {"multiscales": [{"version": "0.4", **image}], **kind}
    return {
        "ome": {
            "version": "0.5",
            "multiscales": [image],
            **({"image-label": {}} if labels else {}),
        }
    }
