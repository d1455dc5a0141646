"""Where a dataset of an HDF5 file really lies: links are followed here, and not by HDF5.

HDF5 follows links and names of other files anywhere on the machine, also into the folder that a
process happens to run in. Here they are followed inside the file's folder only.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.conversion.hdf5_chunks import absence_notes, check_chunk_places
from beam_inference.conversion.hdf5_filters import check_filters
from beam_inference.conversion.named_files import file_beside
from beam_inference.conversion.protocol import import_library
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.errors import VolumeError
from beam_inference.volumes.remote_files import RemoteFile

_MOST_LINKS = 16
"""Links that are followed one after the other: there may be circles."""

OWN_FILE = "."
"""The name by which a virtual dataset means its own file."""

OpenFile = Callable[[StoredFile], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class DatasetPlace:
    """A dataset, or a place where there is none: the file, and the path in it without links."""

    path: StoredFile
    name: str


def follow_links(open_file: OpenFile, path: StoredFile, name: str) -> DatasetPlace | None:
    """Find the dataset or group of a name, and follow the links on the way.

    Args:
        open_file: opens a file for reading.
        path: path of the file to begin in.
        name: path of the dataset in it.

    Returns:
        Its place; None if there is nothing of that name.

    Raises:
        VolumeError: a link leads to a file outside the folder of the one that it is in, or links
            are too many.
    """
    for _ in range(_MOST_LINKS):
        with open_file(path) as file:
            step = _next_place(path, file, name)
        if step is None or step == DatasetPlace(path, name):
            return step
        path = step.path
        name = step.name
    raise VolumeError(
        f"{path} leads to {name} by more than {_MOST_LINKS} links, one after the other: it is "
        "damaged. Name the dataset itself."
    )


def _next_place(path: StoredFile, file: Any, name: str) -> DatasetPlace | None:
    """The place that the first link on the way leads to; the place itself if there is none."""
    h5py = import_library("h5py", "HDF5")
    parts = [part for part in name.split("/") if part]
    group = file
    for depth, part in enumerate(parts):
        link = group.get(part, getlink=True) if isinstance(group, h5py.Group) else None
        behind = "/".join(parts[depth + 1 :])
        if link is None:
            return None
        if isinstance(link, h5py.ExternalLink):
            other = file_beside(path, link.filename)
            return DatasetPlace(other, posixpath.join(link.path, behind).strip("/"))
        if isinstance(link, h5py.SoftLink):
            here = "/".join(parts[:depth])
            return DatasetPlace(path, posixpath.join("/", here, link.path, behind).strip("/"))
        group = group[part]
    return DatasetPlace(path, name)


def check_voxels_are_near(open_file: OpenFile, path: StoredFile, dataset: Any) -> tuple[str, ...]:
    """Refuse a dataset whose voxels lie outside its file, but for files in its folder.

    Args:
        open_file: opens a file for reading.
        path: path of the file.
        dataset: the dataset, open.

    Returns:
        Notes on sources of a virtual dataset that hold nothing.

    Raises:
        VolumeError: they do, or a file of a virtual dataset is missing, which HDF5 would read as
            its fill value; or a source has chunks that lie nowhere in it.
    """
    if dataset.external:
        raise VolumeError(
            f"{path}:{dataset.name} keeps its voxels in {dataset.external[0][0]}, a file without a "
            "format, which is not read in its place. Copy them into the file first, with: "
            "h5repack -l CONTI"
        )
    notes: list[str] = []
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if "%" in source.file_name + source.dset_name:
            raise VolumeError(
                f"{path}:{dataset.name} is put together from {source.file_name}:"
                f"{source.dset_name}, a pattern of names, which could lead anywhere. Copy the "
                "voxels into one file first."
            )
        is_inside = source.file_name == OWN_FILE
        if isinstance(path, RemoteFile) and not is_inside:
            raise VolumeError(
                f"{path}:{dataset.name} is put together from {source.file_name}, another file, "
                "which HDF5's library opens on disks only. Copy both into one folder here first."
            )
        other = path if is_inside else file_beside(path, source.file_name)
        place = follow_links(open_file, other, source.dset_name)
        if place is None:
            raise VolumeError(
                f"{path}:{dataset.name} is put together from others, and {other} has no "
                f"{source.dset_name}. Copy that file again."
            )
        if place != DatasetPlace(other, source.dset_name.strip("/")):
            raise VolumeError(
                f"{path}:{dataset.name} is put together from others, and {other}:"
                f"{source.dset_name} is a link. Copy the voxels into one file first."
            )
        with open_file(other) as file:
            part = file[place.name]
            if not np.can_cast(part.dtype, dataset.dtype, "safe"):
                raise VolumeError(
                    f"{path}:{dataset.name} has {dataset.dtype} values, and is put together from "
                    f"{other}:{source.dset_name}, which has {part.dtype} ones: HDF5 would cut them "
                    "off. Make it of a dtype that holds them."
                )
            if part.external or part.is_virtual:
                raise VolumeError(
                    f"{path}:{dataset.name} is put together from {other}:{source.dset_name}, which "
                    "lies in further files. Copy the voxels into one file first."
                )
            if part.chunks:
                check_filters(f"{other}:{source.dset_name}", part)
                check_chunk_places(f"{other}:{source.dset_name}", part)
            notes += [
                f"in {other}:{source.dset_name}, which it is put together from, {note}"
                for note in absence_notes(part)
            ]
    return tuple(notes)


def files_beside(path: StoredFile, dataset: Any) -> tuple[StoredFile, ...]:
    """The other files that a dataset is put together from, in the order of their names.

    Args:
        path: path of its file.
        dataset: the dataset, open.
    """
    sources = dataset.virtual_sources() if dataset.is_virtual else ()
    names = {source.file_name for source in sources} - {OWN_FILE}
    return tuple(file_beside(path, name) for name in sorted(names))
