"""Scales of OME-Zarr groups: their entries in the multiscales, and how a new array is created.

Specification: https://ngff.openmicroscopy.org, versions 0.4 (zarr v2) and 0.5 (zarr v3). A voxel
lies at its centre there, so the first voxel of a scale that is f times as coarse lies (f - 1) / 2
voxels of the base further than where it begins: each entry has that translation beside its scale.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.origin import Origin
from beam_inference.geometry.zyx import Zyx
from beam_inference.pyramid.scale_geometry import PyramidScale
from beam_inference.volumes import ome_zarr
from beam_inference.volumes.detection import StoredVolume, json_object
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    kvstore_spec,
    one_line,
    open_kvstore,
    open_with,
)
from beam_inference.volumes.opening import as_volume
from beam_inference.volumes.volume import Volume


def read_ome_codec(url: str, storage: Storage, stored: StoredVolume, base_number: int) -> OmeCodec:
    """Read the metadata of a group, which ``stored`` describes, one of whose arrays is the base."""
    store = open_kvstore(url, storage)
    is_v3 = stored.driver == "ome_zarr"
    metadata = json_object(store, "zarr.json" if is_v3 else ".zattrs", url)
    group = metadata.get("attributes", {}) if is_v3 else metadata
    dataset = _image(group)["datasets"][base_number]
    files = ("zarr.json",) if is_v3 else (".zarray", ".zattrs")
    array = {file: json_object(store, f"{dataset['path']}/{file}", url) for file in files}
    scale = stored.scales[base_number].group_scale
    assert scale is not None  # a group describes its arrays
    return OmeCodec(
        json.dumps({"dataset": dataset, "axes": scale.axes, "array": array}, sort_keys=True),
        scale.origin,
    )


@dataclass(frozen=True)
class OmeCodec:
    """Entries of the multiscales; see :class:`~beam_inference.pyramid.multiscale.ScaleCodec`.

    Attributes:
        base: JSON text of the base's entry in the group, the names of its axes, and the metadata
            files of its array.
        origin: where the base's index zero lies.
    """

    base: str
    origin: Origin

    @property
    def metadata_file(self) -> str:
        """Key of the file that lists the scales."""
        return "zarr.json" if self._is_v3 else ".zattrs"

    @property
    def stale_files(self) -> Sequence[str]:
        """Keys of the consolidated metadata; those of version 3 are in the metadata file."""
        return () if self._is_v3 else (".zmetadata",)

    def description(self) -> Json:
        """The base, as JSON values."""
        return {"base": json.loads(self.base)}

    def holds_labels(self, metadata: Json) -> bool:
        """Whether the group says that it is an image of labels."""
        group = self._group(metadata)
        return "image-label" in group.get("ome", group)

    def entries(self, metadata: Json) -> list[Json]:
        """Entries of the scales that are listed, finest first."""
        datasets: list[Json] = _image(self._group(metadata))["datasets"]
        return datasets

    def with_entries(self, metadata: Json, entries: list[Json]) -> Json:
        """Metadata that list other entries, without consolidated metadata, which would be stale."""
        changed = copy.deepcopy(metadata)
        if self._is_v3:
            changed.pop("consolidated_metadata", None)
        _image(self._group(changed))["datasets"] = entries
        return changed

    def new_entry(self, scale: PyramidScale) -> Json:
        """Entry of a new scale, with its path, scale and translation."""
        base = json.loads(self.base)["dataset"]
        total = np.array(self._along_axes(scale.total, 1), float)
        size = np.array(_transformation(base, "scale", [1.0] * len(total)))
        position = np.array(_transformation(base, "translation", [0.0] * len(total)))
        translation = position + (self._steps_from_base(scale) + (total - 1) / 2) * size
        # The base's name is a number, or ends with one: 0, s0, scale0.
        stem, digits = re.fullmatch(r"(.*?)(\d*)", base["path"]).groups()  # type: ignore[union-attr]
        return {
            "path": f"{stem}{int(digits) + scale.number}" if digits else f"{stem}-{scale.number}",
            "coordinateTransformations": [
                {"type": "scale", "scale": (size * total).tolist()},
                {"type": "translation", "translation": translation.tolist()},
            ],
        }

    def _steps_from_base(self, scale: PyramidScale) -> Any:
        """Voxels of the base by which a scale begins after it, along each of the array's axes.

        There are fewer than none where the scale's first voxel covers more than the base has.
        """
        start = zyx.multiply(scale.bounds.start, scale.total)
        return np.array(self._along_axes(zyx.subtract(start, self.origin.voxel), 0), float)

    def folder(self, entry: Json) -> str:
        """Folder of a scale, relative to the group."""
        return str(entry["path"])

    def voxel_volume(self, entry: Json) -> float:
        """Volume of a scale's voxels, in the units of the group's axes."""
        return float(np.prod(_transformation(entry, "scale", [1.0])))

    def is_same(self, entry: Json, other: Json) -> bool:
        """Whether two scales have one path, or voxels of one size."""
        ours = _transformation(entry, "scale", [])
        theirs = _transformation(other, "scale", [])
        return entry["path"] == other["path"] or (
            len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=1e-6, atol=0)
        )

    def block_shape(
        self,
        url: str,  # noqa: ARG002
        storage: Storage,  # noqa: ARG002
        scale: PyramidScale,  # noqa: ARG002
        base: Volume,
    ) -> Zyx:
        """Write unit of the storage in the base, ZYX, which new scales share."""
        return base.block_shape

    def open_scale(self, url: str, storage: Storage, scale: PyramidScale) -> Volume:
        """Open a new scale; its array is created with the base's metadata, but for shape and units.

        Raises:
            VolumeError: it cannot be created, or another array is there.
        """
        entry = self.new_entry(scale)
        array_url = f"{url.rstrip('/')}/{entry['path']}"
        files = self._array_files(scale)
        spec = {
            "driver": "zarr3" if self._is_v3 else "zarr",
            "kvstore": kvstore_spec(array_url, storage),
            "metadata": files["zarr.json" if self._is_v3 else ".zarray"],
            # as in outputs: a block is absent only if no chunk was written
            "store_data_equal_to_fill_value": True,
        }
        try:
            if files.get(".zattrs"):
                attributes = json.dumps(files[".zattrs"])
                writing = open_kvstore(array_url, storage).write(".zattrs", attributes)
                writing.result(timeout=PATIENCE_SECONDS)
            store = open_with(
                lambda context: ts.open(spec, open=True, create=True, context=context), storage
            )
        except (ValueError, OSError) as error:
            raise VolumeError(f"cannot write the scale {array_url}: {one_line(error)}") from None
        axes = json.loads(self.base)["axes"]
        sizes = self._voxel_size(url, storage, scale)
        z, y, x = (part / total for part, total in zip(self.origin.rest, scale.total, strict=True))
        return as_volume(
            array_url, store, ome_zarr.GroupScale(entry["path"], axes, sizes)
        ).place_at(Origin(scale.bounds.start, (z, y, x)))

    def _array_files(self, scale: PyramidScale) -> dict[str, Json]:
        """The metadata files of a new array, by name."""
        files: dict[str, Json] = json.loads(self.base)["array"]
        factors = self._along_axes(scale.total, 1)
        for metadata in files.values():
            attributes = metadata if "shape" not in metadata else metadata.get("attributes", {})
            units = attributes.get("dimension_units")
            if isinstance(units, list) and len(units) == len(factors):
                attributes["dimension_units"] = [
                    _enlarge_unit(unit, f) for unit, f in zip(units, factors, strict=True)
                ]
        main = files["zarr.json" if self._is_v3 else ".zarray"]
        shape = self._along_axes(scale.bounds.shape, None)
        main["shape"] = [
            old if new is None else new for old, new in zip(main["shape"], shape, strict=True)
        ]
        return files

    def _voxel_size(self, url: str, storage: Storage, scale: PyramidScale) -> list[float | None]:
        """Voxel size along each of the array's axes, nm, as far as the group says it."""
        metadata = json_object(open_kvstore(url, storage), self.metadata_file, url)
        listed = ome_zarr.scales_of_group(self._group(metadata), url)
        path = json.loads(self.base)["dataset"]["path"]
        base = next(
            listed_scale.voxel_size_nm for listed_scale in listed if listed_scale.path == path
        )
        factors = self._along_axes(scale.total, 1)
        return [
            None if size is None else size * factor
            for size, factor in zip(base, factors, strict=True)
        ]

    @property
    def _is_v3(self) -> bool:
        return "zarr.json" in json.loads(self.base)["array"]

    def _group(self, metadata: Json) -> Json:
        """The group's attributes in its metadata file."""
        if not self._is_v3:
            return metadata
        attributes = metadata.get("attributes")
        return attributes if isinstance(attributes, dict) else {}

    def _along_axes(self, values: Zyx, other: Any) -> list[Any]:
        """Values of z, y and x in the order of the array's axes, and ``other`` for further ones."""
        by_axis = dict(zip("zyx", values, strict=True))
        return [by_axis.get(axis.lower(), other) for axis in json.loads(self.base)["axes"]]


def _image(group: Json) -> Json:
    image: Json = group.get("ome", group)["multiscales"][0]
    return image


def _transformation(dataset: Json, kind: str, otherwise: list[float]) -> list[float]:
    for transformation in dataset.get("coordinateTransformations") or []:
        if transformation["type"] == kind:
            values: list[float] = transformation[kind]
            return values
    return otherwise


def _enlarge_unit(unit: object, factor: int) -> object:
    """Multiply a unit of TensorStore, such as "4 nm"."""
    if not isinstance(unit, str) or factor == 1:
        return unit
    parsed = ts.Unit(unit)
    return f"{parsed.multiplier * factor:.9g} {parsed.base_unit}"
