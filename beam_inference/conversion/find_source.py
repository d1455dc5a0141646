"""The source that a path, glob or URL names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage, check_url
from beam_inference.conversion.czi import czi_source
from beam_inference.conversion.dicom import dicom_series
from beam_inference.conversion.dicom_files import holds_dicom, is_dicom_folder
from beam_inference.conversion.fetched_source import fetched_source, launch_errors
from beam_inference.conversion.hdf5 import hdf5_source
from beam_inference.conversion.ims import ims_source
from beam_inference.conversion.lif import lif_source
from beam_inference.conversion.mrc import mrc_source
from beam_inference.conversion.named_files import path_errors
from beam_inference.conversion.nd2 import nd2_source
from beam_inference.conversion.nifti import nifti_source
from beam_inference.conversion.npy import npy_source, npz_source
from beam_inference.conversion.nrrd import nrrd_source
from beam_inference.conversion.protocol import Read, Source, SourceInfo
from beam_inference.conversion.raw_array import RawSource, remote_grain
from beam_inference.conversion.stacks import is_slice, slice_stack
from beam_inference.conversion.stored_files import StoredFile, is_url
from beam_inference.conversion.tiff import TiffPages, tiff_source
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.job.unfinished import Making
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import local_folder
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.remote_files import RemoteFile, find_remote_file
from beam_inference.volumes.remote_names import HOW_TO_NAME, list_remote_files, names_files

_HDF5 = (".h5", ".hdf5", ".hdf")
_WITHOUT_DATASETS: dict[str, Callable[[StoredFile], RawSource]] = {
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
    ".czi": czi_source,
    ".dcm": dicom_series,
    **dict.fromkeys(_HDF5, hdf5_source),
    ".lif": lif_source,
    ".nd2": nd2_source,
    ".npz": npz_source,
}
_SLIDES = (".svs", ".ndpi", ".scn", ".bif", ".qptiff", ".btf", ".tf8")
_TIFFS = (".tif", ".tiff", *_SLIDES)
_WITH_SCALES: dict[str, Callable[[str, str | None, int], Source]] = {
    ".ims": ims_source,
    **dict.fromkeys(_TIFFS, tiff_source),
}
_SLICES = (".png", ".jpg", ".jpeg")
_SUFFIXES = (*_WITHOUT_DATASETS, *_WITH_DATASETS, *_WITH_SCALES, *_SLICES)
_BIO_FORMATS = "bioformats2raw FILE OUT.zarr"
_WAYS_OUT = {
    **dict.fromkeys(
        (".mrxs", ".vms", ".vmu"),
        "vips dzsave, or OpenSlide (pip install "
        "openslide-python openslide-bin; LGPL), which saves a region as TIFF",
    ),
    **dict.fromkeys(
        (".oif", ".oib"),
        "pip install oiffile, and tifffile.imwrite of what "
        "oiffile.imread returns; or bioformats2raw FILE OUT.zarr",
    ),
    **dict.fromkeys((".lof", ".xlef", ".xlif", ".xlcf"), "saving it as LIF or OME-TIFF in LAS X"),
    **dict.fromkeys(
        (
            ".vsi",
            ".oir",
            ".dv",
            ".r3d",
            ".sld",
            ".sldy",
            ".zvi",
            ".lsm",
            ".mvd2",
            ".ets",
            ".stk",
            ".flex",
            ".ipl",
        ),
        _BIO_FORMATS + " of Bio-Formats (GPL)",
    ),
}
"""What makes a file readable that is not read here, by its suffix."""


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """A volume that :func:`beam_inference.volumes.opening.open_volume` reads.

    Attributes:
        url: URL of the volume.
        scale: number of the scale in a pyramid.
        storage: how object stores are reached.
        info: its extent, dtype, and so on.
        place: canonical form of the URL.
        making: how far a job has made it.
    """

    url: str
    scale: int
    storage: Storage
    info: SourceInfo
    place: str
    making: Making = field(default_factory=Making)

    @property
    def identity(self) -> Json:
        """URL and scale, and how far it is made: nobody writes to a source meanwhile."""
        return {"volume": self.url, "scale": self.scale, **self.making.description}

    @property
    def files(self) -> Sequence[StoredFile]:
        """Its folder, if that is one of this machine."""
        folder = local_folder(self.url)
        return [] if folder is None else [str(folder)]

    def open(self) -> Read:
        """Open the volume."""
        return open_volume(self.url, scale=self.scale, storage=self.storage).read


def tensorstore_volume(url: str, scale: int, storage: Storage) -> StoredVolume:
    """The volume at a URL, in a format of TensorStore's.

    Raises:
        VolumeError: it cannot be opened.
    """
    volume = open_volume(url, scale=scale, storage=storage)
    info = SourceInfo(
        volume.bounds,
        volume.channels,
        volume.dtype.name,
        volume.voxel_size_nm,
        grain=zyx.triple(max(1, int(n)) for n in volume.read_shape),
        rest=volume.origin.rest,
    )
    return StoredVolume(url, scale, storage, info, volume.place)


def find_source(path: str, dataset: str | None, scale: int, storage: Storage) -> Source:
    """Find the source at a path, glob or URL; a dataset may stand behind it as ``file.h5:name``.

    Args:
        path: path, glob or URL.
        dataset: name of a dataset in a file with several.
        scale: number of a scale in a volume with several; 0 is the finest.
        storage: how object stores are reached.

    Raises:
        UserError: there is nothing that can be read, or a library is not installed.
    """
    if "|" in path:  # it separates the parts of TensorStore's own URLs
        return tensorstore_volume(_inside(path, dataset), scale, storage)
    if is_url(path):
        with launch_errors():
            return _remote_source(path, dataset, scale, storage)
    with path_errors(path):
        local, dataset_in_path = split_dataset(str(local_folder(path) or path))
        return _local_source(local, dataset or dataset_in_path, scale, storage)


def _inside(url: str, dataset: str | None) -> str:
    """The URL of a volume in a group, by its name.

    Raises:
        ConfigError: the name leads elsewhere.
    """
    if dataset is None:
        return url
    if {"", ".", ".."}.intersection(dataset.split("/")):
        raise ConfigError(f"--dataset {dataset}: expected the path of a volume inside of {url}")
    return f"{url.rstrip('/')}/{quote(dataset)}"


def _remote_source(url: str, dataset: str | None, scale: int, storage: Storage) -> Source:
    """The source in an object store, or on a web server."""
    url, dataset_in_url = split_dataset(url)
    dataset = dataset or dataset_in_url
    check_url(url)
    suffix = _suffix(url)
    if names_files(url):
        kind = _kind_of_files(list_remote_files(url, storage), storage)
        return _files_source(url, kind, dataset, scale, storage)
    if suffix is not None:
        _check_choice(url, suffix, dataset, scale)
        if suffix in _SLICES:
            return slice_stack(url, storage)
        if suffix == ".dcm":
            return dicom_series(url, dataset, storage)
        return _remote_file_source(find_remote_file(url, storage), suffix, dataset, scale)
    if dataset is None and volume_at(url, storage) is None:
        if re.match("https?://", url):
            raise VolumeError(f"there is no volume at {url}. If files lie there: {HOW_TO_NAME}")
        pattern = f"{url.rstrip('/')}/*"
        kind = _kind_of_files(list_remote_files(pattern, storage), storage)
        if kind is not None:
            return _files_source(pattern, kind, dataset, scale, storage)
    return tensorstore_volume(_inside(url, dataset), scale, storage)


def _files_source(
    url: str, kind: str | None, dataset: str | None, scale: int, storage: Storage
) -> Source:
    """The volume in several files of a kind: a series of DICOM, or slices."""
    _check_choice(url, kind, dataset, scale)
    return dicom_series(url, dataset, storage) if kind == ".dcm" else slice_stack(url, storage)


def _kind_of_files(urls: Sequence[str], storage: Storage) -> str | None:
    """The suffix of DICOM or of slices, whichever some files are; None if of neither."""
    if not any(_suffix(url) == ".dcm" for url in urls):
        slices = [url for url in urls if is_slice(url)]
        if slices:
            return _suffix(slices[0])
    return ".dcm" if holds_dicom(urls, storage) else None


def _remote_file_source(file: RemoteFile, suffix: str, dataset: str | None, scale: int) -> Source:
    """The volume in one file: read in parts where its reader can do that, else copied here."""
    if suffix in _WITHOUT_DATASETS:
        return _read_in_parts(_WITHOUT_DATASETS[suffix](file))
    if suffix == ".npz":
        return npz_source(file, dataset)
    if suffix in _TIFFS:
        return _read_in_parts(tiff_source(file, dataset, scale))
    if suffix in _HDF5:
        return hdf5_source(file, dataset)
    if suffix == ".ims":
        return ims_source(file, dataset, scale)
    return fetched_source(file, dataset, scale, _file_source)


def _read_in_parts(source: RawSource | TiffPages) -> Source:
    """A source of which chunks take whole stretches, so that requests are few."""
    if isinstance(source, TiffPages) or source.packing is not None:
        return source
    return replace(source, info=replace(source.info, grain=remote_grain(source.layout)))


def _check_choice(name: str, suffix: str | None, dataset: str | None, scale: int) -> None:
    """Refuse a dataset or a scale of what has none. Raises ConfigError."""
    if dataset is not None and suffix not in {*_WITH_DATASETS, *_WITH_SCALES}:
        raise ConfigError(
            f"--dataset {dataset}: {name} has no datasets. HDF5, .npz, TIFF, DICOM and files of "
            "microscopes have."
        )
    if scale and suffix not in _WITH_SCALES:
        raise ConfigError(
            f"--scale {scale}: {name} has no scales; precomputed and OME-Zarr volumes, IMS and "
            "slides have"
        )


def _local_source(local: str, dataset: str | None, scale: int, storage: Storage) -> Source:
    path = Path(local)
    suffix = _suffix(local)
    if path.is_dir() and not is_dicom_folder(path):
        url = path.absolute().as_uri()
        if dataset is not None:
            return tensorstore_volume(_inside(url, dataset), scale, storage)
        if volume_at(url, storage):
            return tensorstore_volume(url, scale, storage)
    is_series = path.is_dir() and is_dicom_folder(path)
    is_stack = path.is_dir() or (not path.is_file() and re.search(r"[*?\[]", local) is not None)
    of_what = None if is_stack and suffix != ".dcm" else suffix
    _check_choice(local, ".dcm" if is_series else of_what, dataset, scale)
    if is_series or (suffix == ".dcm" and not path.is_file()):
        return dicom_series(local, dataset)
    if path.is_file():
        return _file_source(local, dataset, scale)
    if is_stack:
        return slice_stack(local)
    raise VolumeError(f"there is nothing at {local}")


def _file_source(local: str, dataset: str | None, scale: int) -> Source:
    suffix = _suffix(local)
    path = str(Path(local).absolute())
    if suffix in _WITHOUT_DATASETS:
        return _WITHOUT_DATASETS[suffix](path)
    if suffix in _WITH_DATASETS:
        return _WITH_DATASETS[suffix](path, dataset)
    if suffix in _WITH_SCALES:
        return _WITH_SCALES[suffix](path, dataset, scale)
    if suffix in _SLICES:
        return slice_stack(local)
    way_out = _WAYS_OUT.get(Path(local).suffix.lower())
    if way_out is not None:
        raise VolumeError(f"{local} is of a kind that is not read here. What helps: {way_out}")
    raise VolumeError(
        f"the name of {local} is of no known kind: expected {', '.join(sorted(_SUFFIXES))}"
    )


def split_dataset(path: str) -> tuple[str, str | None]:
    """Split ``file.h5:name`` into the file and the dataset.

    >>> split_dataset("a/em.h5:volumes/raw"), split_dataset("em.npy")
    (('a/em.h5', 'volumes/raw'), ('em.npy', None))
    """
    suffixes = "|".join(map(re.escape, (*_WITH_DATASETS, *_WITH_SCALES)))
    match = re.fullmatch(rf"(.+(?:{suffixes})):(.+)", path, re.IGNORECASE)
    if match is None or Path(path).exists():
        return path, None
    return match[1], match[2]


def _suffix(path: str) -> str | None:
    """The longest of all known suffixes that a path ends with, or None."""
    name = path.lower()
    longest_first = sorted(_SUFFIXES, key=len, reverse=True)
    return next((suffix for suffix in longest_first if name.endswith(suffix)), None)
