"""Which source a path or URL is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beam_inference.config.storage import Storage
from beam_inference.conversion.hdf5 import hdf5_source
from beam_inference.conversion.mrc import mrc_source
from beam_inference.conversion.nifti import nifti_source
from beam_inference.conversion.npy import npy_source, npz_source
from beam_inference.conversion.nrrd import nrrd_source
from beam_inference.conversion.protocol import Read, Source, SourceInfo
from beam_inference.conversion.stacks import slice_stack
from beam_inference.conversion.tiff import tiff_source
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import local_folder
from beam_inference.volumes.opening import open_volume

_PLAIN: dict[str, Callable[[str], Source]] = {
    ".npy": npy_source,
    **dict.fromkeys((".nii", ".nii.gz"), nifti_source),
    **dict.fromkeys((".nrrd", ".nhdr"), nrrd_source),
    **{
        f"{name}{packed}": mrc_source
        for name in (".mrc", ".rec", ".map", ".st")
        for packed in ("", ".gz", ".bz2")
    },
}
_WITH_DATASETS: dict[str, Callable[[str, str | None], Source]] = {
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), hdf5_source),
    ".npz": npz_source,
    **dict.fromkeys((".tif", ".tiff"), tiff_source),
}
_SLICES = (".png", ".jpg", ".jpeg")
_SUFFIXES = (*_PLAIN, *_WITH_DATASETS, *_SLICES)


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """A volume that :func:`beam_inference.volumes.opening.open_volume` reads.

    Attributes:
        url: where it lies. scale: which one of a pyramid.
        storage: how it is reached.
        info: what is known of it.
        place: where it lies, made canonical.
    """

    url: str
    scale: int
    storage: Storage
    info: SourceInfo
    place: str

    @property
    def identity(self) -> dict[str, Any]:
        """Its place; nobody writes to a source while it is converted."""
        return {"volume": self.url, "scale": self.scale}

    def open(self) -> Read:
        """Open it."""
        return open_volume(self.url, scale=self.scale, storage=self.storage).read


def stored_volume(url: str, scale: int, storage: Storage) -> StoredVolume:
    """A volume in TensorStore's formats, by URL.

    Raises:
        VolumeError: it cannot be opened.
    """
    volume = open_volume(url, scale=scale, storage=storage)
    z, y, x = (max(1, int(n)) for n in volume.read_shape)
    info = SourceInfo(
        volume.bounds, volume.channels, volume.dtype.name, volume.voxel_size_nm, (z, y, x)
    )
    return StoredVolume(url, scale, storage, info, volume.place)


def find_source(path: str, dataset: str | None, scale: int, storage: Storage) -> Source:
    """The source at a path, glob or URL; a dataset may stand behind it as ``file.h5:name``.

    Raises:
        UserError: nothing is there that can be read, or a library is not installed.
    """
    if "|" in path or ("://" in path and not path.startswith("file://")):
        suffix = _suffix(path)
        if "|" not in path and suffix is not None:
            raise ConfigError(
                f"{path}: single files are read from this machine's disks only. Copy it here first."
            )
        return stored_volume(path, scale, storage)
    local = str(local_folder(path) or path)
    local, named = split_dataset(local)
    dataset = dataset or named
    suffix = _suffix(local)
    found = Path(local)
    if dataset is not None and suffix not in _WITH_DATASETS:
        raise ConfigError(
            f"--dataset {dataset}: {local} has no datasets. HDF5, .npz and TIFF files have."
        )
    if scale and not (found.is_dir() and volume_at(found.absolute().as_uri(), storage)):
        raise ConfigError(
            f"--scale {scale}: {local} has no scales; precomputed and OME-Zarr volumes have"
        )
    if found.is_dir():
        url = found.absolute().as_uri()
        return stored_volume(url, scale, storage) if volume_at(url, storage) else slice_stack(local)
    if found.is_file():
        if suffix in _PLAIN:
            return _PLAIN[suffix](str(found.absolute()))
        if suffix in _WITH_DATASETS:
            return _WITH_DATASETS[suffix](str(found.absolute()), dataset)
        if suffix in _SLICES:
            return slice_stack(local)
        raise VolumeError(
            f"{local} is of no kind that is known here, by its name: {', '.join(sorted(_SUFFIXES))}"
        )
    if re.search(r"[*?\[]", local):
        return slice_stack(local)
    raise VolumeError(f"there is nothing at {local}")


def split_dataset(path: str) -> tuple[str, str | None]:
    """The file and the dataset of ``file.h5:name``.

    >>> split_dataset("a/em.h5:volumes/raw"), split_dataset("em.npy")
    (('a/em.h5', 'volumes/raw'), ('em.npy', None))
    """
    named = re.fullmatch(r"(.+\.(?:h5|hdf5|hdf|npz)):(.+)", path, re.IGNORECASE)
    return (named[1], named[2]) if named and not Path(path).exists() else (path, None)


def _suffix(path: str) -> str | None:
    name = path.lower()
    return next(
        (suffix for suffix in sorted(_SUFFIXES, key=len, reverse=True) if name.endswith(suffix)),
        None,
    )
