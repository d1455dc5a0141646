"""The volume that a single file is to hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from beam_inference.conversion.raw_array import RawLayout
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A volume that one file is to hold.

    Attributes:
        bounds: its box, ZYX; the start is the offset.
        channels: number of channels.
        dtype: name of the dtype.
        voxel_size_nm: ZYX, or None if the file is not to say.
    """

    bounds: BoundingBox
    channels: int
    dtype: str
    voxel_size_nm: VoxelSizeNm | None

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, z, y, x), or (z, y, x) of a single channel."""
        return (self.channels, *self.bounds.shape) if self.channels > 1 else self.bounds.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all voxels."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def layout(self, offset: int) -> RawLayout:
        """The array in C order from the byte ``offset`` of a file on, little-endian."""
        dtype = np.dtype(self.dtype).newbyteorder("<").str
        return RawLayout(dtype, self.shape, "CZYX"[-len(self.shape) :], offset)


def xyz(values: tuple[float, float, float] | Zyx) -> tuple[float, float, float]:
    """Values of z, y and x in the order of files that list x first, and the other way round."""
    z, y, x = values
    return (x, y, z)
