"""Precomputed volumes of several scales: making a scale, and listing it in the info file once it is there.

TensorStore writes only scales that are listed, so each process that makes one gives it an info file
of its own, in memory, laid over the volume's store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import Zyx
from beam_inference.pyramid.levels import Level
from beam_inference.volumes.detection import json_object
from beam_inference.volumes.kvstores import (
    change_json,
    delete_folder,
    kvstore_spec,
    one_line,
    open_kvstore,
    opened,
)
from beam_inference.volumes.opening import as_volume, open_volume
from beam_inference.volumes.volume import Volume

_KEPT = (
    "encoding",
    "chunk_sizes",
    "sharding",
    "compressed_segmentation_block_size",
    "jpeg_quality",
    "png_level",
)
"""What a new scale has from the scale that it is made from."""
_KIND = ("@type", "type", "data_type", "num_channels")


def precomputed_scales(
    url: str, storage: Storage, info: dict[str, Any], scale: int
) -> PrecomputedScales:
    """The precomputed volume at a URL, whose info file is ``info``, with one of its scales as the base."""
    kept = {key: info[key] for key in _KIND if key in info} | {"scales": [info["scales"][scale]]}
    return PrecomputedScales(url, storage, json.dumps(kept, sort_keys=True), scale)


@dataclass(frozen=True)
class PrecomputedScales:
    """A precomputed volume.

    Attributes:
        url: where it lies.
        storage: how that is reached.
        info: the JSON text of its info file, with one scale: the base.
        scale: number of that scale in the volume.
    """

    url: str
    storage: Storage
    info: str
    scale: int

    @property
    def holds_labels(self) -> bool:
        """Whether the info file's type is segmentation."""
        return bool(json.loads(self.info).get("type") == "segmentation")

    def description(self) -> dict[str, Any]:
        """The info file."""
        return {"info": json.loads(self.info)}

    def open_base(self) -> Volume:
        """The base, as any input is opened."""
        return open_volume(self.url, scale=self.scale, storage=self.storage)

    def block_shape(self, level: Level) -> Zyx:
        """The base's; a shard holds as many blocks as its bits say, but a small level may lie in it otherwise."""
        return self.open_level(level).block_shape

    def open_level(self, level: Level) -> Volume:
        """A level, over a list of scales in memory.

        Raises:
            VolumeError: TensorStore cannot write such a scale.
        """
        scale = self._entry(level)
        info = json.dumps({**json.loads(self.info), "scales": [scale]})
        memory = f"memory://beam_inference/{hashlib.sha256(info.encode()).hexdigest()}/"
        spec = {
            "driver": "neuroglancer_precomputed",
            "kvstore": {
                "driver": "kvstack",
                "layers": [
                    {"base": kvstore_spec(self.url, self.storage)},
                    {"exact": "info", "base": f"{memory}info"},
                ],
            },
            "scale_metadata": {"key": scale["key"]},
            # as in outputs: a block is absent only if no chunk was written
            "store_data_equal_to_fill_value": True,
        }
        try:
            own = opened(lambda context: ts.KvStore.open(memory, context=context), self.storage)
            own.write("info", info).result()
            store = opened(lambda context: ts.open(spec, open=True, context=context), self.storage)
        except (ValueError, OSError) as error:
            raise VolumeError(
                f"cannot write the scale {scale['key']} of {self.url}: {one_line(error)}"
            ) from None
        return as_volume(self.url, store)

    def listed(self, levels: Sequence[Level]) -> list[Level]:
        """By their voxel size.

        Raises:
            VolumeError: the folder of a level is that of another scale.
        """
        there = json_object(open_kvstore(self.url, self.storage), "info", self.url)["scales"]
        found = []
        for level in levels:
            entry = self._entry(level)
            same = [each for each in there if _same(entry, each)]
            if not same and entry["key"] in (each["key"] for each in there):
                raise VolumeError(
                    f"{self.url}/{entry['key']} would be the folder of {level.name}, and is that "
                    "of a scale of another voxel size. Rename the folder and its key in the info "
                    "file."
                )
            found += [level] if same else []
        return found

    def list_levels(self, levels: Sequence[Level]) -> None:
        """Insert them before the first scale of larger voxels."""

        def listing(info: dict[str, Any]) -> dict[str, Any]:
            scales = list(info["scales"])
            for entry in map(self._entry, levels):
                if not any(_same(entry, each) for each in scales):
                    larger = (k for k, each in enumerate(scales) if _voxel(each) > _voxel(entry))
                    scales.insert(next(larger, len(scales)), entry)
            return {**info, "scales": scales}

        change_json(open_kvstore(self.url, self.storage), "info", self.url, listing)

    def remove(self, levels: Sequence[Level]) -> None:
        """Also of the same voxel size and another name."""
        entries = [self._entry(level) for level in levels]
        folders = {entry["key"] for entry in entries}  # also of what was begun, and never listed

        def without(info: dict[str, Any]) -> dict[str, Any]:
            gone = [each for each in info["scales"] if any(_same(entry, each) for entry in entries)]
            left = [each for each in info["scales"] if each not in gone]
            folders.update(each["key"] for each in gone)
            folders.difference_update(each["key"] for each in left)
            return {**info, "scales": left}

        store = open_kvstore(self.url, self.storage)
        change_json(store, "info", self.url, without)
        for key in folders:
            if ".." not in key.split("/"):  # outside the volume: another's
                delete_folder(store, self.url, f"{key}/")

    def _entry(self, level: Level) -> dict[str, Any]:
        """The level's entry in the info file."""
        (base,) = json.loads(self.info)["scales"]
        sizes = [size * n for size, n in zip(base["resolution"], level.total[::-1], strict=True)]
        resolution = [int(size) if float(size).is_integer() else size for size in sizes]
        return {
            **{key: base[key] for key in _KEPT if base.get(key) is not None},
            "chunk_sizes": base["chunk_sizes"][:1],
            "key": "_".join(f"{size:.9g}" for size in resolution),
            "resolution": resolution,
            "size": list(level.bounds.shape[::-1]),
            "voxel_offset": list(level.bounds.start[::-1]),
        }


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        abs(a - b) < 1e-6 * max(a, b)
        for a, b in zip(one["resolution"], other["resolution"], strict=True)
    )


def _voxel(scale: dict[str, Any]) -> float:
    x, y, z = scale["resolution"]
    return float(x * y * z)
