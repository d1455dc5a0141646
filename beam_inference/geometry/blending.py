"""Blend weights, separable and normalised per axis so that they sum to one everywhere.

A patch's weight at voxel i of n is the bump ``exp(-1 / (1 - d^2))``, ``d = 2 (i + 1/2) / n - 1``
(Wu et al., "Chunkflow", Nature Methods 2021, eq. 1), divided by the sum of the bumps of all patches
that cover the voxel. The bump itself underflows (2e-56 at the edge of 256 voxels, zero in float64
at 2048), so the quotient is computed as a softmax of the exponents, in float64. Because the sum
over a product of per-axis partitions of unity is the product of the sums,
three such vectors suffice: there is no weight volume, and nothing to divide by afterwards.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.grids import LatticeAxis, PatchLattice
from beam_inference.geometry.zyx import Zyx

AxisWeights = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def patch_weights(lattice: PatchLattice, index: Zyx) -> AxisWeights:
    """The blend weights of one patch.

    The weight of voxel (z, y, x) of the patch is the product of three numbers, one of each axis.
    Over all patches of the lattice these products sum to one at every voxel of the domain.

    Args:
        lattice: the patch lattice.
        index: the patch, one number per axis, ZYX.

    Returns:
        Per axis, ZYX, a read-only float32 vector as long as the patch.
    """
    z, y, x = (axis_weights(axis, k) for axis, k in zip(lattice.axes, index, strict=True))
    return (z, y, x)


@lru_cache(maxsize=4096)
def axis_weights(axis: LatticeAxis, k: int) -> NDArray[np.float32]:
    """The weights of patch ``k`` of one axis: shape (axis.patch,), float32, read-only."""
    start = axis.patch_start(k)
    neighbours = axis.touching(start, start + axis.patch)
    return _weights_among(axis.patch, tuple(axis.patch_start(j) - start for j in neighbours))


@lru_cache(maxsize=1024)  # patches away from the domain's ends share one entry
def _weights_among(patch: int, offsets: tuple[int, ...]) -> NDArray[np.float32]:
    """Weights of a patch among patches that start at ``offsets`` from it (its own 0 included)."""
    t = (np.arange(patch) + 0.5) / patch
    exponent = -1.0 / (4.0 * t * (1.0 - t))  # 1 - d^2 = 4 t (1 - t)
    total = np.zeros(patch)
    # exp(inf): the neighbour outweighs this patch beyond all floats, weight 0
    with np.errstate(over="ignore"):
        for offset in offsets:
            in_patch = slice(max(0, offset), min(patch, patch + offset))
            in_neighbour = slice(max(0, -offset), min(patch, patch - offset))
            total[in_patch] += np.exp(exponent[in_neighbour] - exponent[in_patch])
    weights = (1.0 / total).astype(np.float32)
    weights.flags.writeable = False
    return weights
