"""What lies at a URL: a volume of which driver, and at which scales."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from itertools import islice

from beam_inference.config.fields import Json
from beam_inference.config.formats import installed_formats
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.volumes.groups import list_volumes
from beam_inference.volumes.kvstores import (
    LOCAL,
    KvStore,
    kvstore_spec,
    local_folder,
    open_kvstore,
    read_key,
)
from beam_inference.volumes.ome_zarr import GroupScale, scales_of_group

_PRECEDENCE = ("info", "zarr.json", ".zarray", ".zgroup", "attributes.json")
"""Files by which volumes are recognised; of several in a folder, the first in this order counts."""

_MOST_SCALES = 256
"""Each halves at least one axis, of which there are three, of at most 64 bits."""


@dataclass(frozen=True, slots=True)
class Scale:
    """One scale of a volume.

    Attributes:
        spec: what TensorStore opens, but for its own settings.
        group_scale: entry of an OME-Zarr group that describes it; None where the array describes
            itself.
        voxel_size_nm: ZYX; None for a volume of one scale, which states it where it is opened.
    """

    spec: Json
    group_scale: GroupScale | None
    voxel_size_nm: tuple[float | None, ...] | None


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """A volume that lies at a URL.

    Attributes:
        driver: TensorStore's name of it, or "ome_zarr" (0.5), "ome_zarr_0.4" for a group of arrays.
        scales: at least one, the finest first.
    """

    driver: str
    scales: list[Scale]

    @property
    def is_multiscale(self) -> bool:
        """Whether it has a place for coarser scales."""
        return any(each.is_multiscale for each in installed_formats() if each.kind == self.driver)

    @property
    def is_group(self) -> bool:
        """Whether it is a group of arrays."""
        return any(each.group == self.driver for each in installed_formats())


@cache
def _drivers_by_marker() -> dict[str, str]:
    """TensorStore's drivers by the file that tells of them, in the order of looking for them."""
    drivers = {
        marker: each.driver for each in reversed(installed_formats()) for marker in each.markers
    }
    others = sorted(drivers.keys() - set(_PRECEDENCE))
    return {marker: drivers[marker] for marker in (*_PRECEDENCE, *others)}


def volume_at(url: str, storage: Storage = LOCAL) -> StoredVolume | None:
    """The volume at a URL, by the files that lie there; None if there is none.

    Raises:
        VolumeError: the place cannot be read, its metadata are damaged, or it is a group of arrays
            that are no image.
    """
    store = open_kvstore(url, storage)
    for marker, driver in _drivers_by_marker().items():
        text = read_key(store, marker, url)
        if text is not None:
            volume = _describe(url, storage, store, marker, driver, text)
            _check_number(url, len(volume.scales))
            return volume
    return None


def _check_number(url: str, scales: int) -> None:
    """Refuse a volume that lists more scales than can be opened one by one."""
    if scales > _MOST_SCALES:
        raise VolumeError(
            f"{url} lists {scales:,} scales, and {_MOST_SCALES} are the most that are looked at: "
            "its metadata are damaged, or of a stranger. Remove those that are not there."
        )


def _describe(
    url: str, storage: Storage, store: KvStore, marker: str, driver: str, text: bytes
) -> StoredVolume:
    whole = {"driver": driver, "kvstore": kvstore_spec(url, storage)}
    if marker not in _PRECEDENCE:
        return StoredVolume(driver, [Scale(whole, None, None)])
    metadata = _parse_object(text, f"{url}/{marker}")
    if driver == "neuroglancer_precomputed":
        sizes = [tuple(scale["resolution"][::-1]) for scale in _precomputed_scales(metadata, url)]
        scales = [Scale({**whole, "scale_index": k}, None, size) for k, size in enumerate(sizes)]
        return StoredVolume(driver, scales)
    if marker == ".zgroup":
        metadata = json_object(store, ".zattrs", url)
    is_group = (
        marker == ".zgroup"
        or (driver == "zarr3" and metadata.get("node_type") != "array")
        or (driver == "n5" and "dimensions" not in metadata)
    )
    if not is_group:
        return StoredVolume(driver, [Scale(whole, None, None)])
    return _describe_group(url, storage, store, driver, metadata)


def _describe_group(
    url: str, storage: Storage, store: KvStore, driver: str, metadata: Json
) -> StoredVolume:
    attributes = metadata.get("attributes") or {} if driver == "zarr3" else metadata
    arrays = [] if driver == "n5" else scales_of_group(attributes, url)
    if not arrays:
        inside = list_volumes(store, url, attributes) or hint_at_neighbours(url)
        raise VolumeError(f"{url} is a group of arrays; give the path of one volume in it{inside}")
    scales = []
    for group_scale in arrays:
        place = kvstore_spec(f"{url.rstrip('/')}/{group_scale.path}", storage)
        sizes = dict(zip(group_scale.axes, group_scale.voxel_size_nm, strict=True))
        size = tuple(sizes.get(axis) for axis in "zyx")
        scales.append(Scale({"driver": driver, "kvstore": place}, group_scale, size))
    return StoredVolume("ome_zarr" if driver == "zarr3" else "ome_zarr_0.4", scales)


def json_object(store: KvStore, key: str, url: str) -> Json:
    """A JSON object in a file of a store; empty if the file is absent.

    Raises:
        VolumeError: it is damaged, or the store does not answer.
    """
    text = read_key(store, key, url)
    return {} if text is None else _parse_object(text, f"{url}/{key}")


def _precomputed_scales(info: Json, url: str) -> list[Json]:
    scales = info.get("scales")
    if not isinstance(scales, list) or not scales or not all(map(_has_resolution, scales)):
        raise VolumeError(f"{url}/info lists no scales: it is not a precomputed volume of voxels")
    return scales


def _has_resolution(scale: object) -> bool:
    size = scale.get("resolution") if isinstance(scale, dict) else None
    return (
        isinstance(size, list)
        and len(size) == 3
        and all(isinstance(number, (int, float)) for number in size)
    )


def _parse_object(text: bytes, name: str) -> Json:
    try:
        value = parse_json(text)
    except ValueError:
        raise VolumeError(f"{name} is not valid JSON: the volume's metadata are damaged") from None
    if not isinstance(value, dict):
        raise VolumeError(f"{name} holds no JSON object: the volume's metadata are damaged")
    return value


def hint_at_neighbours(url: str) -> str:
    """A hint at what lies at a local path."""
    folder = local_folder(url)
    if folder is None:
        return ""
    if not folder.exists():
        return f"; the folder {folder} does not exist"
    if not folder.is_dir():
        return f"; {folder} is a file, not a folder"
    names = sorted(entry.name for entry in islice(os.scandir(folder), 1000))[:8]
    return f"; found there: {', '.join(names) if names else 'nothing'}"
