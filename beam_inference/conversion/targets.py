"""Single files, and stacks of PNG slices, as targets: what each can hold, and how it is filled.

All but HDF5 are a header and a raw array, which is written in windows. A file has its name only
once it is complete.
"""

from __future__ import annotations

import gzip
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.copying import WINDOW_BYTES, Put, moved
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.hdf5 import Hdf5Target
from beam_inference.conversion.mrc import create_mrc
from beam_inference.conversion.nifti import create_nifti
from beam_inference.conversion.npy import create_npy
from beam_inference.conversion.nrrd import create_nrrd
from beam_inference.conversion.png import PNG_CHANNELS, write_png
from beam_inference.conversion.protocol import library
from beam_inference.conversion.raw_array import RawLayout
from beam_inference.conversion.tiff import OME_DTYPES, create_tiff
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, ceil_div

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset({"float32", "float64"})
_MANY = range(1, 2**15)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """What a kind of file can hold.

    Attributes:
        suffixes: of its names, the usual one first; none for a folder of slices.
        dtypes: names of dtypes.
        channels: numbers of channels.
        voxel_size: whether it says the voxel size. offset: whether it says the offset.
        create: writes a header; None for HDF5 and PNG, which have no raw array.
        libraries: modules that it needs.
    """

    suffixes: tuple[str, ...]
    dtypes: frozenset[str]
    channels: Sequence[int]
    voxel_size: bool
    offset: bool
    create: Callable[[str, FileSpec], RawLayout] | None
    libraries: tuple[str, ...] = ()


FILE_FORMATS = {
    "tiff": FileFormat(
        (".tif", ".tiff"), OME_DTYPES, _MANY, True, False, create_tiff, ("tifffile",)
    ),
    "hdf5": FileFormat(
        (".h5", ".hdf5"), _INTEGERS | _FLOATS | {"float16"}, _MANY, True, True, None, ("h5py",)
    ),
    "nifti": FileFormat(
        (".nii", ".nii.gz"), _INTEGERS | _FLOATS, _MANY, True, True, create_nifti, ("nibabel",)
    ),
    "nrrd": FileFormat((".nrrd",), _INTEGERS | _FLOATS, _MANY, True, True, create_nrrd),
    "mrc": FileFormat(
        (".mrc", ".rec"),
        frozenset({"int8", "int16", "uint16", "float16", "float32"}),
        (1,),
        True,
        True,
        create_mrc,
        ("mrcfile",),
    ),
    "npy": FileFormat(
        (".npy",), _INTEGERS | _FLOATS | {"float16"}, _MANY, False, False, create_npy
    ),
    "png": FileFormat(
        (), frozenset(PNG_CHANNELS), (1, 2, 3, 4), False, False, None, ("PIL.Image",)
    ),
}


def format_of(path: str) -> str | None:
    """The file format that a path's name says, or None."""
    name = path.lower()
    return next(
        (
            key
            for key, each in FILE_FORMATS.items()
            if name.endswith(each.suffixes) and each.suffixes
        ),
        None,
    )


def check_file_can_hold(path: str, format: str, spec: FileSpec, drop: Sequence[str]) -> None:
    """Refuse what a file would not hold, but for what is in ``drop``: "offset" or "voxel-size".

    Raises:
        VolumeError: something would be lost.
        ConfigError: a library is not installed, or a name does not fit.
    """
    kind = FILE_FORMATS[format]
    for module in kind.libraries:
        library(module, f"--format {format}")
    if kind.suffixes and not path.lower().endswith(kind.suffixes):
        raise ConfigError(
            f"{path}: a name of format {format} ends with {' or '.join(kind.suffixes)}"
        )
    channels = PNG_CHANNELS.get(spec.dtype, ()) if format == "png" else kind.channels
    if spec.dtype not in kind.dtypes or spec.channels not in channels:
        able = [
            name
            for name, each in FILE_FORMATS.items()
            if spec.dtype in each.dtypes and spec.channels in each.channels and name != format
        ]
        raise VolumeError(
            f"{path}: {format} holds no volume of {spec.channels} "
            f"{'channel' if spec.channels == 1 else 'channels'} of {spec.dtype}, and values are "
            f"never converted here. Formats that do: {', '.join(able)}, and volumes of blocks."
        )
    lost = []
    if not kind.offset and any(spec.bounds.start):
        lost.append(("offset", f"the offset {_commas(spec.bounds.start)} (z, y, x)"))
    if not kind.voxel_size and spec.voxel_size_nm is not None:
        lost.append(("voxel-size", f"the voxel size {_commas(spec.voxel_size_nm)} nm (z, y, x)"))
    if kind.offset and any(spec.bounds.start) and spec.voxel_size_nm is None and format != "mrc":
        raise ConfigError(
            f"{path}: {format} states an offset as a length, which needs --voxel-size"
        )
    refused = [each for each in lost if each[0] not in drop]
    if refused:
        raise VolumeError(
            f"{path}: {format} has no place for {' and '.join(text for _, text in refused)}, which "
            "would be lost. To accept that: --drop "
            f"{','.join([*drop, *(name for name, _ in refused)])}"
        )


def grain_of(format: str) -> Zyx:
    """What is best written at a time: HDF5's chunks; of raw arrays any window."""
    return (64, 64, 64) if format == "hdf5" else (1, 1, 1)


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A target while it is filled.

    Attributes:
        put: takes the voxels of a box of the volume.
        finish: makes the file what it is to be, once all are there, step by step.
        steps: how many steps that has.
    """

    put: Put
    finish: Callable[[], Iterator[None]]
    steps: int


@contextmanager
def fill_file(path: str, format: str, spec: FileSpec, dataset: str | None) -> Iterator[FileTarget]:
    """Fill a file: it gets its name at the end; when something fails, nothing is left.

    Raises:
        VolumeError: there is no space for it, or no permission.
    """
    target = Path(path)
    partial, scratch = (target.with_name(f".{target.name}.{what}") for what in ("partial", "array"))
    size = math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
    try:
        free = shutil.disk_usage(target.parent).free
        if format != "hdf5" and size > free:
            raise VolumeError(
                f"{path} needs {size / 2**30:.1f} GiB, and {target.parent} has {free / 2**30:.1f} "
                "GiB left"
            )
        _remove(partial)  # of a process that was killed
        try:
            with _begun(
                partial, scratch, format, spec, dataset, packed=target.suffix.lower() == ".gz"
            ) as begun:
                yield begun
            _remove(target)
            partial.replace(target)
        finally:
            _remove(partial)
            _remove(scratch)
    except OSError as error:
        raise VolumeError(f"cannot write {path}: {error.strerror or error}") from None


@contextmanager
def _begun(
    path: Path, scratch: Path, format: str, spec: FileSpec, dataset: str | None, *, packed: bool
) -> Iterator[FileTarget]:
    z, y, x = spec.bounds.start
    origin = (-z, -y, -x)
    if format == "hdf5":
        file = Hdf5Target(str(path), dataset, spec)
        try:
            yield FileTarget(
                lambda box, array: file.write(moved(box, origin), array), lambda: iter(()), 0
            )
        finally:
            file.close()
        return
    create = FILE_FORMATS[format].create
    raw = scratch if packed or create is None else path
    raw.write_bytes(b"")
    layout = spec.layout(0) if create is None else create(str(raw), spec)
    os.truncate(raw, max(layout.stop, raw.stat().st_size))

    def put(box: BoundingBox, array: NDArray[Any]) -> None:
        layout.write(str(raw), moved(box, origin), array)

    if create is None:
        path.mkdir()
        yield FileTarget(put, lambda: _to_slices(raw, layout, spec, path), spec.bounds.shape[0])
    elif packed:
        yield FileTarget(put, lambda: _to_gzip(raw, path), ceil_div(layout.stop, WINDOW_BYTES))
    else:
        yield FileTarget(put, lambda: iter(()), 0)


def _to_slices(raw: Path, layout: RawLayout, spec: FileSpec, folder: Path) -> Iterator[None]:
    depth, y, x = spec.bounds.shape
    digits = max(4, len(str(depth - 1)))
    for z in range(depth):
        plane = layout.read(str(raw), BoundingBox((z, 0, 0), (z + 1, y, x)))
        write_png(folder / f"{z:0{digits}d}.png", plane[:, 0])
        yield


def _to_gzip(raw: Path, path: Path) -> Iterator[None]:
    with raw.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as packed:
        while _piece(source, packed):
            yield


def _piece(source: IO[bytes], packed: gzip.GzipFile) -> bool:
    data = source.read(WINDOW_BYTES)
    packed.write(data)
    return bool(data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        os.unlink(path)


def _commas(values: Sequence[float]) -> str:
    return ",".join(f"{each:g}" for each in values)
