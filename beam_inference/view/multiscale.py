"""OME-Zarr groups as Neuroglancer reads them: all scales of an image, aligned to one array.

Neuroglancer takes a translation for the place of a voxel's centre, as OME-Zarr has it. Here the
corner of the first voxel of the array that is read lies at its coordinates, see
:mod:`beam_inference.geometry.origin`; other scales lie relative to that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.volumes.detection import json_object, volume_at
from beam_inference.volumes.kvstores import open_kvstore
from beam_inference.volumes.ome_zarr import transformation_of

_METRES = {
    **{
        "meter": 1.0,
        "millimeter": 1e-3,
        "micrometer": 1e-6,
        "nanometer": 1e-9,
        "angstrom": 1e-10,
        "picometer": 1e-12,
    },
    **{"second": 1.0, "millisecond": 1e-3, "microsecond": 1e-6, "minute": 60.0, "hour": 3600.0},
}
"""Neuroglancer's units by their names in OME-Zarr; it refuses a group with other units."""
_VERSIONS = ("0.4", "0.5")
_TRANSFORMATIONS = ("scale", "translation", "identity")


@dataclass(frozen=True, slots=True)
class Scales:
    """All scales of an image.

    Attributes:
        path: of the array that is meant, in the group.
        voxels: what Neuroglancer takes its voxels' sides for, along each of its axes, in metres, or
            in the axis's unit.
        shifts: how far it puts the corner of the array's index zero before 0 along each, in voxels.
    """

    path: str
    voxels: Sequence[float]
    shifts: Sequence[float]


def scales_at(url: str, array_url: str, storage: Storage) -> Scales | None:
    """Read the group at a URL, which has a given array; None if Neuroglancer cannot read it.

    Raises:
        VolumeError: its metadata are damaged, or the store does not answer.
    """
    stored = None if "|" in url or "://" not in url else volume_at(url, storage)
    if stored is None or not stored.is_group:
        return None
    store = open_kvstore(url, storage)
    if stored.driver == "ome_zarr":
        group = json_object(store, "zarr.json", url)["attributes"].get("ome", {})
    else:
        group = json_object(store, ".zattrs", url)
    image = (group.get("multiscales") or [{}])[0]
    version = group.get("version") if stored.driver == "ome_zarr" else image.get("version")
    if version not in _VERSIONS:
        return None
    try:
        return _scales(image, array_url)
    except (KeyError, TypeError, ValueError):  # what a specification does not have
        return None


def _scales(image: Json, array_url: str) -> Scales | None:
    """Compute scales as Neuroglancer does; raises KeyError and the like where it would complain."""
    units = np.array([_METRES[axis["unit"]] if "unit" in axis else 1.0 for axis in image["axes"]])
    whole = image.get("coordinateTransformations", [])
    datasets = image["datasets"]
    stated = [*whole, *(each for one in datasets for each in one["coordinateTransformations"])]
    if any(each["type"] not in _TRANSFORMATIONS for each in stated):
        return None
    dataset = next((one for one in datasets if array_url.endswith(f"/{one['path']}")), None)
    if dataset is None:
        return None
    placed = transformation_of(dataset, image, len(units))
    scale = np.array(placed.scale, float)
    translation = np.array(placed.translation, float)
    return Scales(dataset["path"], (scale * units).tolist(), (0.5 - translation / scale).tolist())


def with_draft_version(text: bytes) -> bytes:
    """Add OME-Zarr 0.5 to a zarr.json as its last draft, which Neuroglancer before 2.41 reads."""
    try:
        group = parse_json(text)
        image = group["attributes"]["ome"]
        drafted = [
            {**each, "version": "0.5-dev"}
            for each in image["multiscales"]
            if image["version"] == "0.5"
        ]
    except (ValueError, KeyError, TypeError):  # an array's, or damaged
        return text
    group["attributes"].setdefault("multiscales", drafted)
    return json.dumps(group).encode()
