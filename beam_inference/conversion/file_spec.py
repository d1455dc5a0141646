"""What a single file is to hold."""

from __future__ import annotations

from dataclasses import dataclass

from beam_inference.conversion.raw_array import RawLayout
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx


@dataclass(frozen=True, slots=True)
class FileSpec:
    """A volume that one file is to hold.

    Attributes:
        bounds: ZYX; its start is the offset.
        channels: number of channels.
        dtype: name of the dtype.
        voxel_size_nm: ZYX, or None: then the file does not say.
    """

    bounds: BoundingBox
    channels: int
    dtype: str
    voxel_size_nm: VoxelSizeNm | None

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, z, y, x), or (z, y, x) of a single channel."""
        return (self.channels, *self.bounds.shape) if self.channels > 1 else self.bounds.shape

    def layout(self, offset: int) -> RawLayout:
        """The array in C order from a byte of the file on, little-endian."""
        dtype = (
            "|u1"
            if self.dtype == "uint8"
            else "|i1"
            if self.dtype == "int8"
            else _little_endian(self.dtype)
        )
        return RawLayout(dtype, self.shape, "CZYX"[-len(self.shape) :], offset)


def _little_endian(dtype: str) -> str:
    import numpy as np

    return np.dtype(dtype).newbyteorder("<").str


def xyz(values: tuple[float, float, float] | Zyx) -> tuple[float, float, float]:
    """Values of z, y and x in the order of files that list x first, and the other way round."""
    z, y, x = values
    return (x, y, z)
