"""What lies at a URL: a volume of which driver, and at which scales."""

from __future__ import annotations

import json
import os
from itertools import islice
from typing import Any, NamedTuple

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.volumes.kvstores import (
    LOCAL,
    kvstore_spec,
    local_folder,
    open_kvstore,
    read_key,
)
from beam_inference.volumes.ome_zarr import Level, levels

_MARKERS = {
    "info": "neuroglancer_precomputed",
    "zarr.json": "zarr3",
    ".zarray": "zarr",
    ".zgroup": "zarr",
    "attributes.json": "n5",
}


class Scale(NamedTuple):
    """One scale of a volume.

    Attributes:
        spec: what TensorStore opens, but for its own settings.
        level: what an OME-Zarr group says of it; other volumes say it themselves.
        voxel_size_nm: ZYX, None where a volume of one scale only is to be asked itself.
    """

    spec: dict[str, Any]
    level: Level | None
    voxel_size_nm: tuple[float | None, ...] | None


class Found(NamedTuple):
    """A volume.

    Attributes:
        driver: TensorStore's name of it, or "ome_zarr" (0.5), "ome_zarr_0.4" for a group of arrays.
        scales: at least one, the finest first.
    """

    driver: str
    scales: list[Scale]


def volume_at(url: str, storage: Storage = LOCAL) -> Found | None:
    """The volume at a URL, by the files that lie there; None if there is none.

    Raises:
        VolumeError: the place cannot be read, its metadata are damaged, or it is a group of arrays
            that are no image.
    """
    store = open_kvstore(url, storage)
    for marker, driver in _MARKERS.items():
        text = read_key(store, marker, url)
        if text is None:
            continue
        metadata = _parsed_object(text, f"{url}/{marker}")
        whole = {"driver": driver, "kvstore": kvstore_spec(url, storage)}
        if driver == "neuroglancer_precomputed":
            sizes = [
                tuple(scale["resolution"][::-1]) for scale in _precomputed_scales(metadata, url)
            ]
            return Found(
                driver,
                [Scale({**whole, "scale_index": k}, None, size) for k, size in enumerate(sizes)],
            )
        if marker == ".zgroup":
            metadata = json_object(store, ".zattrs", url)
        is_group = (
            marker == ".zgroup"
            or (driver == "zarr3" and metadata.get("node_type") != "array")
            or (driver == "n5" and "dimensions" not in metadata)
        )
        if not is_group:
            return Found(driver, [Scale(whole, None, None)])
        image = (
            levels(metadata.get("attributes") or {} if driver == "zarr3" else metadata, url)
            if driver != "n5"
            else []
        )
        if not image:
            raise VolumeError(
                f"{url} is a group of arrays; give the path of one array in it{neighbours(url)}"
            )
        return Found(
            "ome_zarr" if driver == "zarr3" else "ome_zarr_0.4",
            [
                Scale(
                    {
                        "driver": driver,
                        "kvstore": kvstore_spec(f"{url.rstrip('/')}/{level.path}", storage),
                    },
                    level,
                    tuple(
                        dict(zip(level.axes, level.voxel_size_nm, strict=True)).get(axis)
                        for axis in "zyx"
                    ),
                )
                for level in image
            ],
        )
    return None


def json_object(store: Any, key: str, url: str) -> dict[str, Any]:
    """A JSON object in a file of a store; empty if the file is absent.

    Raises:
        VolumeError: it is damaged, or the store does not answer.
    """
    text = read_key(store, key, url)
    return {} if text is None else _parsed_object(text, f"{url}/{key}")


def _precomputed_scales(info: dict[str, Any], url: str) -> list[dict[str, Any]]:
    scales = info.get("scales")
    if not isinstance(scales, list) or not scales or not all(map(_has_resolution, scales)):
        raise VolumeError(f"{url}/info lists no scales: it is not a precomputed volume of voxels")
    return scales


def _has_resolution(scale: object) -> bool:
    size = scale.get("resolution") if isinstance(scale, dict) else None
    return (
        isinstance(size, list)
        and len(size) == 3
        and all(isinstance(each, (int, float)) for each in size)
    )


def _parsed_object(text: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise VolumeError(f"{name} is not valid JSON: the volume's metadata are damaged") from None
    if not isinstance(value, dict):
        raise VolumeError(f"{name} holds no JSON object: the volume's metadata are damaged")
    return value


def neighbours(url: str) -> str:
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
