"""What a source is: known completely before the first chunk, opened where it is read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

Read = Callable[[BoundingBox], NDArray[Any]]
"""The voxels of a box inside the source's bounds: shape (channels, *box.shape), in the source's dtype.

May be called from several threads. Raises PermanentReadError, or what
:meth:`beam_inference.volumes.volume.Volume.read` does.
"""


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What is known of a source before a voxel is read.

    Attributes:
        bounds: its extent in voxels, ZYX; starts at its offset.
        channels: number of channels.
        dtype: name of the dtype of its values.
        voxel_size_nm: ZYX, or None where it does not say.
        grain: the voxels that are read and decoded together, whatever part of them is asked for,
            ZYX: a whole slice of a PNG stack, a block of a zarr; (1, 1, 1) where any window is as
            good as another.
        notes: what a person should know before it is converted.
    """

    bounds: BoundingBox
    channels: int
    dtype: str
    voxel_size_nm: VoxelSizeNm | None
    grain: Zyx
    notes: tuple[str, ...] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of a voxel, all channels of it."""
        return self.channels * np.dtype(self.dtype).itemsize


class Source(Protocol):
    """A volume to be read: a small picklable value."""

    @property
    def info(self) -> SourceInfo:
        """What is known of it."""

    @property
    def identity(self) -> dict[str, Any]:
        """What determines its voxels, as JSON values: a file that has changed is another source."""

    def open(self) -> Read:
        """Open it, once per process."""


FREE: Zyx = (1, 1, 1)
"""The grain of what is read in any windows."""


def number_dtype(dtype: np.dtype[Any], name: str) -> str:
    """The name of a dtype of whole or floating-point numbers.

    Raises:
        VolumeError: it is something else.
    """
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise VolumeError(
            f"{name} holds {dtype}; expected integers or floating-point numbers of up to 64 bits. "
            "Values are never converted here: save it as one of these first (bool as uint8)."
        )
    return dtype.newbyteorder("=").name


def as_czyx(array: NDArray[Any], axes: str) -> NDArray[Any]:
    """An array with the axes CZYX, whatever some of its own are, as a view: "ZYX", "ZYXC", "XYZ" …."""
    for axis in "CZYX":
        if axis not in axes:
            array = array[np.newaxis]
            axes = axis + axes
    return array.transpose([axes.index(axis) for axis in "CZYX"])


def library(module: str, what: str) -> ModuleType:
    """An optional library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{what} needs {module.partition('.')[0]}, which is not installed: pip install "
            "'beam-inference[formats]'"
        ) from None


def placed(
    matrix: NDArray[Any], spacings: NDArray[Any], origin: NDArray[Any] | None
) -> tuple[Zyx, tuple[str, ...]]:
    """The offset that a position in space comes to, and what of it is not kept.

    Args:
        matrix: steps along the axes x, y, z in space.
        spacings: lengths of these steps.
        origin: where the first voxel is, in the same space; None: at its origin.
    """
    if not np.allclose(matrix, np.diag(spacings), rtol=0, atol=1e-4 * spacings.max()):
        return (0, 0, 0), (
            (
                "its axes are turned or flipped in space: voxels keep their stored order, from "
                "offset 0"
            ),
        )
    offset = (
        (0, 0, 0) if origin is None else voxel_offset(tuple(origin[::-1]), tuple(spacings[::-1]))
    )
    return (
        ((0, 0, 0), ("its origin lies between voxels: the offset is 0",))
        if offset is None
        else (offset, ())
    )


def voxel_offset(origin: tuple[float, ...], voxel_size: tuple[float, ...]) -> Zyx | None:
    """A position, in the unit of the voxel size, as whole voxels; None where it lies between voxels.

    Files keep positions in single precision, which is a twentieth of a voxel at a distance of some
    400,000.
    """
    offset = [a / b for a, b in zip(origin, voxel_size, strict=True)]
    z, y, x = (round(each) for each in offset)
    return (z, y, x) if np.allclose(offset, (z, y, x), rtol=0, atol=0.05) else None
