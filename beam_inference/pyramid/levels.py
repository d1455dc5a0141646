"""The levels of a multiscale pyramid, and what a voxel of one is made of: pure geometry.

Cells are anchored at coordinate 0, as TensorStore has it: with a factor f, voxel i of a level
    covers the voxels ``i * f … (i + 1) * f`` of the level below, as far as there are any. So a
    level spans ``floor(start / f)`` to
``ceil(stop / f)``, and every level lies where the volume lies, whatever its size and voxel offset.
Example, f = 2::

    level 0, 3 … 10        3   4   5   6   7   8   9
    level 1, 1 … 5         1 ╵   2   ╵   3   ╵   4   ╵       voxel 1 is made of 3 alone

igneous begins its cells at the volume's first voxel, and floors the offset: the same where the
offset is a multiple of the factor, and elsewhere its levels lie up to f - 1 voxels beside the
volume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, ceil_div

_ISOTROPIC = math.sqrt(2)
"""Voxel sizes whose ratio is no larger count as equal: halving the finer one would bring them no nearer."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level above the base.

    Attributes:
        number: 1 is the first above the base.
        bounds: its extent in its own voxels, ZYX.
        factor: voxels of the level below along each side of a voxel, ZYX.
        total: voxels of the base along each side of a voxel, ZYX.
    """

    number: int
    bounds: BoundingBox
    factor: Zyx
    total: Zyx

    @property
    def name(self) -> str:
        """A word for logs and records."""
        return f"level-{self.number}"


def levels_above(
    bounds: BoundingBox,
    voxel_size_nm: tuple[float, float, float],
    block_shape: Zyx,
    factor: Zyx | None = None,
    count: int | None = None,
) -> list[Level]:
    """The levels of a pyramid over a base, finest first.

    Args:
        bounds: of the base, ZYX.
        voxel_size_nm: of the base, ZYX; only the ratios matter, and none where ``factor`` is given.
        block_shape: where ``count`` is None, the last level is the first that is no larger than
            this, ZYX.
        factor: from each level to the next; None for :func:`isotropic_factor`.
        count: how many; fewer where the volume is one voxel before.
    """
    levels: list[Level] = []
    total: Zyx = (1, 1, 1)
    while (len(levels) < count) if count is not None else _exceeds(bounds.shape, block_shape):
        z, y, x = (size * t for size, t in zip(voxel_size_nm, total, strict=True))
        step = factor or isotropic_factor((z, y, x), bounds.shape)
        above = covering(bounds, step)
        if above.shape == bounds.shape:
            break
        bounds = above
        total = _times(total, step)
        levels.append(Level(len(levels) + 1, bounds, step, total))
    return levels


def isotropic_factor(voxel_size_nm: tuple[float, float, float], shape: Zyx) -> Zyx:
    """2 along the axes whose voxels are shortest, up to a factor of √2, else 1: voxels become isotropic first.

    40 × 4 × 4 nm takes (1, 2, 2) until 40 × 32 × 32, and (2, 2, 2) from there. Axes of one voxel
    are left out.
    """
    long = [size for size, voxels in zip(voxel_size_nm, shape, strict=True) if voxels > 1]
    limit = min(long, default=0.0) * _ISOTROPIC
    z, y, x = (
        2 if voxels > 1 and size <= limit else 1
        for size, voxels in zip(voxel_size_nm, shape, strict=True)
    )
    return (z, y, x)


def covering(box: BoundingBox, factor: Zyx) -> BoundingBox:
    """The voxels of the level above that have a part in ``box``."""
    z, y, x = (
        (a // f, ceil_div(b, f)) for a, b, f in zip(box.start, box.stop, factor, strict=True)
    )
    return BoundingBox((z[0], y[0], x[0]), (z[1], y[1], x[1]))


def covered(box: BoundingBox, factor: Zyx, below: BoundingBox) -> BoundingBox:
    """The voxels of the level below, whose bounds are ``below``, that the voxels of ``box`` are made of."""
    return BoundingBox(_times(box.start, factor), _times(box.stop, factor)).intersection(below)


def grown(unit: Zyx, limit: Sequence[int], fits: Callable[[Zyx], bool]) -> Zyx:
    """``unit``, doubled along x, y and z in turn while that ``fits`` and until it covers ``limit``."""
    shape = unit
    while True:
        for axis in (2, 1, 0):
            z, y, x = (2 * n if k == axis else n for k, n in enumerate(shape))
            if shape[axis] < limit[axis] and fits((z, y, x)):
                shape = (z, y, x)
                break
        else:
            return shape


def parts(box: BoundingBox, shape: Zyx) -> Iterator[BoundingBox]:
    """Tiles of a box, of ``shape`` but at its end; z slowest."""
    grid = ChunkGrid(box, shape)
    return (grid.core_box(index) for index in range(grid.count))


def _exceeds(shape: Zyx, limit: Zyx) -> bool:
    return any(n > m for n, m in zip(shape, limit, strict=True))


def _times(a: Zyx, b: Zyx) -> Zyx:
    z, y, x = (m * n for m, n in zip(a, b, strict=True))
    return (z, y, x)
