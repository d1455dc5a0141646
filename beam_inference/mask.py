"""Where an output is wanted, by another volume of any voxel size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.bounding_box import BoundingBox
from beam_inference.errors import ConfigError
from beam_inference.operator_config import Mask as MaskConfig
from beam_inference.storage import Storage
from beam_inference.volumes import Volume, VoxelSizeNm, open_volume


@dataclass(frozen=True)
class Mask:
    """A volume that is looked up by place.

    Attributes:
        volume: of one channel.
        per_voxel: its voxels per voxel of the output, ZYX.
        inverse: whether its zeros are what is wanted.
    """

    volume: Volume
    per_voxel: tuple[float, float, float]
    inverse: bool

    def wanted(self, box: BoundingBox) -> NDArray[np.bool_]:
        """Of which voxels of a box the output is wanted, (Z, Y, X).

        A voxel's value is that of the mask's voxel in which its centre lies; both grids have the corner of voxel 0 at
        the same place. Beyond the mask's bounds it is zero. Raises as :meth:`beam_inference.volumes.Volume.read`.
        """
        bounds = self.volume.bounds
        inside = np.zeros(box.shape, bool)
        places, kept = [], []
        for start, stop, low, high, ratio in zip(
            box.start, box.stop, bounds.start, bounds.stop, self.per_voxel, strict=True
        ):
            place = np.floor((np.arange(start, stop) + 0.5) * ratio).astype(np.int64)
            here = np.flatnonzero((place >= low) & (place < high))
            if not here.size:
                return np.full(box.shape, self.inverse)
            places.append(place[here])
            kept.append(here)
        there = BoundingBox(*zip(*((int(place[0]), int(place[-1]) + 1) for place in places), strict=True))
        values = self.volume.read(there)[0] != 0
        inside[np.ix_(*kept)] = values[np.ix_(*(place - place[0] for place in places))]
        return ~inside if self.inverse else inside


def open_mask(config: MaskConfig, voxel_size_nm: VoxelSizeNm, storage: Storage) -> Mask:
    """Open a job's mask for an output of a voxel size.

    Raises:
        VolumeError: there is no such volume.
        ConfigError: it has several channels, or does not say its voxel size.
    """
    volume = open_volume(config.path, scale=config.scale, storage=storage)
    if volume.channels != 1:
        raise ConfigError(f"mask.path {config.path} has {volume.channels} channels; a mask has one")
    if volume.voxel_size_nm is None:
        raise ConfigError(f"mask.path {config.path} does not say its voxel size: where it lies cannot be known")
    z, y, x = (ours / theirs for ours, theirs in zip(voxel_size_nm, volume.voxel_size_nm, strict=True))
    return Mask(volume, (z, y, x), config.inverse)
