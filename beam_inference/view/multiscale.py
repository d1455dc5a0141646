"""OME-Zarr groups as Neuroglancer reads them: all scales of an image, aligned to one array.

Neuroglancer takes a translation for the place of a voxel's centre, as OME-Zarr has it. For a job,
and for its masks, the corner of voxel 0 of the array that is read lies at 0, whatever its group
says; other scales lie relative to that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.volumes.detection import json_object, volume_at
from beam_inference.volumes.kvstores import open_kvstore

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


@dataclass(frozen=True, slots=True)
class Scales:
    """All scales of an image.

    Attributes:
        path: of the array that is meant, in the group.
        voxels: what Neuroglancer takes its voxels' sides for, along each of its axes, in metres, or
            in the axis's unit.
        shifts: how far it puts the corner of voxel 0 before 0 along each, in voxels.
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
    placed = {
        each["path"]: _compose([*each["coordinateTransformations"], *whole])
        for each in image["datasets"]
    }
    path = next((path for path in placed if array_url.endswith(f"/{path}")), None)
    if path is None:
        return None
    scale, translation = (np.broadcast_to(values, units.shape) for values in placed[path])
    return Scales(path, (scale * units).tolist(), (0.5 - translation / scale).tolist())


def _compose(transformations: Sequence[Json]) -> tuple[Any, Any]:
    """Compose transformations: scale and translation along each axis."""
    scale: Any = np.float64(1)
    translation: Any = np.float64(0)
    for each in transformations:
        if each["type"] == "scale":
            factors = np.array(each["scale"], float)
            scale = scale * factors
            translation = translation * factors
        elif each["type"] == "translation":
            translation = translation + np.array(each["translation"], float)
        elif each["type"] != "identity":
            raise KeyError(each["type"])
    return scale, translation


def with_draft_version(text: bytes) -> bytes:
    """Add OME-Zarr 0.5 to a zarr.json as its last draft, which Neuroglancer before 2.41 reads."""
    try:
        group = json.loads(text)
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
