"""What ``--overwrite`` removes: the volume at a URL, what was recorded of it, and nothing else.

A volume is what its metadata list: their own files, its arrays or scales, and blocks by the names
that its format gives them. A folder that holds anything else is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, VolumeError, WorkerFault
from beam_inference.job.state import STATE_FOLDER
from beam_inference.volumes.detection import StoredVolume, json_object, volume_at
from beam_inference.volumes.drafts import file_of_draft
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    KvStore,
    delete_folder,
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
_BLOCKS = {
    "zarr3": re.compile(r"c/|(c\.)?\d+(\.\d+)*/?"),
    "zarr": re.compile(r"\d+(\.\d+)*/?"),
    "n5": re.compile(r"\d+/?"),
}
"""Names of blocks, and of folders of blocks, beside the metadata of a single array."""
_SUFFIX = f"({'|'.join(map(re.escape, PACKED_SUFFIXES))})?"
_INTERVAL = r"-?\d+--?\d+"
_BELOW = {
    "neuroglancer_precomputed": re.compile(
        rf"{_INTERVAL}_{_INTERVAL}_{_INTERVAL}{_SUFFIX}|[\da-f]+\.shard"
    ),
    "zarr3": re.compile(r"zarr\.json|c([./]\d+)*|\d+([./]\d+)*"),
    "zarr": re.compile(r"\.zarray|\.zattrs|\d+([./]\d+)*"),
    "n5": re.compile(r"attributes\.json|\d+(/\d+)*"),
}
"""Paths of blocks, and of metadata, in the folder of a scale or an array."""

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
                delete_folder(store, self.url, folder)
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
    blocks = None
    scales: list[str] = []
    if stored is not None:
        scales = _folders(stored, url, storage)
        folders += scales
        metadata += _METADATA.get(stored.driver, ())
        blocks = _BLOCKS.get(stored.driver)
    others = _names_beside(url, storage, [*folders, *metadata])
    owned = [name for name in others if blocks is not None and blocks.fullmatch(name)]
    of_volume = {*folders, *metadata, *owned}
    foreign = sorted(
        name for name in set(others) - of_volume if file_of_draft(name) not in of_volume
    )
    of_blocks = [*scales, *(name for name in owned if name.endswith("/"))]
    if stored is not None:
        foreign += islice(_foreign_in(url, of_blocks, stored.driver), _NAMES_IN_MESSAGE + 1)
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


def _folders(stored: StoredVolume, url: str, storage: Storage) -> list[str]:
    """Folders of the scales or arrays that a volume's metadata list.

    Raises:
        VolumeError: one lies outside of the volume.
    """
    if stored.driver == "neuroglancer_precomputed":
        info = json_object(open_kvstore(url, storage), "info", url)
        paths = [str(scale.get("key")) for scale in info["scales"]]
    else:
        paths = [scale.group_scale.path for scale in stored.scales if scale.group_scale is not None]
    for path in paths:
        if leads_elsewhere(url, path):
            raise VolumeError(
                f"{url} lists the folder {path}, which may lie outside of it: it is not removed. "
                "Choose another place, or remove what is there yourself."
            )
    return [f"{path}/" for path in paths]


def _foreign_in(url: str, folders: Iterable[str], driver: str) -> Iterator[str]:
    """Paths of files in local folders of blocks that are neither blocks nor their metadata.

    Args:
        url: of the volume.
        folders: in it.
        driver: what the volume is detected as.
    """
    root = local_folder(url)
    known = _BELOW.get(_ARRAYS_OF.get(driver, driver))
    for folder in folders if root is not None and known is not None else ():
        top = f"{root}/{folder}"
        # beside the metadata of a single array, its folders of blocks begin with a block's name
        above = folder if driver in _BLOCKS and _BLOCKS[driver].fullmatch(folder) else ""
        for place, _, names in os.walk(top):
            below = place.removeprefix(top).strip("/")
            for name in names:
                path = f"{below}/{name}" if below else name
                is_known = known is not None and known.fullmatch(f"{above}{path}")
                if not is_known and file_of_draft(name) is None:
                    yield f"{folder}{path}"


def _names_beside(url: str, storage: Storage, known: Sequence[str]) -> list[str]:
    """Names of files, and of folders with a "/" behind, that lie at a URL beside those known."""
    folder = local_folder(url)
    try:
        if folder is None:
            return _keys_beside(open_kvstore(url, storage), known)
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


def _keys_beside(store: KvStore, known: Sequence[str]) -> list[str]:
    """List the other names in a store of any kind, without listing the folders that are known."""
    names = set()
    begin = ""
    for key in sorted(known):
        names |= _top_names(store, begin, key)
        begin = f"{key[:-1]}0" if key.endswith("/") else f"{key}\0"  # "0" comes after "/"
    return sorted(names | _top_names(store, begin, ""))


def _top_names(store: KvStore, begin: str, end: str) -> set[str]:
    listed = store.list(ts.KvStore.KeyRange(begin, end)).result(timeout=TRANSFER_SECONDS)
    names = set()
    for key in listed:
        top, separator, _ = key.decode(errors="replace").partition("/")
        names.add(top + separator)
    return names
