"""The inside of an object, read beside the input that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.further_input import join_volumes
from beam_inference.volumes.holes import Holes
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.volumes.kvstores import TRANSFER_SECONDS
from beam_inference.volumes.volume import Volume


@dataclass(frozen=True)
class ObjectVolume(Volume):
    """1 inside an object and 0 outside, of the voxels of the volume that shows it.

    Attributes:
        shown: the volume, of all channels; what is not zero in each of them is inside.
        holes: zeros that are inside, too; None if there are none.
    """

    shown: Volume = field(kw_only=True)
    holes: Holes | None = field(kw_only=True)

    def read(self, box: BoundingBox, timeout: float = TRANSFER_SECONDS) -> AnyArray:
        """Read as from any volume."""
        inside = find_nonzero(self.shown.read(box, timeout))
        if self.holes is not None:
            self.holes.fill(inside, box, timeout)
        return inside[None].view(np.uint8)


def find_nonzero(array: AnyArray) -> NDArray[np.bool_]:
    """Where the values of an array (C, Z, Y, X) are not zero in every channel."""
    inside = np.zeros(array.shape[1:], bool)
    for channel in array:
        inside |= channel != 0
    return inside


def open_object(volume: InputVolume, holes: Holes | None) -> InputVolume:
    """The inside of an object, resampled and masked as the input that shows it.

    Args:
        volume: the input.
        holes: of the object, in stored voxels; None if it has none.

    Raises:
        ConfigError: the holes are of a volume of another box, or channels have voxels of their own.
    """
    stored = volume.stored
    whole = volume.whole or stored.bounds
    if holes is not None and holes.bounds != whole:
        raise ConfigError(
            f"model.normalize: {holes.url} is of a volume {holes.bounds} (z, y, x), and the input "
            f"{volume.url} is {whole}: the levels are of another volume. Make them of this one: "
            "beam-inference levels INPUT --object --to FILE"
        )
    others = [each.volume.stored for each in volume.further]
    values = {each.name: getattr(stored, each.name) for each in fields(Volume)}
    values |= {"channels": 1, "dtype": np.dtype(np.uint8)}
    shown = join_volumes(stored, others) if others else stored
    inside = ObjectVolume(**values, shown=shown, holes=holes)
    dtype = inside.dtype if volume.resampling is None else np.dtype(np.float32)
    return replace(
        volume, stored=inside, channels=1, dtype=dtype, limits=(), further=(), whole=None
    )
