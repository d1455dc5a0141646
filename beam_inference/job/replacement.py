"""What ``--overwrite`` removes: the volume at a URL, what was recorded of it, and nothing else.

A volume is what its metadata list: their own files, its arrays or scales, and blocks by the names
that its format gives them. A folder that holds anything else is left alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath

import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, VolumeError, WorkerFault
from beam_inference.job.state import STATE_FOLDER
from beam_inference.volumes.block_names import is_block_of
from beam_inference.volumes.detection import StoredVolume, json_object, volume_at
from beam_inference.volumes.drafts import file_of_draft
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    KvStore,
    leads_elsewhere,
    local_folder,
    one_line,
    open_kvstore,
    retry_request,
)
from beam_inference.volumes.packed_blocks import PACKED_SUFFIXES

_METADATA = {
    "neuroglancer_precomputed": ("provenance", "info"),
    "zarr3": ("zarr.json",),
    "zarr": (".zattrs", ".zmetadata", ".zarray"),
    "n5": ("attributes.json",),
    "ome_zarr": ("zarr.json",),
    "ome_zarr_0.4": (".zattrs", ".zmetadata", ".zgroup"),
}
"""Files of metadata by what a volume is detected as; the one by which it is detected comes last."""
_BLOCK_FOLDERS = {
    "zarr3": re.compile(r"c/|\d+/"),
    "zarr": re.compile(r"\d+/"),
    "n5": re.compile(r"\d+/"),
}
"""Names of folders of blocks beside the metadata of a single array."""
_ARRAY_METADATA = {
    "zarr3": ("zarr.json",),
    "zarr": (".zarray", ".zattrs"),
    "n5": ("attributes.json",),
}
"""Files of metadata of an array; the one that describes it comes first."""
_LEFT_OF_ARRAY = re.compile(r"(c[./])?\d+([./]\d+)*")
"""Paths of blocks in an array of a group whose metadata are gone: its removal was interrupted."""

_ARRAYS_OF = {"ome_zarr": "zarr3", "ome_zarr_0.4": "zarr"}
"""What the arrays of a group are."""

_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True, slots=True)
class Replacement:
    """Files and folders that are removed at a URL before a new volume is made there.

    Attributes:
        url: the URL.
        storage: how object stores are reached.
        folders: keys of folders, each ending with "/".
        files: keys of files; the one by which the volume is detected comes last, so that what is
            left of a removal that was interrupted is still known for a volume.
    """

    url: str
    storage: Storage
    folders: tuple[str, ...]
    files: tuple[str, ...]

    def remove(self) -> None:
        """Remove it; what was recorded as done goes first.

        Raises:
            WorkerFault: it cannot be done.
        """
        store = open_kvstore(self.url, self.storage)
        local = local_folder(self.url)
        for folder in self.folders:
            if local is None:
                delete_folder(self.url, self.storage, folder)
            else:
                _remove_tree(local, folder)
        for first in range(0, len(self.files), _FILES_AT_A_TIME):
            _delete_files(store, self.url, self.files[first : first + _FILES_AT_A_TIME])


_FILES_AT_A_TIME = 1000


def _remove_tree(root: Path, folder: str) -> None:
    """Remove a local folder, and those above it that are empty then: a store would leave them."""
    path = root / folder
    try:
        if path.is_dir():
            shutil.rmtree(path)
        for parent in path.parents:
            if parent == root or not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()
    except OSError as error:
        raise WorkerFault(f"cannot delete {path}: {error.strerror or error}") from error


def _delete_files(store: KvStore, url: str, keys: Sequence[str]) -> None:
    *others, last = keys

    def delete() -> None:
        for request in [store.write(key, None) for key in others]:
            request.result(timeout=TRANSFER_SECONDS)
        store.write(last, None).result(timeout=TRANSFER_SECONDS)

    retry_request("delete", f"{url}/{keys[0]}", delete)


def plan_replacement(url: str, storage: Storage, further: Iterable[str] = ()) -> Replacement:
    """Find out what of a place is removed, so that a new volume can be made there.

    Args:
        url: where the new volume is to lie.
        storage: how object stores are reached.
        further: more that belongs to the volume; names of folders end with "/".

    Raises:
        StateError: something else lies there, too, or it cannot be listed.
        VolumeError: what lies there cannot be understood.
    """
    stored = volume_at(url, storage)
    further = list(further)
    folders = [f"{STATE_FOLDER}/", *(name for name in further if name.endswith("/"))]
    metadata = tuple(name for name in further if not name.endswith("/"))
    arrays: list[_Array] = []
    if stored is not None:
        arrays = _arrays(stored, url, storage)
        folders += [array.folder for array in arrays if array.folder]
        metadata += _METADATA.get(stored.driver, ())
    others = _names_beside(url, storage, [*folders, *metadata])
    owned = [name for name in others if any(array.has_on_top(name) for array in arrays)]
    of_volume = {*folders, *metadata, *owned}
    foreign = sorted(
        name for name in set(others) - of_volume if file_of_draft(name) not in of_volume
    )
    foreign += islice(_foreign_in(url, arrays, owned), _NAMES_IN_MESSAGE + 1)
    if foreign:
        named = ", ".join(foreign[:_NAMES_IN_MESSAGE])
        more = (
            ""
            if len(foreign) <= _NAMES_IN_MESSAGE
            else f" and {len(foreign) - _NAMES_IN_MESSAGE} more"
        )
        raise StateError(
            f"{url} holds {named}{more}, which is no part of a volume that --overwrite could "
            "replace: nothing was removed. Choose another place, or remove or move it yourself."
        )
    return Replacement(
        url,
        storage,
        tuple(dict.fromkeys([*folders, *(name for name in owned if name.endswith("/"))])),
        (*(name for name in owned if not name.endswith("/")), *metadata),
    )


@dataclass(frozen=True, slots=True)
class _Array:
    """An array or a scale of a volume.

    Attributes:
        folder: its key, ending with "/"; empty where the array is the volume.
        driver: TensorStore's name of it.
        is_block: whether a path in the folder is a block's.
    """

    folder: str
    driver: str
    is_block: Callable[[str], bool]

    def has(self, path: str) -> bool:
        """Whether a path in the folder is that of a block, or of metadata."""
        if self.driver == "neuroglancer_precomputed":
            suffix = next((each for each in PACKED_SUFFIXES if path.endswith(each)), "")
            return self.is_block(path.removesuffix(suffix))
        return path in _ARRAY_METADATA[self.driver] or self.is_block(path)

    def has_on_top(self, name: str) -> bool:
        """Whether a name beside the metadata of a single array may be a block, or hold some."""
        if self.folder or self.driver not in _BLOCK_FOLDERS:
            return False
        return self.is_block(name) or _BLOCK_FOLDERS[self.driver].fullmatch(name) is not None


def _arrays(stored: StoredVolume, url: str, storage: Storage) -> list[_Array]:
    """The arrays or scales that a volume's metadata list, by their folders.

    Raises:
        VolumeError: one lies outside of the volume, or its metadata are not understood.
    """
    store = open_kvstore(url, storage)
    driver = _ARRAYS_OF.get(stored.driver, stored.driver)
    listed: list[tuple[str, Json]] = []
    if driver == "neuroglancer_precomputed":
        scales = json_object(store, "info", url)["scales"]
        _check_within(url, [str(scale.get("key")) for scale in scales])
        listed = [(f"{scale['key']}/", scale) for scale in scales]
    elif driver in _ARRAY_METADATA:
        name = _ARRAY_METADATA[driver][0]
        paths = [each.group_scale.path for each in stored.scales if each.group_scale is not None]
        _check_within(url, paths)
        folders = [f"{path}/" for path in paths] or [""]
        listed = [(folder, json_object(store, f"{folder}{name}", url)) for folder in folders]
    return [_Array(folder, driver, _blocks_of(driver, each, url)) for folder, each in listed]


def _check_within(url: str, paths: Iterable[str]) -> None:
    """Raise VolumeError if a folder that a volume lists lies outside of it."""
    for path in paths:
        if leads_elsewhere(url, path):
            raise VolumeError(
                f"{url} lists the folder {path}, which may lie outside of it: it is not removed. "
                "Choose another place, or remove what is there yourself."
            )


def _blocks_of(driver: str, metadata: Json, url: str) -> Callable[[str], bool]:
    """Make a test of whether a path is a block's. Raises VolumeError."""
    if not metadata:
        return lambda path: _LEFT_OF_ARRAY.fullmatch(path) is not None
    try:
        return is_block_of(driver, metadata)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VolumeError(
            f"{url} has metadata by which its blocks cannot be told from other files "
            f"({one_line(error)}): nothing was removed. Choose another place, or remove what is "
            "there yourself."
        ) from None


def _foreign_in(url: str, arrays: Sequence[_Array], owned: Iterable[str]) -> Iterator[str]:
    """Paths of files in a local volume that are neither blocks nor metadata of its arrays.

    Args:
        url: of the volume.
        arrays: of it.
        owned: names beside the metadata of a single array that may be blocks, or hold some.
    """
    root = local_folder(url)
    if root is None:
        return
    for array in arrays:
        tops = [array.folder] if array.folder else [name for name in owned if name.endswith("/")]
        for top in tops:
            for path in _paths_below(root, top):
                if not array.has(path.removeprefix(array.folder)):
                    yield path
    folders = {array.folder for array in arrays}
    parents = {parent for folder in folders for parent in PurePosixPath(folder).parents}
    above = {f"{parent}/" for parent in parents - {PurePosixPath()}} - folders
    for folder in sorted(above):
        for name in _names_in(root, folder):
            is_known = f"{folder}{name}" in above | folders
            if not is_known and not _is_plain_group(root / folder / name):
                yield f"{folder}{name}"


def _paths_below(root: Path, folder: str) -> Iterator[str]:
    """Paths of the files in a folder and those in it, but for drafts."""
    for place, _, names in os.walk(root / folder):
        below = Path(place).relative_to(root).as_posix()
        yield from (f"{below}/{name}" for name in names if file_of_draft(name) is None)


def _names_in(root: Path, folder: str) -> list[str]:
    """Names in a folder, if it is there; those of folders end with "/"."""
    path = root / folder
    if not path.is_dir():
        return []
    return sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())


def _is_plain_group(path: Path) -> bool:
    """Whether a file describes a group of zarr that only holds others, and is no volume itself."""
    if path.name not in (".zgroup", ".zattrs", "zarr.json"):
        return False
    try:
        metadata = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(metadata, dict) or metadata.get("node_type", "group") != "group":
        return False
    attributes = metadata.get("attributes", metadata)
    return isinstance(attributes, dict) and not {"ome", "multiscales"} & attributes.keys()


def _names_beside(url: str, storage: Storage, known: Sequence[str]) -> list[str]:
    """Names of files, and of folders with a "/" behind, that lie at a URL beside those known."""
    folder = local_folder(url)
    try:
        if folder is None:
            return _keys_beside(url, storage, known)
        if not os.path.lexists(folder):
            return []
        tops = {key.split("/")[0] + "/" for key in known if "/" in key} | set(known)
        with os.scandir(folder) as entries:
            names = [
                entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")
                for entry in entries
            ]
    except (ValueError, OSError) as error:
        raise StateError(f"cannot list what lies at {url}: {one_line(error)}") from None
    return [name for name in names if name not in tops]


def _keys_beside(url: str, storage: Storage, known: Sequence[str]) -> list[str]:
    """List the other names in a store of any kind, without listing the folders that are known."""
    store = open_kvstore(url, storage)
    top_names = partial(_top_names, store, storage)
    names = set()
    begin = ""
    for key in sorted(known):
        names |= top_names(begin, key)
        begin = f"{key[:-1]}0" if key.endswith("/") else f"{key}\0"  # "0" comes after "/"
    return sorted(names | top_names(begin, ""))


def _top_names(store: KvStore, storage: Storage, begin: str, end: str) -> set[str]:
    between = ts.KvStore.KeyRange(begin, end)
    listed = list_keys(store, storage, between, timeout=TRANSFER_SECONDS)
    names = set()
    for key in listed:
        top, separator, _ = key.decode(errors="replace").partition("/")
        names.add(top + separator)
    return names
