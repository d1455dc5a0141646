"""OME-Zarr groups of several scales: making an array, and naming it in the group's multiscales once it is there.

Specification: https://ngff.openmicroscopy.org, versions 0.4 (zarr v2) and 0.5 (zarr v3). A voxel
    lies at its centre there, so the first voxel of a level that is f times as coarse lies (f - 1) /
    2 voxels of the base into the volume: each level has that translation beside its scale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import Zyx
from beam_inference.pyramid.levels import Level
from beam_inference.volumes import ome_zarr
from beam_inference.volumes.detection import StoredVolume, json_object
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    change_json,
    delete_folder,
    kvstore_spec,
    one_line,
    open_kvstore,
    opened,
    persistently,
)
from beam_inference.volumes.opening import as_volume, open_volume
from beam_inference.volumes.volume import Volume


def ome_scales(url: str, storage: Storage, found: StoredVolume, scale: int) -> OmeScales:
    """The group at a URL, of which ``found`` tells, with one of its arrays as the base."""
    store = open_kvstore(url, storage)
    is_v3 = found.driver == "ome_zarr"
    group = (
        json_object(store, "zarr.json", url).get("attributes", {})
        if is_v3
        else json_object(store, ".zattrs", url)
    )
    dataset = _image(group)["datasets"][scale]
    path = dataset["path"]
    files = ("zarr.json",) if is_v3 else (".zarray", ".zattrs")
    array = {file: json_object(store, f"{path}/{file}", url) for file in files}
    level = found.scales[scale].level
    assert level is not None  # a group describes its arrays
    return OmeScales(
        url,
        storage,
        json.dumps({"dataset": dataset, "axes": level.axes, "array": array}, sort_keys=True),
        scale,
    )


@dataclass(frozen=True)
class OmeScales:
    """An OME-Zarr group.

    Attributes:
        url: where it lies.
        storage: how that is reached.
        base: as JSON text, the base's entry in the group, the names of its axes, and the metadata
            files of its array.
        scale: number of the base in the group.
    """

    url: str
    storage: Storage
    base: str
    scale: int

    @property
    def holds_labels(self) -> bool:
        """Whether the group says that it is an image of labels."""
        return holds_labels(self._group())

    def description(self) -> dict[str, Any]:
        """Of the base."""
        return {"base": json.loads(self.base)}

    def open_base(self) -> Volume:
        """The base, as any input is opened."""
        return open_volume(self.url, scale=self.scale, storage=self.storage)

    def block_shape(self, level: Level) -> Zyx:  # noqa: ARG002
        """The base's."""
        return self.open_base().block_shape

    def open_level(self, level: Level) -> Volume:
        """A level; its array is created with the metadata of the base's, but for its shape and units.

        Raises:
            VolumeError: it cannot be, or another array is there.
        """
        entry = self._entry(level)
        base = json.loads(self.base)
        url = f"{self.url.rstrip('/')}/{entry['path']}"
        files = base["array"]
        factors = self._along_axes(level.total, 1)
        for metadata in files.values():
            attributes = metadata if "shape" not in metadata else metadata.get("attributes", {})
            units = attributes.get("dimension_units")
            if isinstance(units, list) and len(units) == len(factors):
                attributes["dimension_units"] = [
                    _times(unit, f) for unit, f in zip(units, factors, strict=True)
                ]
        main = files["zarr.json" if self._is_v3 else ".zarray"]
        places = self._along_axes(level.bounds.stop, None)
        main["shape"] = [
            n if place is None else place for n, place in zip(main["shape"], places, strict=True)
        ]
        spec = {
            "driver": "zarr3" if self._is_v3 else "zarr",
            "kvstore": kvstore_spec(url, self.storage),
            "metadata": main,
            # as in outputs: a block is absent only if no chunk was written
            "store_data_equal_to_fill_value": True,
        }
        try:
            if files.get(".zattrs"):
                open_kvstore(url, self.storage).write(
                    ".zattrs", json.dumps(files[".zattrs"])
                ).result()
            store = opened(
                lambda context: ts.open(spec, open=True, create=True, context=context),
                self.storage,
            )
        except (ValueError, OSError) as error:
            raise VolumeError(f"cannot write the level {url}: {one_line(error)}") from None
        axes = base["axes"]
        sizes = self.open_base_sizes(level)
        return as_volume(url, store, ome_zarr.Level(entry["path"], axes, sizes))

    def open_base_sizes(self, level: Level) -> list[float | None]:
        """Voxel size of a level along each of its array's axes, nm, as far as the group says it."""
        described = ome_zarr.levels(self._group(), self.url)
        path = json.loads(self.base)["dataset"]["path"]
        sizes = next(each.voxel_size_nm for each in described if each.path == path)
        return [
            None if a is None else a * f
            for a, f in zip(sizes, self._along_axes(level.total, 1), strict=True)
        ]

    def listed(self, levels: Sequence[Level]) -> list[Level]:
        """By their path, or by their scale."""
        there = _image(self._group())["datasets"]
        return [level for level in levels if any(_same(self._entry(level), each) for each in there)]

    def list_levels(self, levels: Sequence[Level]) -> None:
        """Insert them before the first array of larger voxels; the group's consolidated metadata, now stale, go."""

        def listing(group: dict[str, Any]) -> dict[str, Any]:
            datasets = _image(group)["datasets"]
            for entry in map(self._entry, levels):
                if not any(_same(entry, each) for each in datasets):
                    larger = (k for k, each in enumerate(datasets) if _voxel(each) > _voxel(entry))
                    datasets.insert(next(larger, len(datasets)), entry)
            return group

        self._change(listing)

    def remove(self, levels: Sequence[Level]) -> None:
        """Also of the same scale and another path."""
        entries = [self._entry(level) for level in levels]
        paths = {entry["path"] for entry in entries}  # also of what was begun, and never listed

        def without(group: dict[str, Any]) -> dict[str, Any]:
            image = _image(group)
            gone = [
                each for each in image["datasets"] if any(_same(entry, each) for entry in entries)
            ]
            image["datasets"] = [each for each in image["datasets"] if each not in gone]
            paths.update(each["path"] for each in gone)
            return group

        self._change(without)
        for path in paths:
            delete_folder(open_kvstore(self.url, self.storage), self.url, f"{path}/")

    @property
    def _is_v3(self) -> bool:
        return "zarr.json" in json.loads(self.base)["array"]

    def _group(self) -> dict[str, Any]:
        """The group's attributes."""
        store = open_kvstore(self.url, self.storage)
        if self._is_v3:
            attributes = json_object(store, "zarr.json", self.url).get("attributes")
            return attributes if isinstance(attributes, dict) else {}
        return json_object(store, ".zattrs", self.url)

    def _change(self, change: Any) -> None:
        """Change the group's attributes."""
        store = open_kvstore(self.url, self.storage)
        if not self._is_v3:

            def forget() -> None:
                store.write(".zmetadata", None).result(timeout=PATIENCE_SECONDS)

            persistently("delete", f"{self.url}/.zmetadata", forget)
            change_json(store, ".zattrs", self.url, change)
            return

        def of_file(file: dict[str, Any]) -> dict[str, Any]:
            kept = {key: value for key, value in file.items() if key != "consolidated_metadata"}
            return {**kept, "attributes": change(file["attributes"])}

        change_json(store, "zarr.json", self.url, of_file)

    def _entry(self, level: Level) -> dict[str, Any]:
        """The level's entry in the group."""
        base = json.loads(self.base)["dataset"]
        total = np.array(self._along_axes(level.total, 1), float)
        scale = np.array(_transformation(base, "scale", [1.0] * len(total)))
        translation = (
            np.array(_transformation(base, "translation", [0.0] * len(total)))
            + (total - 1) / 2 * scale
        )
        # The base's name is a number, or ends with one: 0, s0, scale0.
        stem, digits = re.fullmatch(r"(.*?)(\d*)", base["path"]).groups()  # type: ignore[union-attr]
        return {
            "path": f"{stem}{int(digits) + level.number}" if digits else f"{stem}-{level.number}",
            "coordinateTransformations": [
                {"type": "scale", "scale": (scale * total).tolist()},
                {"type": "translation", "translation": translation.tolist()},
            ],
        }

    def _along_axes(self, values: Zyx, other: Any) -> list[Any]:
        """Values of z, y and x, in the order of the array's axes, and ``other`` for further ones."""
        place = dict(zip("zyx", values, strict=True))
        return [place.get(axis.lower(), other) for axis in json.loads(self.base)["axes"]]


def holds_labels(group: dict[str, Any]) -> bool:
    """Whether a group's attributes say that it is an image of labels."""
    return "image-label" in group.get("ome", group)


def _image(group: dict[str, Any]) -> dict[str, Any]:
    image: dict[str, Any] = group.get("ome", group)["multiscales"][0]
    return image


def _transformation(dataset: dict[str, Any], kind: str, otherwise: list[float]) -> list[float]:
    found = (
        each[kind]
        for each in dataset.get("coordinateTransformations") or []
        if each["type"] == kind
    )
    return next(found, otherwise)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    ours, theirs = (_transformation(each, "scale", []) for each in (one, other))
    return one["path"] == other["path"] or (
        len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=1e-6, atol=0)
    )


def _voxel(dataset: dict[str, Any]) -> float:
    return float(np.prod(_transformation(dataset, "scale", [1.0])))


def _times(unit: Any, factor: int) -> Any:
    """A unit of TensorStore's, such as "4 nm", so much larger."""
    if not isinstance(unit, str) or factor == 1:
        return unit
    parsed = ts.Unit(unit)
    return f"{parsed.multiplier * factor:.9g} {parsed.base_unit}"
