"""Where a volume's index zero lies: the one home of that question.

Voxels have whole coordinates, which all volumes of a job share: voxel i of a volume covers
``i … i + 1`` times its voxel size, and a volume's bounds are its voxels by these coordinates.
Formats that count voxels from elsewhere than 0 state the bounds themselves. Others count from 0 and
state a length beside them, as OME-Zarr's translation; whole voxels of that length move the bounds,
and what is left is the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, triple

Rest: TypeAlias = tuple[float, float, float]
"""A part of a voxel on each axis, ZYX: at least -0.5, and less than 0.5."""

NO_REST: Rest = (0.0, 0.0, 0.0)

_ROUNDING = 1e-3
"""Parts of a voxel up to which a position counts as whole: metadata are rounded."""

FARTHEST = 2**40
"""Largest coordinate. TensorStore's have 64 bits, and sums of ours must stay well inside."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the voxel of index zero lies.

    Attributes:
        voxel: its coordinates, ZYX.
        rest: how far it lies beyond them, in voxels, ZYX.
    """

    voxel: Zyx = (0, 0, 0)
    rest: Rest = NO_REST


AT_ZERO = Origin()
"""The origin of a volume that counts its voxels as its array does."""


def origin_at(position: Sequence[float]) -> Origin:
    """The origin of a volume whose first voxel begins at a position.

    Args:
        position: in voxels, ZYX; up to a thousandth of a voxel counts as rounding.

    Raises:
        ValueError: the position is no number, or too far to be counted in voxels.
    """
    if not all(abs(coordinate) <= FARTHEST for coordinate in position):  # NaN is not
        raise ValueError(f"a volume cannot begin at the voxel {list(position)} (z, y, x)")
    whole = triple(math.floor(coordinate + 0.5) for coordinate in position)
    z, y, x = (
        0.0 if abs(coordinate - n) <= _ROUNDING else coordinate - n
        for coordinate, n in zip(position, whole, strict=True)
    )
    return Origin(whole, (z, y, x))


def pad_to_zero(box: BoundingBox) -> BoundingBox | None:
    """The box from voxel 0 to a box's stop; None for a box that begins before voxel 0."""
    return None if min(box.start) < 0 else BoundingBox((0, 0, 0), box.stop)
