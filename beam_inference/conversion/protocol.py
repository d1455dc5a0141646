"""The protocol of sources: everything about one is known before the first chunk is read."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, TypeAlias

import numpy as np

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.fields import Json
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.errors import BeamInferenceError, ConfigError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import FARTHEST, NO_REST, Rest
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

Voxels: TypeAlias = AnyArray
"""Voxels of any dtype of numbers, with the axes (channel, z, y, x) unless said otherwise."""

Read = Callable[[BoundingBox], Voxels]
"""Reads the voxels of a box inside the source's bounds: (channels, *box.shape), in its dtype.

May be called from several threads. Raises PermanentReadError, or what
:meth:`beam_inference.volumes.volume.Volume.read` does.
"""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """Everything about a source that is known before a voxel is read.

    Attributes:
        bounds: its extent in voxels, ZYX; starts at its offset.
        channels: number of channels.
        dtype: name of the dtype of its values.
        voxel_size_nm: ZYX, or None where the source does not say.
        grain: shape, ZYX, of the voxels that are read and decoded together, however few of them
            are needed: a whole slice of a PNG stack, a block of a zarr; (1, 1, 1) where any window
            is as good as another.
        notes: what a person should know before the source is converted.
        rest: part of a voxel by which it begins beyond ``bounds``.
        made_of_bytes: bytes of other voxels that are held to make one, where it is not read as it
            is stored.
    """

    bounds: BoundingBox
    channels: int
    dtype: str
    voxel_size_nm: VoxelSizeNm | None
    grain: Zyx
    notes: tuple[str, ...] = ()
    rest: Rest = NO_REST
    made_of_bytes: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of a voxel, with all its channels."""
        return self.channels * np.dtype(self.dtype).itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes that are held for a voxel while it is copied."""
        return self.itemsize + self.made_of_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all voxels."""
        return self.bounds.size * self.itemsize


class Source(Protocol):
    """A volume to read: a small picklable value."""

    @property
    def info(self) -> SourceInfo:
        """Its extent, dtype, and so on."""

    @property
    def identity(self) -> Json:
        """JSON values that determine its voxels: a file that has changed is another source."""

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels, or the folder of a volume of blocks, as far as known."""

    def open(self) -> Read:
        """Open it, once per process."""


FREE: Zyx = (1, 1, 1)
"""The grain of a source that can be read in any windows."""


@dataclass(frozen=True, slots=True)
class PlaneOfMany:
    """A plane of a data set of several files.

    Attributes:
        z: its number along z.
        rest: its image, channel and time, for messages.
        depth: planes along z of the whole set.
    """

    z: int
    rest: str
    depth: int


@dataclass(frozen=True, slots=True)
class SliceHeader:
    """The header of a file of one slice.

    Attributes:
        channels: number of channels.
        height, width: extent along y and x, in voxels.
        dtype: name of the dtype.
        grain: as in :class:`SourceInfo`.
        notes: what its values mean where they are no grey values as they stand.
        colours: a hash of its table of colours; empty where it has none.
        plane: what it is of a data set of several files, as its own metadata say; None if they say
            nothing.
    """

    channels: int
    height: int
    width: int
    dtype: str
    grain: Zyx
    notes: tuple[str, ...] = ()
    colours: str = ""
    plane: PlaneOfMany | None = None


ORIENTATION = 274
"""The tag by which TIFF and EXIF state how a picture is to be shown."""


def orientation_notes(orientation: int) -> tuple[str, ...]:
    """A note on a picture that is to be shown turned or mirrored; 1 is as it is stored."""
    if orientation == 1:
        return ()
    return (f"it is to be shown turned (orientation {orientation}), and is read as stored",)


COLOURS_LOST = "its table of colours is not kept, its values are"
"""A note on pictures with a palette."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of a volume in space, as far as voxel sizes and offsets can state it.

    Attributes:
        voxel_size_nm: ZYX, or None where it is not stated.
        offset: the first voxel's coordinates in voxels, ZYX.
        notes: what of the stated position is lost.
    """

    voxel_size_nm: VoxelSizeNm | None
    offset: Zyx = (0, 0, 0)
    notes: tuple[str, ...] = ()

    def bounds(self, shape: Zyx) -> BoundingBox:
        """The box of a volume with this shape, ZYX."""
        return BoundingBox(self.offset, zyx.add(self.offset, shape))


AXES_TURNED = (
    "its axes are turned or flipped in space: voxels keep their stored order, from offset 0"
)
"""A note on a volume whose file says so."""

_REASON_CHARACTERS = 300
"""Characters of another library's error that are repeated in a message."""


@contextmanager
def header_errors(complaint: str) -> Iterator[None]:
    """Turn whatever is raised while a header is read into one error of the user's.

    A header may say anything, and libraries raise whatever a value of it runs into: there is no
    complete list of types to catch.

    Args:
        complaint: what is wrong with which file, such as "em.nrrd is not an NRRD file".

    Raises:
        VolumeError: something was raised; the package's own errors pass as they are.
    """
    try:
        yield
    except BeamInferenceError:
        raise
    except Exception as error:
        reason = " ".join(_reason(error).split())[:_REASON_CHARACTERS] or type(error).__name__
        printable = "".join(letter if letter.isprintable() else "?" for letter in reason)
        raise VolumeError(f"{complaint}: {printable}") from None


def _reason(error: Exception) -> str:
    """What an error of a library says of a header, where its text alone does not."""
    if isinstance(error, StopIteration):
        return "it ends before its header does"
    if isinstance(error, KeyError):
        return f"{error} is missing, or not known"
    if isinstance(error, (TypeError, AttributeError)):
        return f"a part of it is missing, or is not what it should be ({error})"
    return str(error)


def check_shape(name: str, shape: Iterable[int]) -> None:
    """Refuse a shape that no array has.

    Raises:
        VolumeError: an extent is negative, or larger than any volume.
    """
    extents = list(shape)
    if any(isinstance(n, bool) or not 0 <= n <= FARTHEST for n in extents):
        raise VolumeError(
            f"the header of {name} states the shape {extents}, which no volume has: it is damaged. "
            "Copy or save the file again."
        )


def number_dtype(dtype: AnyDtype, name: str) -> str:
    """The name of a dtype of integers or floating-point numbers.

    Raises:
        VolumeError: it is another kind of dtype; ``name`` says whose.
    """
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise VolumeError(
            f"{name} holds {dtype}; expected integers or floating-point numbers of up to 64 bits. "
            "Values are never converted here: save it as one of these first (bool as uint8)."
        )
    return dtype.newbyteorder("=").name


def as_czyx(array: Voxels, axes: str) -> Voxels:
    """A view of an array with the axes CZYX; ``axes`` names its own, as "ZYX", "ZYXC" or "XYZ"."""
    for axis in "CZYX":
        if axis not in axes:
            array = array[np.newaxis]
            axes = axis + axes
    return array.transpose([axes.index(axis) for axis in "CZYX"])


FORMATS = "formats"
"""The extra of the libraries for common files."""

INSTRUMENTS = "instruments"
"""The extra of the libraries for files of microscopes and scanners."""


def import_library(module: str, purpose: str, extra: str = FORMATS) -> ModuleType:
    """Import an optional library.

    Args:
        module: name of the module.
        purpose: what needs it, for the message.
        extra: the extra of this package that installs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{purpose} needs {module.partition('.')[0]}, which is not installed: pip install "
            f"'beam-inference[{extra}]'"
        ) from None


def placement_in_space(
    voxel_size_nm: VoxelSizeNm,
    steps: AnyArray,
    spacings: AnyArray,
    origin: AnyArray | None,
) -> Placement:
    """The placement of a volume whose file states a position and directions in space.

    Args:
        voxel_size_nm: ZYX.
        steps: (3, 3), one step along each of the axes x, y, z, as vectors in space.
        spacings: lengths of these steps, XYZ.
        origin: where the first voxel is in the same space, XYZ; None: at its origin.
    """
    if not np.allclose(steps, np.diag(spacings), rtol=0, atol=1e-4 * spacings.max()):
        return Placement(voxel_size_nm, notes=(AXES_TURNED,))
    if origin is None:
        return Placement(voxel_size_nm)
    offset = voxel_offset(tuple(origin[::-1]), tuple(spacings[::-1]))
    if offset is None:
        note = "its origin lies between voxels, or out of reach: the offset is 0"
        return Placement(voxel_size_nm, notes=(note,))
    return Placement(voxel_size_nm, offset)


def stated_voxel_size(sizes: Iterable[float]) -> VoxelSizeNm | None:
    """Three sizes, ZYX, in nanometres, as a header states them; None where they are no lengths."""
    z, y, x = map(float, sizes)
    if all(math.isfinite(size) and size > 0 for size in (z, y, x)):
        return (z, y, x)
    return None


def voxel_offset(origin: tuple[float, ...], voxel_size: tuple[float, ...]) -> Zyx | None:
    """A position, in the unit of the voxel size, as whole voxels.

    Files keep positions in single precision, which is a twentieth of a voxel at a distance of some
    400,000.

    Returns:
        The offset; None where it lies between voxels, or where no volume can be.
    """
    offset = [float(a) / float(b) for a, b in zip(origin, voxel_size, strict=True)]
    if not all(abs(coordinate) <= FARTHEST for coordinate in offset):  # also of NaN
        return None
    rounded = zyx.triple(round(coordinate) for coordinate in offset)
    return rounded if np.allclose(offset, rounded, rtol=0, atol=0.05) else None
