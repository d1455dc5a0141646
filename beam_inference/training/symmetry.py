"""Flips and transposes of cutouts, and of affinities that were computed before.

Affinities of flipped labels are not the flipped affinities: an affinity is about a pair of voxels,
and a flip turns the pair round. Where labels are at hand, flip them and compute affinities of the
result. Where only affinities are stored, :func:`map_channels` gives the same values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.engines.augmented import Symmetry
from beam_inference.geometry import zyx
from beam_inference.geometry.zyx import Zyx


def map_array(array: AnyArray, symmetry: Symmetry) -> AnyArray:
    """An array (channels, Z, Y, X) whose voxels are moved by a symmetry; a view of the old one."""
    moved = array.swapaxes(2, 3) if symmetry.transpose else array
    return np.flip(moved, tuple(axis - 1 for axis in symmetry.flipped_axes))


def map_channels(
    values: AnyArray,
    known: NDArray[np.bool_],
    symmetry: Symmetry,
    offsets: Sequence[Zyx | None],
) -> tuple[AnyArray, NDArray[np.bool_]]:
    """Channels of a patch, as they are of the mapped patch.

    Args:
        values: of the patch (channels, Z, Y, X).
        known: where they count, of the same shape.
        symmetry: how voxels are moved.
        offsets: of each channel that is an affinity, ZYX in voxels: channel c says of voxel w
            whether it belongs together with w + offset. None for a channel about voxels themselves.

    Returns:
        The values of the mapped patch, and where they count. A channel whose pairs no channel of
        the patch tells of counts nowhere.
    """
    mapped = map_array(values, symmetry)
    mapped_known = map_array(known, symmetry)
    result = np.zeros_like(mapped)
    result_known = np.zeros_like(mapped_known)
    for channel, offset in enumerate(offsets):
        source = offset if offset is None else symmetry.maps_back(offset)
        if source is None:
            result[channel] = mapped[channel]
            result_known[channel] = mapped_known[channel]
        elif source in offsets:
            result[channel] = mapped[offsets.index(source)]
            result_known[channel] = mapped_known[offsets.index(source)]
        elif zyx.negative(source) in offsets and offset is not None:
            # The pair is turned round: its affinity stands at its other voxel.
            answering = offsets.index(zyx.negative(source))
            here, there = pair_slices(offset)
            result[channel][here] = mapped[answering][there]
            result_known[channel][here] = mapped_known[answering][there]
    return result, result_known


def pair_slices(offset: Zyx) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Slices of the voxels w for which w + offset lies in the same array; and of w + offset."""
    here = tuple(slice(max(0, -n), min(0, -n) or None) for n in offset)
    there = tuple(slice(max(0, n), min(0, n) or None) for n in offset)
    return here, there
