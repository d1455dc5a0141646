"""Geometry of a pyramid's scales: their bounds, and the voxels that a voxel is made of.

Cells are anchored at coordinate 0, as TensorStore has it: with a factor f, voxel i of a scale
covers the voxels ``i * f … (i + 1) * f`` of the scale below, as far as there are any. So a scale
spans ``floor(start / f)`` to ``ceil(stop / f)``, and every scale lies where the volume lies,
whatever its size and voxel offset. Example, f = 2::

    scale 0, 3 … 10        3   4   5   6   7   8   9
    scale 1, 1 … 5         1 ╵   2   ╵   3   ╵   4   ╵       voxel 1 is made of 3 alone

igneous begins its cells at the volume's first voxel, and rounds the offset down. That is the same
where the offset is a multiple of the factor; elsewhere its scales lie up to f - 1 voxels beside
the volume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx, multiply, triple, with_axis

_ISOTROPIC = math.sqrt(2)
"""Voxel sizes up to this ratio count as equal: halving the finer one would bring them no nearer."""


@dataclass(frozen=True, slots=True)
class PyramidScale:
    """One scale above the base.

    Attributes:
        number: 1 for the first above the base.
        bounds: its extent in its own voxels, ZYX.
        factor: voxels of the scale below along each side of a voxel, ZYX.
        total: voxels of the base along each side of a voxel, ZYX.
    """

    number: int
    bounds: BoundingBox
    factor: Zyx
    total: Zyx

    @property
    def name(self) -> str:
        """Name in logs and records, where it must stay as it is."""
        return f"level-{self.number}"


def scales_above(
    bounds: BoundingBox,
    voxel_size_nm: VoxelSizeNm,
    block_shape: Zyx,
    factor: Zyx | None = None,
    count: int | None = None,
) -> list[PyramidScale]:
    """The scales of a pyramid over a base, finest first.

    Args:
        bounds: bounds of the base, ZYX.
        voxel_size_nm: voxel size of the base, ZYX; only the ratios matter, and only without
            ``factor``.
        block_shape: without ``count``, the last scale is the first that is no larger, ZYX.
        factor: from each scale to the next; None for :func:`isotropic_factor`.
        count: number of scales; there are fewer if one of them is a single voxel.
    """
    scales: list[PyramidScale] = []
    total: Zyx = (1, 1, 1)
    while (len(scales) < count) if count is not None else _exceeds(bounds.shape, block_shape):
        z, y, x = (size * t for size, t in zip(voxel_size_nm, total, strict=True))
        step = factor or isotropic_factor((z, y, x), bounds.shape)
        above = bounds.coarsen(step)
        if above.shape == bounds.shape:
            break
        bounds = above
        total = multiply(total, step)
        scales.append(PyramidScale(len(scales) + 1, bounds, step, total))
    return scales


def isotropic_factor(voxel_size_nm: VoxelSizeNm, shape: Zyx) -> Zyx:
    """Factor of the next scale so that voxels become isotropic first: 1 or 2 along each axis, ZYX.

    It is 2 along the axes whose voxels are shortest, up to a ratio of √2. Voxels of 40 × 4 × 4 nm
    take (1, 2, 2) until 40 × 32 × 32, and (2, 2, 2) from there. Axes of one voxel are left out.
    """
    long = [size for size, voxels in zip(voxel_size_nm, shape, strict=True) if voxels > 1]
    limit = min(long, default=0.0) * _ISOTROPIC
    return triple(
        2 if voxels > 1 and size <= limit else 1
        for size, voxels in zip(voxel_size_nm, shape, strict=True)
    )


def grow_shape(unit: Zyx, limit: Zyx, fits: Callable[[Zyx], bool]) -> Zyx:
    """Double a shape along x, y and z in turn, while it ``fits`` and until it covers ``limit``."""
    shape = unit
    while True:
        for axis in (2, 1, 0):
            doubled = with_axis(shape, axis, 2 * shape[axis])
            if shape[axis] < limit[axis] and fits(doubled):
                shape = doubled
                break
        else:
            return shape


def tiles(box: BoundingBox, shape: Zyx) -> Iterator[BoundingBox]:
    """Tiles of a box, of ``shape`` but at its end; z slowest."""
    grid = ChunkGrid(box, shape)
    return (grid.core_box(index) for index in range(grid.count))


def _exceeds(shape: Zyx, limit: Zyx) -> bool:
    return any(n > m for n, m in zip(shape, limit, strict=True))
