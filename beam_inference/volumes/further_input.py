"""Volumes over the same box as a job's input, brought to its voxels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.volumes import FurtherResample
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import Origin, Rest
from beam_inference.geometry.resampling import AxisPlace, Order, Resampling, coarse_axis
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, add, triple
from beam_inference.volumes.input_volume import FurtherVolume, InputVolume, as_input
from beam_inference.volumes.kvstores import TRANSFER_SECONDS
from beam_inference.volumes.volume import Volume

_SAME_PLACE = 0.05
"""Parts of a voxel up to which voxels of two volumes are at one place: metadata are rounded."""

_SAME_END = 0.999
"""Parts of the larger voxel by which volumes over the same box may end in different places.

A coarser scale of a volume that its voxels do not divide reaches less than one of them beyond it.
"""


def fit_to_input(
    stored: Volume, key: str, request: FurtherResample, first: InputVolume, output_scale: Zyx
) -> InputVolume:
    """A volume with the voxels and the bounds of a job's input, without its mask.

    It is read as if it ended where the input does. Where its voxels are those that are read of the
    input, they are read as they are stored. Else each voxel of the input has the value at its
    middle, wherever that lies in this volume.

    Args:
        stored: the volume as it is stored.
        key: of the job file, for messages.
        request: how it is resampled, if it is.
        first: the input.
        output_scale: voxels of the network's output for each of its input, ZYX.

    Raises:
        ConfigError: it does not cover the same box, or has other channels than the limits of
            ``request``.
    """
    own, theirs = _voxel_sizes(stored, first.stored)
    _check_box(stored, own, key, first, theirs)
    stored = _crop_to_box(stored, own, first, theirs)
    factor = output_scale if first.voxel_size_nm is None else (1, 1, 1)
    read = _divide(first.voxel_size_nm or theirs, factor)
    seen = _multiply(read, output_scale)
    begin = _begin_nm(first.bounds.start, first.origin.rest, read)
    own_begin = _begin_nm(stored.bounds.start, stored.origin.rest, own)
    z, y, x = (
        _axis_place(
            (begin[axis] + seen[axis] / 2 - own_begin[axis]) / own[axis] - 0.5,
            seen[axis] / own[axis],
            first.bounds.shape[axis] // output_scale[axis],
        )
        for axis in range(3)
    )
    places = (z, y, x)
    if len(request.limits) not in (0, 1, stored.channels):
        raise ConfigError(
            f"{key}.resample.clip has limits of {len(request.limits)} channels, and {stored.url} "
            f"{stored.channels}: write one pair for each"
        )
    moved = _move_to_input(stored, places, first)
    if moved is not None and output_scale == (1, 1, 1) and not request.limits:
        return moved
    coarse = coarse_axis(own, seen, request.separate_z)
    order = request.order if moved is None else 0
    o_z, o_y, o_x = (_order(order, axis, coarse) for axis in range(3))
    return replace(
        as_input(stored, None, None),
        bounds=first.bounds,
        dtype=np.dtype(np.float32),
        voxel_size_nm=first.voxel_size_nm,
        origin=Origin(rest=first.origin.rest),
        resampling=Resampling(stored.bounds, first.bounds, (o_z, o_y, o_x), output_scale, places),
        limits=request.limits,
    )


@dataclass(frozen=True)
class JoinedVolume(Volume):
    """Several volumes of the same voxels, as one with all their channels; all else is the first's.

    Attributes:
        joined: the volumes.
    """

    joined: InputVolume = field(kw_only=True)

    def read(self, box: BoundingBox, timeout: float = TRANSFER_SECONDS) -> AnyArray:
        """Read as from any volume, each channel as the common dtype."""
        return self.joined.cutout(box, "edge", 0.0, timeout)


def join_volumes(first: Volume, others: Sequence[Volume]) -> JoinedVolume:
    """Several volumes as one.

    Raises:
        ConfigError: one of them does not cover the same box, or has other voxels.
    """
    joined = as_input(first, None, None)
    for other in others:
        part = fit_to_input(other, other.url, FurtherResample(), joined, (1, 1, 1))
        if part.resampling is not None:
            raise ConfigError(
                f"{other.url} has other voxels than {first.url}: their values can only be counted "
                "together where each voxel of one is a voxel of the other. Count each by itself, "
                "or copy one to the voxels of the other (beam-inference resample)."
            )
        joined = replace(joined, further=(*joined.further, FurtherVolume(part, "edge", 0.0)))
    values = {each.name: getattr(joined, each.name) for each in fields(Volume)}
    values |= {"channels": joined.all_channels, "dtype": joined.cutout_dtype}
    return JoinedVolume(**values, joined=joined)


def _divide(size: VoxelSizeNm, by: Zyx) -> VoxelSizeNm:
    z, y, x = (each / n for each, n in zip(size, by, strict=True))
    return (z, y, x)


def _multiply(size: VoxelSizeNm, by: Zyx) -> VoxelSizeNm:
    z, y, x = (each * n for each, n in zip(size, by, strict=True))
    return (z, y, x)


def _order(order: Order, axis: int, coarse: int | None) -> Order:
    return 0 if axis == coarse else order


def _voxel_sizes(stored: Volume, first: Volume) -> tuple[VoxelSizeNm, VoxelSizeNm]:
    """Voxel sizes of two volumes; one that does not say is taken to have the other's."""
    nothing = (1.0, 1.0, 1.0)
    own = stored.voxel_size_nm or first.voxel_size_nm or nothing
    return own, first.voxel_size_nm or own


def _begin_nm(start: Zyx, rest: Rest, size: VoxelSizeNm) -> VoxelSizeNm:
    z, y, x = ((n + part) * each for n, part, each in zip(start, rest, size, strict=True))
    return (z, y, x)


def _axis_place(first: float, step: float, count: int) -> AxisPlace:
    """The place of voxels, which are whole ones if all of them are, but for rounding."""
    whole = round(first)
    last = first + (count - 1) * step
    if max(abs(first - whole), abs(last - whole - (count - 1))) <= _SAME_PLACE:
        return AxisPlace(float(whole), 1.0)
    return AxisPlace(first, step)


def _move_to_input(
    stored: Volume, places: tuple[AxisPlace, ...], first: InputVolume
) -> InputVolume | None:
    """The volume with the input's coordinates, if it has the voxels that are read of the input."""
    if any(place.step != 1.0 or place.first != int(place.first) for place in places):
        return None
    shift = triple(
        start - begin - int(place.first)
        for start, begin, place in zip(first.bounds.start, stored.bounds.start, places, strict=True)
    )
    voxel = add(stored.origin.voxel, shift)
    moved = stored.place_at(replace(stored.origin, voxel=voxel))
    if not moved.bounds.contains(first.bounds):
        return None
    return as_input(moved.crop(first.bounds), None, None)


def _check_box(
    stored: Volume, own: VoxelSizeNm, key: str, first: InputVolume, theirs: VoxelSizeNm
) -> None:
    """Refuse a volume that does not cover the same box as the input, compared in nanometres.

    Of an input of which a box is read, it must cover that box.
    """
    whole = _extent_nm(first.whole or first.stored.bounds, first.stored.origin.rest, theirs)
    needed = _extent_nm(first.stored.bounds, first.stored.origin.rest, theirs)
    extent = _extent_nm(stored.bounds, stored.origin.rest, own)
    for axis in range(3):
        room = _SAME_END * max(own[axis], theirs[axis])
        is_larger = (
            extent[0][axis] < whole[0][axis] - room or extent[1][axis] > whole[1][axis] + room
        )
        is_smaller = (
            extent[0][axis] > needed[0][axis] + room or extent[1][axis] < needed[1][axis] - room
        )
        if is_larger or is_smaller:
            raise ConfigError(
                f"{key}.path: {stored.url} covers {_extent_text(extent)}{_size_text(stored)}, and "
                f"the input {first.url} {_extent_text(whole)}{_size_text(first.stored)}: as their "
                "voxels are channels of one network, they must cover the same box, to within a "
                "voxel. Choose another scale, cut the larger one (beam-inference convert --roi), "
                "read a box of the input (input.box), or correct a position (beam-inference "
                "convert --offset)."
            )


def _crop_to_box(
    stored: Volume, own: VoxelSizeNm, first: InputVolume, theirs: VoxelSizeNm
) -> Volume:
    """The volume as if it ended with the voxels that cover what is read of the input."""
    extent = _extent_nm(first.stored.bounds, first.stored.origin.rest, theirs)
    low, high = (
        [at / size - part for at, size, part in zip(ends, own, stored.origin.rest, strict=True)]
        for ends in extent
    )
    covering = BoundingBox(
        triple(math.floor(each + _SAME_PLACE) for each in low),
        triple(math.ceil(each - _SAME_PLACE) for each in high),
    )
    return stored.crop(covering.intersection(stored.bounds))


def _extent_nm(
    bounds: BoundingBox, rest: Rest, size: VoxelSizeNm
) -> tuple[VoxelSizeNm, VoxelSizeNm]:
    return _begin_nm(bounds.start, rest, size), _begin_nm(bounds.stop, rest, size)


def _extent_text(extent: tuple[VoxelSizeNm, VoxelSizeNm]) -> str:
    start, stop = ([float(f"{each:g}") for each in corner] for corner in extent)
    return f"{start} to {stop} nm (z, y, x)"


def _size_text(volume: Volume) -> str:
    return "" if volume.voxel_size_nm is not None else ", if its voxels are as large as the other's"
