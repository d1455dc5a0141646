"""Arrays that lie in a file as they do in memory: any window is read and written by a memory map.

Each access maps the file anew, so that pages once touched are not held: the process stays small,
and the system keeps pages as it sees fit.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import math
import os
import shutil
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.conversion.protocol import Read, SourceInfo, Voxels, as_czyx
from beam_inference.conversion.stored_files import (
    StoredFile,
    count_bytes,
    file_identity,
    open_stream,
)
from beam_inference.environment import format_bytes
from beam_inference.errors import PermanentReadError, VolumeError, WorkerFault
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.remote_files import BUFFER_BYTES, PART_BYTES, RemoteFile

_COPY_BYTES = 2**20
_WORTH_A_REQUEST = 2**20
_SMALL_SPAN = 2**16
_DEFLATE_RATIO = 1032
"""A compressed byte of deflate stands for at most so many."""


@dataclass(frozen=True, slots=True)
class RawLayout:
    """The layout of an array in a file.

    Attributes:
        dtype: dtype with its byte order, as ">u2".
        shape: shape of the array, slowest axis first.
        axes: a letter for each axis of the shape, of C, Z, Y and X, such as "ZYX".
        offset: position in the file of the array's first byte.
    """

    dtype: str
    shape: tuple[int, ...]
    axes: str
    offset: int

    @property
    def stop(self) -> int:
        """One past the array's last byte in the file."""
        return self.offset + math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def _map(self, file: str | IO[bytes], mode: str) -> Voxels:
        view: Voxels = np.memmap(
            file, dtype=self.dtype, mode=mode, offset=self.offset, shape=self.shape
        )  # type: ignore[call-overload]
        return as_czyx(view, self.axes)

    def read(self, file: str | IO[bytes], box: BoundingBox) -> Voxels:
        """Read the voxels of a box, counted from the array's first voxel.

        Returns:
            (channels, *box.shape), in native byte order.
        """
        window = self._map(file, "r")[(slice(None), *_slices(box))]
        return np.array(window, dtype=window.dtype.newbyteorder("="), order="C", subok=False)

    def read_parts(self, file: RemoteFile, box: BoundingBox) -> Voxels:
        """Read the voxels of a box from a file in an object store, as :meth:`read` does.

        Stretches of the file that hold mostly voxels of the box are read, several at a time.

        Raises:
            The errors of :meth:`RemoteFile.read`.
        """
        dtype = np.dtype(self.dtype)
        steps = _strides(self.shape, dtype.itemsize)
        parts = self._window(box)
        stretches = list(_stretches(parts, steps, dtype.itemsize))
        places = [self._place(stretch, steps) for stretch in stretches]
        out = np.empty(tuple(map(len, parts)), dtype.newbyteorder("="))
        for stretch, content in zip(stretches, file.read_parts(places), strict=True):
            shape = tuple(map(len, stretch))
            target = tuple(
                slice(part.start - whole.start, part.stop - whole.start)
                for part, whole in zip(stretch, parts, strict=True)
            )
            out[target] = np.ndarray(shape, dtype, content, strides=steps)
        return np.ascontiguousarray(as_czyx(out, self.axes))

    def places(self, box: BoundingBox) -> list[tuple[int, int]]:
        """The stretches of a file that hold the voxels of a box, and mostly these.

        Args:
            box: counted from the array's first voxel.

        Returns:
            The first byte of each, and the one behind its last.
        """
        steps = _strides(self.shape, np.dtype(self.dtype).itemsize)
        stretches = _stretches(self._window(box), steps, np.dtype(self.dtype).itemsize)
        return [self._place(stretch, steps) for stretch in stretches]

    def _window(self, box: BoundingBox) -> list[range]:
        windows = dict(zip("CZYX", (slice(None), *_slices(box)), strict=True))
        return [
            range(extent)[windows[axis]] for axis, extent in zip(self.axes, self.shape, strict=True)
        ]

    def _place(self, stretch: Sequence[range], steps: tuple[int, ...]) -> tuple[int, int]:
        start = self.offset + sum(
            part.start * step for part, step in zip(stretch, steps, strict=True)
        )
        return start, start + _span(stretch, steps, np.dtype(self.dtype).itemsize)

    def write(self, file: str | IO[bytes], box: BoundingBox, array: Voxels) -> None:
        """Write (channels, *box.shape) voxels to a box, counted from the array's first voxel."""
        self._map(file, "r+")[(slice(None), *_slices(box))] = array


def read_raw(file: StoredFile | IO[bytes], layout: RawLayout, box: BoundingBox) -> Voxels:
    """Read the voxels of a box of a raw array: (channels, *box.shape), in native byte order.

    Args:
        file: the file, on this machine or in an object store, or a file of this machine, open.
        layout: how the array lies in it.
        box: counted from the array's first voxel.
    """
    if isinstance(file, RemoteFile):
        return layout.read_parts(file, box)
    return layout.read(file, box)


def remote_grain(layout: RawLayout) -> Zyx:
    """The shape, ZYX, of a stretch of a raw array that is worth a request to an object store."""
    grain = dict.fromkeys("CZYX", 1)
    nbytes = np.dtype(layout.dtype).itemsize
    for axis, extent in zip(reversed(layout.axes), reversed(layout.shape), strict=True):
        grain[axis] = max(1, min(extent, zyx.ceil_div(_WORTH_A_REQUEST, nbytes)))
        nbytes *= max(1, extent)
    return (grain["Z"], grain["Y"], grain["X"])


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes from one item to the next along each axis."""
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


def _stretches(
    parts: Sequence[range], steps: tuple[int, ...], itemsize: int
) -> Iterator[Sequence[range]]:
    """Divide a box of an array until a request for each part of it gets mostly voxels of the box.

    Args:
        parts: the box, slowest axis first.
        steps: bytes from one item to the next along each axis.
        itemsize: bytes of an item.
    """
    span = _span(parts, steps, itemsize)
    wanted = math.prod(map(len, parts)) * itemsize
    is_dense = span <= 2 * wanted
    axis = next((axis for axis, part in enumerate(parts[:-1]) if len(part) > 1), None)
    if axis is None or span <= _SMALL_SPAN or (is_dense and span <= PART_BYTES):
        yield parts
        return
    length = max(1, PART_BYTES // steps[axis]) if is_dense else 1
    for at in range(0, len(parts[axis]), length):
        part = parts[axis][at : at + length]
        yield from _stretches([*parts[:axis], part, *parts[axis + 1 :]], steps, itemsize)


def _span(parts: Sequence[range], steps: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first item to the last."""
    return itemsize + sum((len(part) - 1) * step for part, step in zip(parts, steps, strict=True))


@dataclass(frozen=True, slots=True)
class RawSource:
    """A file that holds a raw array, perhaps compressed as a whole.

    Attributes:
        file: the file.
        layout: how the array lies in the file, once that is unpacked.
        info: its extent, dtype, and so on.
        packing: None, "gzip", "bzip2", or the name of a member of a zip archive.
        packed_from: position in the file of the first compressed byte.
        scaling: the slope and the intercept that make float32 values of the stored ones, or None
            where the values are those stored.
    """

    file: StoredFile
    layout: RawLayout
    info: SourceInfo
    packing: str | None = None
    packed_from: int = 0
    scaling: tuple[float, float] | None = None

    @property
    def identity(self) -> Json:
        """Path, size and time of the file, and how the array lies in it."""
        return file_identity(self.file) | {
            "layout": [self.layout.dtype, list(self.layout.shape), self.layout.axes]
        }

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return [self.file]

    def open(self) -> Read:
        """Open the file; a compressed one is unpacked, to a file that ends with the process."""
        file: StoredFile | IO[bytes] = self.file
        if self.packing is not None:
            file = unpack(self.file, self.packing, self.packed_from, self.layout.stop)
        layout = self.layout
        info = self.info
        scaling = self.scaling
        to_file = zyx.negative(info.bounds.start)

        def read(box: BoundingBox) -> Voxels:
            try:
                array = read_raw(file, layout, box.translate(to_file))
            except (OSError, ValueError) as error:
                raise PermanentReadError(f"cannot read {box} of {self.file}: {error}") from error
            if scaling is None:
                return array
            return _scale(array, scaling, f"{box} of {self.file}")

        if not isinstance(file, StoredFile):
            weakref.finalize(read, file.close)
        return read


def _scale(array: Voxels, scaling: tuple[float, float], name: str) -> Voxels:
    """The float32 values of stored ones, which are rounded once where these have more digits.

    Raises:
        PermanentReadError: one is too large for float32; ``name`` says where.
    """
    slope, intercept = scaling
    with np.errstate(over="ignore"):
        scaled = scale_values(array, slope, intercept)
    if not np.array_equal(np.isfinite(scaled), np.isfinite(array)):
        raise PermanentReadError(
            f"{name} holds values that are too large for float32 once they are multiplied by "
            f"{slope:g}, and {intercept:g} is added, as the header says: save them scaled otherwise"
        )
    return scaled


def scale_values(array: Voxels, slope: float, intercept: float) -> Voxels:
    """Multiply stored values by a slope and add an intercept, as float32.

    Integers and floats of more digits than float32 has are rounded once, in the end.
    """
    precision = np.result_type(array.dtype, np.float32).type
    scaled = array.astype(precision) * precision(slope)
    scaled += precision(intercept)
    return np.asarray(scaled, np.float32)


def check_not_cut(path: StoredFile, layout: RawLayout) -> None:
    """Refuse a file that ends before its array does.

    Raises:
        VolumeError: it does.
    """
    size = count_bytes(path)
    if size < layout.stop:
        raise VolumeError(
            f"{path} has {size} bytes, but its header requires {layout.stop}: it was cut off. "
            "Copy it again."
        )


def check_length(path: StoredFile, layout: RawLayout) -> None:
    """Refuse a file that does not end with its array, where its format has nothing behind it.

    Raises:
        VolumeError: it ends before, or goes on behind it: then its header may state too few slices,
            or a wrong beginning.
    """
    check_not_cut(path, layout)
    size = count_bytes(path)
    if size > layout.stop:
        raise VolumeError(
            f"{path} has {size} bytes, {size - layout.stop} more than its header speaks of: the "
            "header may be wrong, and voxels be missing or out of place. If it is right, cut them "
            f"off in a copy: head -c {layout.stop} FILE > COPY"
        )


def check_packed_length(path: StoredFile, packing: str, start: int, layout: RawLayout) -> None:
    """Refuse a compressed file that is too short to hold its array, however well it is compressed.

    Args:
        path: the file.
        packing: as in :class:`RawSource`; only "gzip" has a bound.
        start: position in the file of the first compressed byte.
        layout: how the array lies in the unpacked file.

    Raises:
        VolumeError: it is too short.
    """
    packed_bytes = count_bytes(path) - start
    if packing == "gzip" and layout.stop > packed_bytes * _DEFLATE_RATIO:
        raise VolumeError(
            f"the header of {path} requires {layout.stop} bytes, and its {packed_bytes} compressed "
            "bytes cannot unpack to as many: it is damaged, or was cut off. Copy it again."
        )


def reserve(file: IO[bytes], size: int) -> None:
    """Fill a file up with zeros to the size stated, on space that is taken at once.

    Otherwise a disk that fills up later would kill the process: memory maps have no other error.

    Raises:
        OSError: there is no such space.
    """
    if size:
        os.posix_fallocate(file.fileno(), 0, size)


def unpack(path: StoredFile, packing: str, start: int, size: int) -> IO[bytes]:
    """Decompress a file of ``size`` bytes, and no more, into a file without a name.

    Raises:
        WorkerFault: the temporary folder is full.
        PermanentReadError: the compressed bytes are damaged, too few, or too many.
    """
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise WorkerFault(
            f"{path} unpacks to {format_bytes(size)}, and {folder} has {format_bytes(free)} left. "
            "Set TMPDIR to a folder with more space."
        )
    target = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as its reader
    try:
        with open_packed(path, packing, start, PART_BYTES) as packed:
            _copy_exactly(packed, target, size)
        target.flush()
    except _DAMAGE as error:
        target.close()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WorkerFault(
                f"cannot unpack {path}: {folder} is full. Set TMPDIR to a folder with more space."
            ) from error
        raise PermanentReadError(
            f"cannot unpack {path}: {error}. Was it copied completely?"
        ) from error
    return target


_DAMAGE = (OSError, EOFError, RuntimeError, ValueError, zlib.error, zipfile.BadZipFile)
"""Errors of the decompressing libraries."""


def _copy_exactly(packed: IO[bytes], target: IO[bytes], size: int) -> None:
    """Copy ``size`` bytes, and look whether they are all: only then their checksum is compared."""
    left = size
    while left:
        data = packed.read(min(left, _COPY_BYTES))
        if not data:
            raise EOFError(f"it unpacks to {size - left} bytes, but its header requires {size}")
        target.write(data)
        left -= len(data)
    if packed.read(1):
        raise EOFError(
            f"it unpacks to more than the {size} bytes that its header requires. If that is right, "
            "unpack it yourself"
        )


def read_start(path: StoredFile, packing: str | None, size: int) -> bytes:
    """Read the first bytes of a file, unpacked: ``size`` of them, or as many as there are."""
    with open_stream(path) if packing is None else open_packed(path, packing) as file:
        return file.read(size)


@contextmanager
def open_packed(
    path: StoredFile, packing: str, start: int = 0, buffer_bytes: int = BUFFER_BYTES
) -> Iterator[IO[bytes]]:
    """Open a stream of the decompressed bytes of a file.

    Args:
        path: the file.
        packing: as in :class:`RawSource`.
        start: position in the file of the first compressed byte.
        buffer_bytes: as in :func:`open_stream`.
    """
    if packing not in ("gzip", "bzip2"):
        with (
            open_stream(path, buffer_bytes) as file,
            zipfile.ZipFile(file) as archive,
            archive.open(packing) as member,
        ):
            yield member
        return
    with open_stream(path, buffer_bytes) as file:
        file.seek(start)
        with gzip.GzipFile(fileobj=file) if packing == "gzip" else bz2.BZ2File(file) as stream:
            yield stream  # type: ignore[misc]


def _slices(box: BoundingBox) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
