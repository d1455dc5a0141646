"""Masks: where a volume is kept, looked up in another volume of any voxel size.

That volume is read piece by piece, in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Mask as MaskConfig
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.foreign_text import shorten_value
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Rest
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, ceil_div
from beam_inference.limits import MASK_CACHE_BYTES
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.volume import Volume

PIECE_BYTES = 2**24
"""Bytes of a mask that are read at a time, in whole blocks; at least one block."""
PIECE_VOXELS = 2**22
"""Voxels of the masked volume that are looked up at a time."""


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Values of a mask at which a volume is kept; all but zero if nothing is said.

    NaN is not zero, and neither above, below nor equal to anything.

    Attributes:
        above: the values are larger than this.
        below: the values are smaller than this.
        equals: the values are these.
    """

    above: float | None = None
    below: float | None = None
    equals: Sequence[float] | None = None

    def holds(self, values: AnyArray) -> NDArray[np.bool_]:
        """Where values of a mask are such."""
        found: NDArray[np.bool_]
        if self.equals is not None:
            found = np.logical_or.reduce([values == value for value in self.equals])
        elif self.above is None and self.below is None:
            found = values != 0
        else:
            found = np.ones(values.shape, bool)
            if self.above is not None:
                found &= values > self.above
            if self.below is not None:
                found &= values < self.below
        return found


ALL_BUT_ZERO = KeptValues()
"""What a mask keeps unless it is told otherwise."""

_DECIMALS = 6
"""Of a place in a mask's voxels: what is beyond is rounding."""

_Run = tuple[slice, NDArray[np.int64] | None]


@dataclass(frozen=True)
class Mask:
    """A volume that says where another one is kept.

    A voxel's value is that of the mask's voxel in which its centre lies. Beyond the mask's bounds
    it is zero.

    Attributes:
        volume: a volume of one channel.
        per_voxel: its voxels per voxel of what it masks, ZYX.
        inverse: whether voxels are kept elsewhere, instead.
        fill_value: what stands elsewhere, in stored units of what it masks.
        kept: the mask's values where voxels are kept.
        begins: where the corner of voxel 0 of what it masks lies, in its own voxels, ZYX: elsewhere
            than at 0 where one of the two begins between voxels.
    """

    volume: Volume
    per_voxel: tuple[float, float, float]
    inverse: bool
    fill_value: float
    kept: KeptValues = ALL_BUT_ZERO
    begins: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def keeps_any(self, box: BoundingBox) -> bool:
        """Whether any voxel of a box is kept; raises as :meth:`.volume.Volume.read` does."""
        return any(kept.any() for _, kept in self._pieces(box))

    def reaches(self, box: BoundingBox) -> bool:
        """Whether any voxel of a box lies within the mask's bounds."""
        return all(
            any(place is not None for _, place in self._runs(box, axis, box.shape[axis]))
            for axis in range(3)
        )

    def kept_in(self, box: BoundingBox) -> NDArray[np.bool_]:
        """Which voxels of a box (Z, Y, X) are kept; raises as :meth:`keeps_any` does."""
        found = np.empty(box.shape, bool)
        for where, kept in self._pieces(box):
            found[where] = kept
        return found

    def fill(self, array: AnyArray, box: BoundingBox) -> None:
        """Put the fill value where voxels are not kept; raises as :meth:`keeps_any` does.

        Args:
            array: values of a box (C, Z, Y, X), changed in place.
            box: where they lie in the masked volume.
        """
        for where, kept in self._pieces(box):
            # Not by an index of booleans, which takes 24 bytes a voxel.
            np.copyto(array[(slice(None), *where)], array.dtype.type(self.fill_value), where=~kept)

    @property
    def piece_bytes(self) -> int:
        """Bytes that a thread holds for a piece: blocks, their values, and what is looked up."""
        shape = self._piece_shape
        itemsize = self.volume.dtype.itemsize
        return (2 * itemsize + 1) * int(np.prod(shape)) + 3 * PIECE_VOXELS

    @property
    def _piece_shape(self) -> Zyx:
        """Whole blocks, ZYX, as many along x, then y, then z as are read at a time."""
        blocks = zip(self.volume.read_shape, self.volume.bounds.shape, strict=True)
        shape = [min(block, whole) for block, whole in blocks]
        for axis in (2, 1, 0):
            fitting = PIECE_BYTES // (int(np.prod(shape)) * self.volume.dtype.itemsize)
            shape[axis] *= max(
                1, min(fitting, ceil_div(self.volume.bounds.shape[axis], shape[axis]))
            )
        return (shape[0], shape[1], shape[2])

    def _pieces(self, box: BoundingBox) -> Iterator[tuple[tuple[slice, ...], NDArray[np.bool_]]]:
        """The pieces of a box: where in the box, and which voxels there are kept."""
        _, y, x = box.shape
        most = (
            max(1, PIECE_VOXELS // max(1, y * x)),
            max(1, PIECE_VOXELS // max(1, x)),
            PIECE_VOXELS,
        )
        runs = [self._runs(box, axis, most[axis]) for axis in range(3)]
        for piece in product(*runs):
            where = tuple(run for run, _ in piece)
            places = [place for _, place in piece if place is not None]
            if len(places) < 3:
                beyond = bool(self.kept.holds(np.zeros(1, self.volume.dtype))[0])
                shape = [run.stop - run.start for run in where]
                yield where, np.full(shape, beyond != self.inverse)
                continue
            mask_box = BoundingBox(
                *zip(*((int(place[0]), int(place[-1]) + 1) for place in places), strict=True)
            )
            values = self.kept.holds(self.volume.read(mask_box)[0])[
                np.ix_(*(place - place[0] for place in places))
            ]
            yield where, ~values if self.inverse else values

    def _runs(self, box: BoundingBox, axis: int, most: int) -> list[_Run]:
        """Slices of a box on an axis, one for each piece of the mask, and the mask's voxels there.

        Beyond the mask there are none: then None stands for them.
        """
        centres = np.arange(box.start[axis], box.stop[axis]) + 0.5
        place = centres * self.per_voxel[axis] + self.begins[axis]
        # A centre may lie between two voxels: then rounding must not decide.
        place = np.floor(place.round(_DECIMALS)).astype(np.int64)
        low = self.volume.bounds.start[axis]
        high = self.volume.bounds.stop[axis]
        inside = (place >= low) & (place < high)
        piece = np.where(inside, (place - low) // self._piece_shape[axis], -1)
        cuts = {
            0,
            *range(most, len(place), most),
            *(np.flatnonzero(np.diff(piece)) + 1).tolist(),
            len(place),
        }
        edges = sorted(cuts)
        return [(slice(a, b), place[a:b] if inside[a] else None) for a, b in pairwise(edges)]


def kept_values(config: MaskConfig) -> KeptValues:
    """The values of a mask at which it keeps a volume, as a job says."""
    return KeptValues(config.above, config.below, config.equals)


def open_mask(
    key: str,
    config: MaskConfig,
    voxel_size_nm: VoxelSizeNm | None,
    rest: Rest,
    storage: Storage,
) -> Mask:
    """Open a mask.

    Args:
        key: the job's key that names it, for messages.
        config: what the job says of it.
        voxel_size_nm: of the volume that is masked, ZYX; None if it is not known.
        rest: how far that begins beyond whole coordinates, in its voxels, ZYX.
        storage: how object stores are reached.

    Raises:
        VolumeError: there is no such volume.
        ConfigError: it has several channels, or one of the voxel sizes is not known.
    """
    if voxel_size_nm is None:
        raise ConfigError(
            "the input does not say its voxel size, so the position of the mask is unknown. Add it "
            "to the input's metadata, or write model.voxel_size_nm into the job file."
        )
    try:
        volume = open_source(config.source(storage), cache_bytes=MASK_CACHE_BYTES, booleans=True)
    except VolumeError as error:
        raise VolumeError(f"{key}: {error}") from None
    if volume.channels != 1:
        raise ConfigError(
            f"{key}.path {config.path} has {volume.channels} channels; a mask has one"
        )
    if volume.voxel_size_nm is None:
        raise ConfigError(
            f"{key}.path {config.path} does not say its voxel size, so its position is unknown"
        )
    z, y, x = (
        ours / theirs for ours, theirs in zip(voxel_size_nm, volume.voxel_size_nm, strict=True)
    )
    begins = (
        rest[0] * z - volume.origin.rest[0],
        rest[1] * y - volume.origin.rest[1],
        rest[2] * x - volume.origin.rest[2],
    )
    kept = kept_values(config)
    _check_values(key, kept, volume)
    return Mask(volume, (z, y, x), config.inverse, config.fill_value, kept, begins)


def _check_values(key: str, kept: KeptValues, volume: Volume) -> None:
    """Refuse values that no voxel of a mask can have: nothing would be kept."""
    for value in kept.equals or ():
        if not _is_value(value, volume.dtype):
            raise ConfigError(
                f"{key}.equals: {value} is not a value of {volume.url}, which has "
                f"{volume.dtype}: nothing would equal it. Write one of its values, or above and "
                "below."
            )
    low, high = _limits(volume.dtype)
    if kept.above is not None and kept.above >= high:
        raise ConfigError(
            f"{key}.above: {shorten_value(kept.above)}: no value of {volume.url}, which has "
            f"{volume.dtype}, is above that. Write a value below {high}."
        )
    if kept.below is not None and kept.below <= low:
        raise ConfigError(
            f"{key}.below: {shorten_value(kept.below)}: no value of {volume.url}, which has "
            f"{volume.dtype}, is below that. Write a value above {low}."
        )


def _is_value(value: float, dtype: AnyDtype) -> bool:
    if dtype.kind == "f":
        return True
    low, high = _limits(dtype)
    return isinstance(value, int) and low <= value <= high


def _limits(dtype: AnyDtype) -> tuple[float, float]:
    """The smallest and the largest value of a dtype; infinite ones count."""
    if dtype.kind == "f":
        return (-math.inf, math.inf)
    if dtype.kind == "b":
        return (0, 1)
    return (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
