"""HDF5: a dataset of a file, with voxel size and offset as CREMI's files and Fiji's plugin state them."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.protocol import (
    FREE,
    Read,
    SourceInfo,
    as_czyx,
    library,
    number_dtype,
    voxel_offset,
)
from beam_inference.conversion.raw_array import file_identity
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

_EDGE = 64
_DEFAULT_NAME = "main"


@dataclass(frozen=True, slots=True)
class Hdf5Source:
    """A dataset with the axes z, y, x and perhaps one of channels.

    Attributes:
        path: of the file.
        dataset: its name in there.
        axes: a letter for each of its axes, such as "CZYX".
        info: what is known of it.
    """

    path: str
    dataset: str
    axes: str
    info: SourceInfo

    @property
    def identity(self) -> dict[str, Any]:
        """The file as it is."""
        return file_identity(self.path) | {"dataset": self.dataset}

    def open(self) -> Read:
        """Open the file; HDF5 reads one window at a time."""
        file = _opened(self.path)
        dataset = file[self.dataset]
        origin = self.info.bounds.start
        lock = threading.Lock()

        def read(box: BoundingBox) -> NDArray[Any]:
            windows = {
                axis: slice(a - o, b - o)
                for axis, a, b, o in zip("ZYX", box.start, box.stop, origin, strict=True)
            }
            try:
                with lock:
                    array = dataset[tuple(windows.get(axis, slice(None)) for axis in self.axes)]
            except (OSError, ValueError) as error:
                raise PermanentReadError(
                    f"cannot read {box} of {self.path}:{self.dataset}: {error}"
                ) from error
            return np.ascontiguousarray(as_czyx(array, self.axes), dtype=self.info.dtype)

        weakref.finalize(read, file.close)
        return read


def _opened(path: str) -> Any:
    h5py = library("h5py", "HDF5")
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401 - further compressions, where they are installed
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise VolumeError(f"{path} cannot be read as HDF5: {error}") from None


def hdf5_source(path: str, name: str | None) -> Hdf5Source:
    """The dataset ``name`` of a file, or the only one with three axes or four.

    Raises:
        VolumeError: it is not there, or no volume of numbers.
        ConfigError: h5py is not installed.
    """
    with _opened(path) as file:
        found = _volumes(file)
        if name is None and len(found) != 1:
            raise VolumeError(f"{path} holds {_told(found)}: name one, as {path}:NAME")
        name = (name or found[0]).strip("/")
        if name not in file or not hasattr(file[name], "shape"):
            raise VolumeError(f"{path} has no dataset {name}; it holds {_told(found)}")
        dataset = file[name]
        axes = _axes(f"{path}:{name}", dataset)
        extent = dict(zip(axes, dataset.shape, strict=True))
        shape: Zyx = (int(extent["Z"]), int(extent["Y"]), int(extent["X"]))
        size, offset, notes = _geometry(dataset)
        chunks = dict(zip(axes, dataset.chunks or (), strict=bool(dataset.chunks)))
        grain: Zyx = (chunks["Z"], chunks["Y"], chunks["X"]) if chunks else FREE
        stop = (offset[0] + shape[0], offset[1] + shape[1], offset[2] + shape[2])
        dtype = number_dtype(dataset.dtype, f"{path}:{name}")
        info = SourceInfo(
            BoundingBox(offset, stop), int(extent.get("C", 1)), dtype, size, grain, notes
        )
        if dataset.size:
            try:
                dataset[(0,) * dataset.ndim]
            except OSError as error:
                raise VolumeError(
                    f"{path}:{name} cannot be decoded: {error}. If it needs a plugin: pip install "
                    "hdf5plugin"
                ) from None
    return Hdf5Source(path, name, axes, info)


def _volumes(file: Any) -> list[str]:
    found: list[str] = []
    file.visititems(
        lambda name, item: found.append(name) if len(getattr(item, "shape", ())) in (3, 4) else None
    )
    return found


def _told(found: list[str]) -> str:
    return f"the volumes {', '.join(found[:10])}" if found else "no dataset with three axes or four"


def _axes(name: str, dataset: Any) -> str:
    """By the labels of its dimensions, else (channels,) z, y, x."""
    labels = "".join(str(dim.label)[:1].upper() for dim in dataset.dims)
    axes = labels if len(labels) == dataset.ndim else "CZYX"[-dataset.ndim :]
    if sorted(axes) not in (sorted("ZYX"), sorted("CZYX")) or len(axes) != dataset.ndim:
        raise VolumeError(
            f"{name} has the axes {axes} of {dataset.shape}; expected z, y, x, and perhaps channels"
        )
    return axes


def _geometry(dataset: Any) -> tuple[VoxelSizeNm | None, Zyx, tuple[str, ...]]:
    """Voxel size and offset, by ``resolution`` and ``offset`` (nm) or ``element_size_um``; what is not kept."""
    values = {
        key: [float(each) for each in np.ravel(dataset.attrs[key])]
        for key in ("resolution", "offset", "element_size_um")
        if key in dataset.attrs
        and np.size(dataset.attrs[key]) == 3
        and np.asarray(dataset.attrs[key]).dtype.kind in "iuf"
    }
    sizes = values.get("resolution") or [
        float(f"{1e3 * each:.9g}") for each in values.get("element_size_um", [])
    ]
    if not sizes or min(sizes) <= 0:
        return None, (0, 0, 0), ()
    size = (sizes[0], sizes[1], sizes[2])
    offset = voxel_offset(tuple(values.get("offset", (0.0, 0.0, 0.0))), size)
    if offset is None:
        return size, (0, 0, 0), ("its offset lies between voxels: it is taken as 0",)
    return size, offset, ()


class Hdf5Target:
    """A new file with one dataset, in chunks that are compressed with gzip.

    Args:
        path: of the file.
        name: of the dataset; "main" if None.
        spec: what it is to hold.
    """

    def __init__(self, path: str, name: str | None, spec: FileSpec) -> None:
        self._file = library("h5py", "HDF5").File(path, "w")
        self._origin = spec.bounds.start
        edges = [min(_EDGE, n) for n in spec.bounds.shape]
        self._dataset = self._file.create_dataset(
            name or _DEFAULT_NAME,
            shape=spec.shape,
            dtype=np.dtype(spec.dtype).newbyteorder("<"),
            chunks=tuple([1] * (len(spec.shape) - 3) + edges),
            compression="gzip",
            compression_opts=1,
            shuffle=np.dtype(spec.dtype).itemsize > 1,
        )
        for dim, label in zip(self._dataset.dims, "czyx"[-len(spec.shape) :], strict=True):
            dim.label = label
        if spec.voxel_size_nm is not None:
            self._dataset.attrs["resolution"] = spec.voxel_size_nm
            self._dataset.attrs["offset"] = [
                a * s for a, s in zip(self._origin, spec.voxel_size_nm, strict=True)
            ]

    def write(self, box: BoundingBox, array: NDArray[Any]) -> None:
        """Write (channels, *box.shape) voxels to a box counted from the first voxel."""
        window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        self._dataset[(..., *window)] = array if self._dataset.ndim == 4 else array[0]

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
