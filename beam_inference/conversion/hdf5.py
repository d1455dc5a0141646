"""HDF5 files: one dataset, with voxel size and offset as CREMI and Fiji's plugin state them."""

from __future__ import annotations

import io
import math
import posixpath
import re
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.hdf5_chunks import (
    ChunkIndex,
    absence_notes,
    check_chunk_places,
    check_chunks,
    check_plain_size,
    chunk_parts,
)
from beam_inference.conversion.hdf5_file import (
    as_argument,
    file_of_argument,
    open_file,
    open_hdf5,
)
from beam_inference.conversion.hdf5_filters import check_filters
from beam_inference.conversion.hdf5_links import (
    check_voxels_are_near,
    files_beside,
    follow_links,
)
from beam_inference.conversion.hdf5_virtual import VirtualChunks
from beam_inference.conversion.process_apart import run_apart
from beam_inference.conversion.protocol import (
    FREE,
    Placement,
    Read,
    SourceInfo,
    Voxels,
    as_czyx,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    stated_voxel_size,
    voxel_offset,
)
from beam_inference.conversion.raw_array import RawLayout, remote_grain
from beam_inference.conversion.stored_files import StoredFile, file_identity, hash_contents
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.remote_files import RemoteFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHUNK_EDGE = 64
DEFAULT_DATASET = "main"
"""Name of the dataset of a new file where none is given."""
_NAMES_IN_MESSAGE = 10
_NM_PER_UM = 1e3
_BIGDATAVIEWER = re.compile(r"t\d+/s\d+/\d+/cells")
"""Datasets of BigDataViewer, whose format keeps unsigned integers of 16 bits as signed ones."""


@dataclass(frozen=True, slots=True)
class Hdf5Source:
    """A dataset with the axes z, y, x, and perhaps one of channels and one of a single time.

    Attributes:
        path: the file.
        dataset: name of the dataset in the file.
        axes: a letter for each axis of the dataset, such as "CZYX".
        info: its extent, dtype, and so on.
        parts: other files that a virtual dataset is put together from.
    """

    path: StoredFile
    dataset: str
    axes: str
    info: SourceInfo
    parts: tuple[StoredFile, ...] = ()

    @property
    def identity(self) -> Json:
        """Path, size and time of the file, the dataset's name, and the files of its parts."""
        of_parts = {"parts": hash_contents(self.parts)} if self.parts else {}
        return file_identity(self.path) | {"dataset": self.dataset, **of_parts}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The file, and those that a virtual dataset is put together from."""
        return [self.path, *self.parts]

    def open(self) -> Read:
        """Open the file; HDF5 reads one window at a time.

        What a window needs of a file in an object store is fetched before, by several threads at a
        time.
        """
        file, remote = open_hdf5(self.path)
        dataset = file[self.dataset]
        bounds = self.info.bounds
        chunks = ChunkIndex(dataset) if dataset.chunks else None
        virtual = VirtualChunks(open_file, self.path, dataset) if dataset.is_virtual else None
        lock = threading.Lock()

        def read(box: BoundingBox) -> Voxels:
            windows = dict(zip("ZYX", box.slices_in(bounds), strict=True))
            index = tuple(windows.get(axis, slice(None)) for axis in self.axes)
            try:
                held = []
                if remote is not None:
                    with lock:
                        parts = self._parts(dataset, chunks, index, box)
                    held = remote.fetch(parts)
                with lock, nullcontext() if remote is None else remote.hold(held):
                    if chunks is not None:
                        check_chunks(dataset, chunks, index)
                    if virtual is not None:
                        virtual.check(index)
                    array = dataset[index]
            except (OSError, ValueError, KeyError, RuntimeError, PermanentReadError) as error:
                raise PermanentReadError(
                    f"cannot read {box} of {self.path}:{self.dataset}: {error}"
                ) from error
            array = array.reshape(_without_time(self.axes, array.shape))
            czyx = as_czyx(array, self.axes.replace("T", ""))
            return np.ascontiguousarray(czyx, dtype=self.info.dtype)

        weakref.finalize(read, file.close)
        return read

    def _parts(
        self, dataset: Any, chunks: ChunkIndex | None, index: Sequence[slice], box: BoundingBox
    ) -> list[tuple[int, int]]:
        """The parts of the file that hold a window: the first byte, and the one behind the last."""
        if chunks is not None:
            return chunk_parts(dataset, chunks, index)
        offset = dataset.id.get_offset()
        if offset is None:
            return []
        dtype = f"V{dataset.id.get_type().get_size()}"
        layout = _raw_layout(dataset, dtype, self.axes, offset)
        return layout.places(box.translate(zyx.subtract((0, 0, 0), self.info.bounds.start)))


def hdf5_source(path: StoredFile, name: str | None) -> Hdf5Source:
    """The dataset ``name`` of a file, or the only one that may be a volume.

    Raises:
        VolumeError: there is no such dataset, or it is no volume of numbers, or HDF5's library
            does not survive reading it.
        ConfigError: h5py is not installed.
    """
    import_library("h5py", "HDF5")
    complaint = f"{path} cannot be read as HDF5"
    arguments = [as_argument(path), *([] if name is None else [name])]
    run_apart(complaint, __name__, try_dataset.__name__, *arguments)
    with header_errors(complaint):
        return _find_dataset(path, name)


def try_dataset(argument: str, name: str | None = None) -> None:
    """Read what :func:`hdf5_source` reads, and where the dataset's chunks lie.

    Args:
        argument: the file, as :func:`~beam_inference.conversion.hdf5_file.as_argument` has it.
        name: name of the dataset; None if there is one alone.
    """
    source = _find_dataset(file_of_argument(argument), name)
    with open_file(source.path) as file:
        dataset = file[source.dataset]
        if dataset.chunks:
            dataset.id.get_num_chunks()


def _find_dataset(path: StoredFile, name: str | None) -> Hdf5Source:
    if name is None:
        with open_file(path) as file:
            names = _volume_names(file)
        if len(names) != 1:
            raise VolumeError(f"{path} holds {_enumerate(names)}: name one, as {path}:NAME")
        name = names[0]
    name = name.strip("/")
    place = follow_links(open_file, path, name)
    source = None if place is None else _dataset_source(place.path, place.name)
    if source is None:
        with open_file(path) as file:
            found = _enumerate(_volume_names(file))
        raise VolumeError(f"{path} has no dataset {name}; it holds {found}")
    return source


def hdf5_dataset(path: StoredFile, name: str) -> Hdf5Source:
    """The dataset of a name in a file of which :func:`run_apart` has tried that it can be read.

    Raises:
        VolumeError: there is none, or it is no volume of numbers.
    """
    return _find_dataset(path, name)


def _dataset_source(path: StoredFile, name: str) -> Hdf5Source | None:
    """The dataset of a name that leads through no links; None if it is a group."""
    with open_file(path) as file:
        dataset = file[name] if name else file
        if not hasattr(dataset, "shape"):
            return None
        check_shape(f"{path}:{name}", dataset.shape or ())
        notes = check_voxels_are_near(open_file, path, dataset)
        axes = _axes(f"{path}:{name}", dataset)
        info = _info(f"{path}:{name}", dataset, axes, notes)
        if isinstance(path, RemoteFile) and not dataset.chunks:
            layout = _raw_layout(dataset, f"V{dataset.dtype.itemsize}", axes, 0)
            info = replace(info, grain=remote_grain(layout))
        if _BIGDATAVIEWER.fullmatch(posixpath.normpath(name)) and dataset.dtype == np.int16:
            note = "its int16 are BigDataViewer's, which stand for uint16, and are read as such"
            info = replace(info, dtype="uint16", notes=(*info.notes, note))
        check_block_memory(f"{path}:{name}", info.grain, info.itemsize)
        if dataset.size:
            if dataset.chunks:
                check_filters(f"{path}:{name}", dataset)
                check_chunk_places(f"{path}:{name}", dataset)
            elif not dataset.is_virtual:
                check_plain_size(f"{path}:{name}", dataset)
            _check_decodable(f"{path}:{name}", dataset)
        parts = files_beside(path, dataset)
    return Hdf5Source(path, name, axes, info, parts)


def _raw_layout(dataset: Any, dtype: str, axes: str, offset: int) -> RawLayout:
    shape = _without_time(axes, dataset.shape)
    return RawLayout(dtype, shape, axes.replace("T", ""), offset)


def _without_time(axes: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an array without its axis of time, if it has one, whose extent is one."""
    return tuple(int(extent) for axis, extent in zip(axes, shape, strict=True) if axis != "T")


def _info(name: str, dataset: Any, axes: str, more_notes: tuple[str, ...]) -> SourceInfo:
    extent = dict(zip(axes, map(int, dataset.shape), strict=True))
    placement = _placement(dataset)
    notes = placement.notes + absence_notes(dataset) + _scaling_notes(dataset) + more_notes
    grain = FREE
    if dataset.chunks:
        chunk = dict(zip(axes, dataset.chunks, strict=True))
        grain = (chunk["Z"], chunk["Y"], chunk["X"])
    return SourceInfo(
        placement.bounds((extent["Z"], extent["Y"], extent["X"])),
        extent.get("C", 1),
        number_dtype(dataset.dtype, name),
        placement.voxel_size_nm,
        grain,
        notes,
    )


def _scaling_notes(dataset: Any) -> tuple[str, ...]:
    """Tell of attributes by which netCDF's tools scale values: they are not applied here."""
    stated = [name for name in ("scale_factor", "add_offset") if name in dataset.attrs]
    if not stated:
        return ()
    return (
        f"its attributes {' and '.join(stated)}, by which netCDF and xarray scale the values, are "
        "not applied: the voxels are those that are stored",
    )


def _check_decodable(name: str, dataset: Any) -> None:
    try:
        dataset[(0,) * dataset.ndim]
    except OSError as error:
        raise VolumeError(
            f"{name} cannot be decoded: {error}. If it needs a plugin: pip install hdf5plugin"
        ) from None


def dataset_names(path: str) -> list[str]:
    """Names of all datasets of a file.

    Raises:
        VolumeError: it cannot be read as HDF5.
    """
    names: list[str] = []

    def visit(name: str, item: Any) -> None:
        if hasattr(item, "shape"):
            names.append(name)

    with header_errors(f"{path} cannot be read as HDF5"), open_file(path) as file:
        file.visititems(visit)
    return names


def _volume_names(file: Any) -> list[str]:
    """Names of the datasets that may be volumes, by their number of axes; of the first few."""
    names: list[str] = []

    def visit(name: str, item: Any) -> bool | None:
        shape = getattr(item, "shape", None) or ()
        if len(shape) in (3, 4) or (len(shape) == 5 and 1 in shape):
            names.append(name)
        return True if len(names) > _NAMES_IN_MESSAGE else None  # a value ends the visit

    file.visititems(visit)
    return names


def _enumerate(names: list[str]) -> str:
    if not names:
        return "no dataset with three axes or four"
    return f"the volumes {', '.join(names[:_NAMES_IN_MESSAGE])}"


def _axes(name: str, dataset: Any) -> str:
    """Letters of the axes: by the labels of the dataset's dimensions, else (channels,) z, y, x.

    ilastik and vigra write labels of their own, the axistags. ilastik's plugin for ImageJ writes
    none, and five axes, of which it is clear what they are where there is one channel.
    """
    axes = "".join(_stated_axes(name, dataset)) or _usual_axes(dataset.shape)
    of_voxels = axes.replace("T", "", 1)
    if sorted(of_voxels) not in (sorted("ZYX"), sorted("CZYX")) or len(axes) != dataset.ndim:
        raise VolumeError(
            f"{name} has the axes {axes} of {dataset.shape}; expected z, y, x, and perhaps channels"
        )
    if "T" in axes and dataset.shape[axes.index("T")] != 1:
        raise VolumeError(
            f"{name} has {dataset.shape[axes.index('T')]} times: convert reads one. Save one of "
            "them as a dataset of its own."
        )
    return axes


def _usual_axes(shape: Sequence[int]) -> str:
    if len(shape) == 5 and shape[0] == 1 != shape[1] and shape[-1] == 1:
        return "TZYXC"
    return "TCZYX" if len(shape) == 5 and shape[:2] == (1, 1) else "CZYX"[-len(shape) :]


def _stated_axes(name: str, dataset: Any) -> list[str]:
    """The names of the axes, as the file has them; none where it has none.

    Raises:
        VolumeError: it names some of them only, or in a way that cannot be read, or in two ways.
    """
    labels = _labels(dataset)
    stated = []
    if any(labels):
        stated.append(("DIMENSION_LABELS", labels))
    if "axistags" in dataset.attrs:
        stated.append(("axistags", _axistags(dataset)))
    scales = _scales(dataset)
    if _are_axes(scales):
        stated.append(("dimension scales", scales))
    whole = {}
    for source, names in stated:
        if len(names) == dataset.ndim and all(names):
            whole[source] = [text[:1].upper() for text in names]
        elif source == "axistags" or len(stated) == 1:
            raise VolumeError(
                f"{name} has {source} that cannot be read, or that are not of its {dataset.ndim} "
                "axes: which of them is z, is not known. Mend them, or remove them if the axes are "
                "(channels,) z, y, x."
            )
    if len({tuple(names) for names in whole.values()}) > 1:
        told = " and ".join(f"{''.join(names)} by its {source}" for source, names in whole.items())
        raise VolumeError(
            f"{name} has the axes {told}: which of these is right, is not known. Remove the wrong "
            "ones."
        )
    return next(iter(whole.values()), [])


def _scales(dataset: Any) -> list[str]:
    """The names of the scales of a dataset's dimensions, as netCDF has them; none if not of all."""
    import h5py

    attribute = _attribute(dataset, "DIMENSION_LIST")
    if attribute is None or attribute.shape != (dataset.ndim,):
        return []
    of_lists = h5py.check_vlen_dtype(attribute.dtype)
    if of_lists is None or h5py.check_ref_dtype(of_lists) is not h5py.Reference:
        return []
    try:
        lists = dataset.attrs["DIMENSION_LIST"]
        return [str(dataset.file[each[0]].name).rpartition("/")[2] for each in lists]
    except (OSError, RuntimeError, ValueError, KeyError, IndexError, TypeError):
        return []


def _are_axes(scales: Sequence[str]) -> bool:
    """Whether the names of scales say which axes they are of: z, or z_position, but not tomo_z."""
    initials = {scale[:1].lower() for scale in scales}
    is_plain = all(len(scale) == 1 for scale in scales)
    return bool(scales) and initials <= set("tczyx") and (is_plain or initials >= set("zyx"))


def _labels(dataset: Any) -> list[str]:
    """The labels of a dataset's dimensions, as HDF5's library for dimension scales keeps them.

    That library trusts what it finds there: where it is no text, it ends the process.
    """
    attribute = _attribute(dataset, "DIMENSION_LABELS")
    if attribute is None or attribute.dtype.kind not in "OS" or attribute.shape != (dataset.ndim,):
        return []
    values = np.empty(attribute.shape, attribute.dtype)
    attribute.read(values)
    texts = [value.decode(errors="replace") for value in values if isinstance(value, bytes)]
    return texts if len(texts) == dataset.ndim else []


def _axistags(dataset: Any) -> list[str]:
    """The keys of the axes in the JSON of the attribute ``axistags``; none if it is no such."""
    attribute = _attribute(dataset, "axistags")
    if attribute.dtype.kind not in "OS" or attribute.shape not in ((), (1,)):
        return []
    value = dataset.attrs["axistags"]
    text = value if attribute.shape == () else value[0]
    try:
        return [str(axis["key"]) for axis in parse_json(text)["axes"]]
    except (ValueError, KeyError, TypeError):
        return []


def _attribute(dataset: Any, key: str) -> Any:
    """An attribute, of which nothing is read as yet; None if it is not there."""
    return dataset.attrs.get_id(key) if key in dataset.attrs else None


def _placement(dataset: Any) -> Placement:
    """The placement by ``resolution`` and ``offset`` (nm), or by ``element_size_um``."""
    sizes = _three_numbers(dataset, "resolution")
    micrometres = _three_numbers(dataset, "element_size_um") or ()
    others = [float(f"{_NM_PER_UM * size:.9g}") for size in micrometres]
    if sizes and others and not np.allclose(sizes, others, rtol=1e-3, equal_nan=True):
        raise VolumeError(
            f"{dataset.name} states two voxel sizes: resolution {sizes}, and element_size_um, "
            f"which is {others} nm. Remove the wrong attribute."
        )
    sizes = sizes or others
    voxel_size_nm = stated_voxel_size(sizes) if sizes else None
    if voxel_size_nm is None:
        stated = [name for name in ("resolution", "element_size_um") if name in dataset.attrs]
        if not stated:
            return Placement(None)
        note = f"its attribute {stated[0]} is no voxel size (three numbers above 0): it is not read"
        return Placement(None, notes=(note,))
    origin = _three_numbers(dataset, "offset") or [0.0, 0.0, 0.0]
    offset = voxel_offset(tuple(origin), voxel_size_nm)
    if offset is None:
        note = "its offset lies between voxels, or out of reach: it is taken as 0"
        return Placement(voxel_size_nm, notes=(note,))
    return Placement(voxel_size_nm, offset)


def _three_numbers(dataset: Any, key: str) -> list[float] | None:
    """An attribute, or None if it is not there or does not hold three numbers."""
    attribute = _attribute(dataset, key)
    if (
        attribute is None
        or attribute.dtype.kind not in "iuf"
        or math.prod(attribute.shape or ()) != 3
    ):
        return None
    return [float(value) for value in np.ravel(dataset.attrs[key])]


class Hdf5Target:
    """A new file with one dataset, in chunks that are compressed with gzip.

    Args:
        path: path of the file.
        name: name of the dataset; "main" if None.
        spec: the volume that it is to hold.
    """

    def __init__(self, path: str, name: str | None, spec: FileSpec) -> None:
        self._disk = _DiskFile(path)
        self._file = import_library("h5py", "HDF5").File(self._disk, "w")
        edges = [min(_CHUNK_EDGE, n) for n in spec.bounds.shape]
        self._dataset = self._file.create_dataset(
            name or DEFAULT_DATASET,
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
                n * size for n, size in zip(spec.bounds.start, spec.voxel_size_nm, strict=True)
            ]

    def write(self, box: BoundingBox, array: Voxels) -> None:
        """Write (channels, *box.shape) voxels to a box counted from the first voxel.

        Raises:
            OSError: the disk is full, or fails.
        """
        window = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        self._dataset[(..., *window)] = array if self._dataset.ndim == 4 else array[0]
        self._disk.raise_failure()

    def close(self) -> None:
        """Flush and close the file.

        Raises:
            OSError: the disk is full, or fails.
        """
        self._file.close()
        self._disk.close()
        self._disk.raise_failure()


class _DiskFile(io.FileIO):
    """A new file whose writes never fail for HDF5: what went wrong is told afterwards.

    HDF5 keeps a file that it could not flush, tries again when the process ends, and then takes the
    process down with it.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, "w+b")
        self._failure: OSError | None = None

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of it; nothing more once a write has failed."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left and self._failure is None:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                self._failure = error
        return size

    def truncate(self, size: int | None = None, /) -> int:
        """Change the length of the file."""
        if self._failure is None:
            try:
                return super().truncate(size)
            except OSError as error:
                self._failure = error
        return size or 0

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure


HDF5_GRAIN: Zyx = (_CHUNK_EDGE, _CHUNK_EDGE, _CHUNK_EDGE)
"""The shape, ZYX, that is best written at a time: the dataset's chunks."""
