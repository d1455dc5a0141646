"""Metadata of OME-Zarr: groups of arrays that are one image at several scales.

Version 0.4 is of zarr v2 arrays, 0.5 of zarr v3 ones.

Specification: https://ngff.openmicroscopy.org, "multiscales" metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from beam_inference.config.fields import Json
from beam_inference.errors import VolumeError

NM_PER_UNIT = {
    **dict.fromkeys(("nm", "nanometer", "nanometers", "nanometre"), 1.0),
    **dict.fromkeys(
        ("um", "µm", "μm", "micron", "microns", "micrometer", "micrometers", "micrometre"), 1e3
    ),
    **dict.fromkeys(("mm", "millimeter", "millimeters", "millimetre"), 1e6),
    **dict.fromkeys(("m", "meter", "meters", "metre"), 1e9),
    **dict.fromkeys(("angstrom", "angstroms", "Å"), 0.1),
    **dict.fromkeys(("pm", "picometer", "picometre"), 1e-3),
}
"""Nanometres of a unit of length, by the names that volumes give it."""


class GroupScale(NamedTuple):
    """An array of a group.

    Attributes:
        path: its path in the group.
        axes: names of its axes.
        voxel_size_nm: its voxel size along each; None where it is not known.
    """

    path: str
    axes: list[str]
    voxel_size_nm: list[float | None]


def scales_of_group(attributes: Json, url: str) -> list[GroupScale]:
    """The arrays that a group's attributes describe, the finest first; none if it is no image.

    Raises:
        VolumeError: the metadata are there, and damaged.
    """
    image = attributes.get("ome", attributes)
    multiscales = image.get("multiscales") if isinstance(image, dict) else None
    if not multiscales:
        return []
    try:
        first = multiscales[0]
        # Version 0.3 knew axes by their names alone.
        axes = [{"name": axis} if isinstance(axis, str) else axis for axis in first["axes"]]
        whole = _scale(first, len(axes))
        return [
            GroupScale(
                dataset["path"],
                [str(axis["name"]) for axis in axes],
                [
                    a * b * NM_PER_UNIT[axis["unit"]] if axis.get("unit") in NM_PER_UNIT else None
                    for axis, a, b in zip(axes, _scale(dataset, len(axes)), whole, strict=True)
                ],
            )
            for dataset in first["datasets"]
        ]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise VolumeError(
            f"{url} says it is an OME-Zarr image, but its multiscales cannot be understood: "
            f"{error!r}"
        ) from None


def _scale(transformed: Json, count: int) -> list[float]:
    transformations = transformed.get("coordinateTransformations") or []
    return next(
        (each["scale"] for each in transformations if each["type"] == "scale"), [1.0] * count
    )


def attributes(
    version: str,
    name: str,
    scales: Sequence[tuple[str, tuple[float, float, float], tuple[float, float, float]]],
    *,
    labels: bool = False,
) -> Json:
    """The attributes of a group of arrays (c, z, y, x), version "0.4" or "0.5".

    ``scales`` are paths with the voxel size, and the position of the first voxel's centre relative
    to the finest scale's, both ZYX in nm. ``labels`` says that values are names of objects.
    """
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}]
    axes += [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    datasets = [
        {
            "path": path,
            "coordinateTransformations": [
                {"type": "scale", "scale": [1.0, *size]},
                *([{"type": "translation", "translation": [0.0, *shift]}] if any(shift) else []),
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
