"""Single files and stacks of PNG slices as targets: what each can hold, and how it is written.

All but HDF5 are a header and a raw array, which is written in windows. A file gets its name only
once it is complete.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from beam_inference.conversion.copying import WINDOW_BYTES, Put
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.hdf5 import HDF5_GRAIN, Hdf5Target
from beam_inference.conversion.mrc import create_mrc
from beam_inference.conversion.nifti import create_nifti
from beam_inference.conversion.npy import create_npy
from beam_inference.conversion.nrrd import create_nrrd
from beam_inference.conversion.png import PNG_CHANNELS, write_png
from beam_inference.conversion.protocol import FREE, Voxels, import_library
from beam_inference.conversion.raw_array import RawLayout, reserve
from beam_inference.conversion.tiff import OME_DTYPES, create_tiff
from beam_inference.environment import format_bytes
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.file_locks import hold_lock

_INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_FLOATS = frozenset({"float32", "float64"})
_MANY = range(1, 2**15)


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A kind of file, and what it can hold.

    Attributes:
        suffixes: suffixes of file names, the usual one first; none for a folder of slices.
        dtypes: names of the dtypes it can hold.
        channels: numbers of channels it can hold.
        has_voxel_size: whether it states the voxel size.
        has_offset: whether it states the offset.
        create: writes a header; None for HDF5 and PNG, which have no raw array.
        libraries: names of the modules that it needs.
        grain: shape, ZYX, that is best written at a time.
    """

    suffixes: tuple[str, ...]
    dtypes: frozenset[str]
    channels: Sequence[int]
    has_voxel_size: bool
    has_offset: bool
    create: Callable[[str, FileSpec], RawLayout] | None
    libraries: tuple[str, ...] = ()
    grain: Zyx = FREE


FILE_FORMATS = {
    "tiff": FileFormat(
        suffixes=(".tif", ".tiff"),
        dtypes=OME_DTYPES,
        channels=_MANY,
        has_voxel_size=True,
        has_offset=False,
        create=create_tiff,
        libraries=("tifffile",),
    ),
    "hdf5": FileFormat(
        suffixes=(".h5", ".hdf5"),
        dtypes=_INTEGERS | _FLOATS | {"float16"},
        channels=_MANY,
        has_voxel_size=True,
        has_offset=True,
        create=None,
        libraries=("h5py",),
        grain=HDF5_GRAIN,
    ),
    "nifti": FileFormat(
        suffixes=(".nii", ".nii.gz"),
        dtypes=_INTEGERS | _FLOATS,
        channels=_MANY,
        has_voxel_size=True,
        has_offset=True,
        create=create_nifti,
        libraries=("nibabel",),
    ),
    "nrrd": FileFormat(
        suffixes=(".nrrd",),
        dtypes=_INTEGERS | _FLOATS,
        channels=_MANY,
        has_voxel_size=True,
        has_offset=True,
        create=create_nrrd,
    ),
    "mrc": FileFormat(
        suffixes=(".mrc", ".rec"),
        dtypes=frozenset({"int8", "int16", "uint16", "float16", "float32"}),
        channels=(1,),
        has_voxel_size=True,
        has_offset=True,
        create=create_mrc,
        libraries=("mrcfile",),
    ),
    "npy": FileFormat(
        suffixes=(".npy",),
        dtypes=_INTEGERS | _FLOATS | {"float16"},
        channels=_MANY,
        has_voxel_size=False,
        has_offset=False,
        create=create_npy,
    ),
    "png": FileFormat(
        suffixes=(),
        dtypes=frozenset(PNG_CHANNELS),
        channels=(1, 2, 3, 4),
        has_voxel_size=False,
        has_offset=False,
        create=None,
        libraries=("PIL.Image",),
    ),
}


def format_of(path: str) -> str | None:
    """The file format that a path's suffix stands for, or None."""
    name = path.lower()
    for format, kind in FILE_FORMATS.items():
        if kind.suffixes and name.endswith(kind.suffixes):
            return format
    return None


def check_file_can_hold(path: str, format: str, spec: FileSpec, drop: Sequence[str]) -> None:
    """Refuse a volume that a file would not hold whole.

    Args:
        path: path of the file.
        format: a key of :data:`FILE_FORMATS`.
        spec: the volume.
        drop: what may be lost: "offset", "voxel-size".

    Raises:
        VolumeError: something would be lost.
        ConfigError: a library is not installed, or a name does not fit.
    """
    kind = FILE_FORMATS[format]
    for module in kind.libraries:
        import_library(module, f"--format {format}")
    if kind.suffixes and not path.lower().endswith(kind.suffixes):
        raise ConfigError(
            f"{path}: a name of format {format} ends with {' or '.join(kind.suffixes)}"
        )
    _check_values(path, format, spec)
    has_offset = any(spec.bounds.start)
    if kind.has_offset and has_offset and spec.voxel_size_nm is None and format != "mrc":
        raise ConfigError(
            f"{path}: {format} states an offset as a length, which needs --voxel-size"
        )
    lost = {}
    if has_offset and not kind.has_offset:
        lost["offset"] = f"the offset {_commas(spec.bounds.start)} (z, y, x)"
    if spec.voxel_size_nm is not None and not kind.has_voxel_size:
        lost["voxel-size"] = f"the voxel size {_commas(spec.voxel_size_nm)} nm (z, y, x)"
    refused = {name: text for name, text in lost.items() if name not in drop}
    if refused:
        raise VolumeError(
            f"{path}: {format} has no place for {' and '.join(refused.values())}, which "
            f"would be lost. To accept that: --drop {','.join([*drop, *refused])}"
        )


def _check_values(path: str, format: str, spec: FileSpec) -> None:
    """Refuse dtypes and numbers of channels that a format cannot hold. Raises VolumeError."""
    kind = FILE_FORMATS[format]
    channels = PNG_CHANNELS.get(spec.dtype, ()) if format == "png" else kind.channels
    if spec.dtype in kind.dtypes and spec.channels in channels:
        return
    able = [
        name
        for name, other in FILE_FORMATS.items()
        if spec.dtype in other.dtypes and spec.channels in other.channels and name != format
    ]
    raise VolumeError(
        f"{path}: {format} holds no volume of {spec.channels} "
        f"{'channel' if spec.channels == 1 else 'channels'} of {spec.dtype}, and values are "
        f"never converted here. Formats that do: {', '.join([*able, 'volumes of blocks'])}."
    )


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file while it is being written.

    Attributes:
        put: writes the voxels of a box of the volume.
        finish: makes the final file, step by step, once all voxels are there.
        steps: number of steps of ``finish``.
    """

    put: Put
    finish: Callable[[], Iterator[None]] = lambda: iter(())
    steps: int = 0


@contextmanager
def fill_file(
    path: str, format: str, spec: FileSpec, dataset: str | None = None
) -> Iterator[FileTarget]:
    """Write a file: it gets its name at the end; when something fails, nothing is left.

    One process at a time writes a file: drafts that it finds are of others that were killed.

    Args:
        path: path of the file, or of a folder of slices; it is replaced.
        format: a key of :data:`FILE_FORMATS`.
        spec: the volume.
        dataset: name of the dataset in an HDF5 file.

    Raises:
        StateError: another process writes it.
        VolumeError: there is no space for it, or no permission.
    """
    target = Path(path)
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(hold_lock(target.with_name(f".{target.name}.lock"), 1))
            except TimeoutError:
                raise StateError(
                    f"another process writes {path}: wait until it has ended, or choose another "
                    "name"
                ) from None
            yield stack.enter_context(_fill_alone(target, format, spec, dataset))
    except OSError as error:
        raise VolumeError(f"cannot write {path}: {error.strerror or error}") from None


@contextmanager
def _fill_alone(
    target: Path, format: str, spec: FileSpec, dataset: str | None
) -> Iterator[FileTarget]:
    """Write a file that no other process writes; raises OSError, too."""
    partial = target.with_name(f".{target.name}.partial")
    scratch = target.with_name(f".{target.name}.array")
    free = shutil.disk_usage(target.parent).free
    if format != "hdf5" and spec.nbytes > free:
        raise VolumeError(
            f"{target} needs {format_bytes(spec.nbytes)}, and {target.parent} has "
            f"{format_bytes(free)} left. Choose another place, or make room."
        )
    for left in (partial, scratch):  # by a process that was killed
        _remove(left)
    try:
        if format == "hdf5":
            opened = _fill_hdf5(partial, spec, dataset)
        elif format == "png":
            opened = _fill_slices(partial, scratch, spec)
        elif target.suffix.lower() == ".gz":
            opened = _fill_gzip(partial, scratch, format, spec)
        else:
            opened = _fill_raw(partial, format, spec)
        with opened as file:
            yield file
        _remove(target)
        partial.replace(target)
    finally:
        _remove(partial)
        _remove(scratch)


@contextmanager
def _fill_hdf5(path: Path, spec: FileSpec, dataset: str | None) -> Iterator[FileTarget]:
    file = Hdf5Target(str(path), dataset, spec)
    to_file = zyx.negative(spec.bounds.start)
    try:
        yield FileTarget(lambda box, array: file.write(box.translate(to_file), array))
    finally:
        file.close()


@contextmanager
def _fill_raw(path: Path, format: str, spec: FileSpec) -> Iterator[FileTarget]:
    layout = _create_raw(path, format, spec)
    yield FileTarget(_put_into(path, layout, spec))


@contextmanager
def _fill_gzip(path: Path, raw: Path, format: str, spec: FileSpec) -> Iterator[FileTarget]:
    layout = _create_raw(raw, format, spec)
    steps = zyx.ceil_div(layout.stop, WINDOW_BYTES)
    yield FileTarget(_put_into(raw, layout, spec), lambda: _to_gzip(raw, path), steps)


@contextmanager
def _fill_slices(folder: Path, raw: Path, spec: FileSpec) -> Iterator[FileTarget]:
    layout = spec.layout(0)
    with raw.open("xb") as file:
        reserve(file, layout.stop)
    folder.mkdir()
    yield FileTarget(
        _put_into(raw, layout, spec),
        lambda: _to_slices(raw, layout, spec, folder),
        steps=spec.bounds.shape[0],
    )


def _create_raw(path: Path, format: str, spec: FileSpec) -> RawLayout:
    """Create a file with a header and an array of zeros."""
    create = FILE_FORMATS[format].create
    assert create is not None, f"{format} has no raw array"
    path.open("xb").close()
    layout = create(str(path), spec)
    with path.open("r+b") as file:
        reserve(file, max(layout.stop, path.stat().st_size))
    return layout


def _put_into(path: Path, layout: RawLayout, spec: FileSpec) -> Put:
    to_file = zyx.negative(spec.bounds.start)

    def put(box: BoundingBox, array: Voxels) -> None:
        layout.write(str(path), box.translate(to_file), array)

    return put


def _to_slices(raw: Path, layout: RawLayout, spec: FileSpec, folder: Path) -> Iterator[None]:
    depth, y, x = spec.bounds.shape
    digits = max(4, len(str(depth - 1)))
    for z in range(depth):
        plane = layout.read(str(raw), BoundingBox((z, 0, 0), (z + 1, y, x)))
        write_png(folder / f"{z:0{digits}d}.png", plane[:, 0])
        yield


def _to_gzip(raw: Path, path: Path) -> Iterator[None]:
    with raw.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as packed:
        while _copy_piece(source, packed):
            yield


def _copy_piece(source: IO[bytes], packed: gzip.GzipFile) -> bool:
    data = source.read(WINDOW_BYTES)
    packed.write(data)
    return bool(data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        os.unlink(path)


def _commas(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)
