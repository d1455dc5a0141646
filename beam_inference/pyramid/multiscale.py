"""Volumes that hold one image at several scales, and how coarser scales are added to them.

Readers know a volume's scales from one small file of JSON. A scale is written before that file
names it, and named there once it is complete: **no reader ever sees a scale that is listed but not
there**. The file is replaced only if it is as it was when it was read, so nothing is lost when
several programs list scales at the same time.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.state import STATE_FOLDER
from beam_inference.pyramid.ome_codec import read_ome_codec
from beam_inference.pyramid.precomputed_codec import read_precomputed_codec
from beam_inference.pyramid.scale_geometry import PyramidScale
from beam_inference.volumes.conditional_writes import change_json
from beam_inference.volumes.detection import hint_at_neighbours, json_object, volume_at
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    LinkGuard,
    leads_elsewhere,
    open_kvstore,
    retry_request,
)
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume


class ScaleCodec(Protocol):
    """JSON shape of a format's list of scales, and of one scale: a small picklable value."""

    @property
    def metadata_file(self) -> str:
        """Key of the file that lists the scales."""

    @property
    def stale_files(self) -> Sequence[str]:
        """Keys of files that repeat the list, and are deleted before it changes."""

    def description(self) -> Json:
        """What new scales take from the volume, as JSON values."""

    def holds_labels(self, metadata: Json) -> bool:
        """Whether the volume says that its values are names of objects."""

    def entries(self, metadata: Json) -> list[Json]:
        """Entries of the scales that are listed, finest first."""

    def with_entries(self, metadata: Json, entries: list[Json]) -> Json:
        """Metadata that list other entries."""

    def new_entry(self, scale: PyramidScale) -> Json:
        """Entry of a new scale."""

    def folder(self, entry: Json) -> str:
        """Folder of a scale, relative to the volume."""

    def voxel_volume(self, entry: Json) -> float:
        """Size of a scale's voxels, by which entries are ordered."""

    def is_same(self, entry: Json, other: Json) -> bool:
        """Whether two entries cannot stand in one list, as they name one scale."""

    def block_shape(self, url: str, storage: Storage, scale: PyramidScale, base: Volume) -> Zyx:
        """Write unit of the storage in a new scale, ZYX; creates nothing."""

    def open_scale(self, url: str, storage: Storage, scale: PyramidScale) -> Volume:
        """Open a new scale for reading and writing, listed or not; create it if need be."""


@dataclass(frozen=True)
class MultiscaleVolume:
    """A volume, and which of its scales coarser ones are made from: a small picklable value.

    Attributes:
        url: where the volume lies.
        storage: settings to reach it.
        base_number: number of the scale, the base, that the first new one is made from.
        codec: its format.
    """

    url: str
    storage: Storage
    base_number: int
    codec: ScaleCodec

    @property
    def holds_labels(self) -> bool:
        """Whether the volume says that its values are names of objects."""
        return self.codec.holds_labels(self._metadata())

    def description(self) -> Json:
        """What new scales take from the volume, as JSON values."""
        return self.codec.description()

    def open_base(self) -> Volume:
        """Open the base, as any input is opened."""
        return open_volume(self.url, scale=self.base_number, storage=self.storage)

    def block_shape(self, scale: PyramidScale, base: Volume) -> Zyx:
        """Write unit of the storage in a new scale, ZYX; creates nothing."""
        return self.codec.block_shape(self.url, self.storage, scale, base)

    def open_scale(self, scale: PyramidScale) -> Volume:
        """Open a new scale for reading and writing, listed or not; create it if need be.

        Raises:
            VolumeError: TensorStore cannot write it.
        """
        return self.codec.open_scale(self.url, self.storage, scale)

    def listed_scales(self, scales: Sequence[PyramidScale]) -> list[PyramidScale]:
        """The scales whose place in the volume is taken already.

        Raises:
            VolumeError: the folder of one is that of another scale.
        """
        codec = self.codec
        existing = codec.entries(self._metadata())
        listed = []
        for scale in scales:
            entry = codec.new_entry(scale)
            others = [other for other in existing if not codec.is_same(entry, other)]
            if len(others) < len(existing):
                listed.append(scale)
            if codec.folder(entry) in map(codec.folder, others):
                raise VolumeError(
                    f"{self.url}/{codec.folder(entry)} would be the folder of {scale.name}, and is "
                    "that of a scale of another voxel size. Rename the folder and its key in the "
                    "info file."
                )
        return listed

    def find_filled_folder(self, scales: Sequence[PyramidScale]) -> str | None:
        """URL of the folder of a scale in which there is a file already; None if all are empty."""
        urls = [f"{self.url.rstrip('/')}/{folder}" for folder in self._folders(scales)]
        return next((url for url in urls if _list_files(url, self.storage)), None)

    def refuse_links(self, scales: Sequence[PyramidScale]) -> None:
        """Refuse folders of scales that are links: others' files would be changed.

        Raises:
            WorkerFault: one is.
        """
        guard = LinkGuard(self.url)
        for folder in self._folders(scales):
            guard.check(f"{folder}/")

    def _folders(self, scales: Sequence[PyramidScale]) -> list[str]:
        return [self.codec.folder(self.codec.new_entry(scale)).rstrip("/") for scale in scales]

    def list_scales(self, scales: Sequence[PyramidScale]) -> None:
        """List complete scales for readers, beside those that others have listed meanwhile.

        Each stands before the first scale of larger voxels.
        """
        codec = self.codec

        def add(entries: list[Json]) -> list[Json]:
            for scale in scales:
                entry = codec.new_entry(scale)
                if any(codec.is_same(entry, other) for other in entries):
                    continue
                size = codec.voxel_volume(entry)
                is_larger = [codec.voxel_volume(other) > size for other in entries]
                entries.insert((*is_larger, True).index(True), entry)
            return entries

        self._change_entries(add)

    def remove_scales(self, scales: Sequence[PyramidScale]) -> None:
        """Take scales off the list, and then delete them; also those of equal voxel size.

        Folders that hold what is kept, or lie in it, are left as they are.
        """
        codec = self.codec
        unwanted = [codec.new_entry(scale) for scale in scales]
        # also folders of scales that were begun, and never listed
        folders = {codec.folder(entry) for entry in unwanted}
        # of other scales, and of what else may lie beside them
        kept_folders = {STATE_FOLDER, "labels"}

        def remove(entries: list[Json]) -> list[Json]:
            kept = []
            for entry in entries:
                if any(codec.is_same(other, entry) for other in unwanted):
                    folders.add(codec.folder(entry))
                else:
                    kept.append(entry)
            kept_folders.update(codec.folder(entry) for entry in kept)
            return kept

        self._change_entries(remove)
        metadata = self._metadata()
        further = (metadata.get(key) for key in ("mesh", "skeletons", "segment_properties"))
        kept_folders.update(each for each in further if isinstance(each, str))
        for folder in folders:
            is_shared = any(
                _lies_in(folder, other) or _lies_in(other, folder) for other in kept_folders
            )
            if not is_shared and not leads_elsewhere(self.url, folder):
                delete_folder(self.url, self.storage, f"{folder}/")

    def _metadata(self) -> Json:
        store = open_kvstore(self.url, self.storage)
        return json_object(store, self.codec.metadata_file, self.url)

    def _change_entries(self, change: Callable[[list[Json]], list[Json]]) -> None:
        store = open_kvstore(self.url, self.storage)
        codec = self.codec
        for file in codec.stale_files:
            _delete_file(store, file, self.url)

        def change_metadata(metadata: Json) -> Json:
            return codec.with_entries(metadata, change(list(codec.entries(metadata))))

        change_json(store, codec.metadata_file, self.url, change_metadata)


def _lies_in(folder: str, other: str) -> bool:
    """Whether a folder of a volume is another or lies in it."""
    return f"{posixpath.normpath(folder)}/".startswith(f"{posixpath.normpath(other)}/")


def _delete_file(store: Any, key: str, url: str) -> None:
    def delete() -> None:
        store.write(key, None).result(timeout=PATIENCE_SECONDS)

    retry_request("delete", f"{url}/{key}", delete)


def multiscale_volume(url: str, storage: Storage, base_number: int = 0) -> MultiscaleVolume:
    """The volume at a URL, to which scales can be added.

    Args:
        url: of a precomputed volume or an OME-Zarr group.
        storage: settings to reach it.
        base_number: number of the scale that new ones are made from.

    Raises:
        VolumeError: there is no volume, it has no such scale, or no place for scales.
    """
    stored = volume_at(url, storage)
    if stored is None:
        raise VolumeError(
            f"no volume at {url}: expected a precomputed volume or an OME-Zarr "
            f"group{hint_at_neighbours(url)}"
        )
    if not stored.is_multiscale:
        raise VolumeError(
            f"{url} is a single {stored.driver} array, which has no place for scales: a "
            "precomputed volume or an OME-Zarr group is needed"
        )
    if not 0 <= base_number < len(stored.scales):
        raise VolumeError(
            f"{url} has the scales 0 … {len(stored.scales) - 1}; --scale is {base_number}"
        )
    codec: ScaleCodec
    if stored.driver == "neuroglancer_precomputed":
        codec = read_precomputed_codec(url, storage, base_number)
    else:
        codec = read_ome_codec(url, storage, stored, base_number)
    return MultiscaleVolume(url, storage, base_number, codec)


def _list_files(url: str, storage: Storage) -> list[bytes]:
    store = open_kvstore(url, storage)
    return retry_request("list", url, partial(list_keys, store, storage))
