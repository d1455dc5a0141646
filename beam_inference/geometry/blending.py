"""Blend weights, normalised so that they sum to one at every voxel.

A patch's weight at a voxel is a window, divided by the sum of the windows of all patches that cover
the voxel. A window is a product of one function of each axis, whose exponent is, at voxel i of n:

- bump: ``-1 / (1 - d^2)``, ``d = 2 (i + 1/2) / n - 1`` (Wu et al., "Chunkflow", Nature Methods
  2021, eq. 1);
- constant: 0;
- gaussian: ``-x^2 / (2 s^2 n^2)``, x being the distance from the middle, or from voxel n // 2.

The bump itself underflows (2e-56 at the edge of 256 voxels, zero in float64 at 2048), so the
quotient is computed as a softmax of the exponents, in float64. Because the sum over a product of
per-axis partitions of unity is the product of the sums, three such vectors suffice: there is no
weight volume, and nothing to divide by afterwards.

Where a window has a floor, the least value that the product may have, this is not so. Then weights
are arrays as large as a patch. Those of two patches are the same where their neighbours lie in the
same way, as almost all do; a few are kept.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.grids import LatticeAxis, PatchLattice
from beam_inference.geometry.zyx import Zyx

KEPT_BYTES = 256 * 2**20
"""Most bytes of weights that are kept of windows with a floor; at least those of one patch."""


@dataclass(frozen=True, slots=True)
class BlendWindow:
    """What a patch's voxels weigh, before weights are normalised.

    Attributes:
        kind: the function of each axis.
        sigma: standard deviation of a Gaussian, as a share of the patch.
        is_on_voxel: whether a Gaussian is centred on voxel n // 2, and not in the middle.
        floor: the least product of the three functions, whose maximum is about one; 0 for none.
    """

    kind: Literal["bump", "constant", "gaussian"]
    sigma: float = 0.0
    is_on_voxel: bool = False
    floor: float = 0.0

    def exponents(self, length: int) -> NDArray[np.floating[Any]]:
        """Exponents of the function of an axis of a patch so long: float64, shape (length,)."""
        voxels = np.arange(length)
        if self.kind == "bump":
            t = (voxels + 0.5) / length
            return -1.0 / (4.0 * t * (1.0 - t))  # 1 - d^2 = 4 t (1 - t)
        if self.kind == "constant":
            return np.zeros(length)
        middle = length // 2 if self.is_on_voxel else (length - 1) / 2
        distances = (voxels - middle) / (self.sigma * length)
        return -0.5 * distances * distances


BUMP = BlendWindow("bump")


@lru_cache(maxsize=4096)
def axis_weights(axis: LatticeAxis, k: int, window: BlendWindow) -> NDArray[np.float32]:
    """The weights of patch ``k`` on one axis, of a window without a floor.

    The weight of voxel (z, y, x) of a patch is the product of three such numbers. Over all patches
    of a lattice these products sum to one at every voxel of the domain.

    Returns:
        Shape (axis.patch,), float32, read-only.
    """
    return _weights_among(axis.patch, _neighbour_offsets(axis, k), window)


def patch_weights(lattice: PatchLattice, index: Zyx, window: BlendWindow) -> NDArray[np.float32]:
    """The weights of one patch, of any window.

    Args:
        lattice: the patch lattice.
        index: the patch, one number per axis, ZYX.
        window: what voxels weigh before weights are normalised.

    Returns:
        Shape ``lattice.patch_shape``, float32, read-only.
    """
    z, y, x = (_neighbour_offsets(axis, k) for axis, k in zip(lattice.axes, index, strict=True))
    return _kept_weights.get(lattice.patch_shape, (z, y, x), window)


def kept_bytes(patch_shape: Zyx, window: BlendWindow) -> int:
    """The most bytes that weights of patches take in a process; 0 for a window without a floor."""
    if not window.floor:
        return 0
    voxels = math.prod(patch_shape)
    kept = max(KEPT_BYTES, 4 * voxels)
    return kept + 2 * 8 * voxels  # the window and the sum, in float64, while weights are computed


def _neighbour_offsets(axis: LatticeAxis, k: int) -> tuple[int, ...]:
    """Where the patches that touch a patch start, itself included, counted from its own start."""
    start = axis.patch_start(k)
    return tuple(axis.patch_start(j) - start for j in axis.touching(start, start + axis.patch))


@lru_cache(maxsize=1024)  # patches away from the domain's ends share one entry
def _weights_among(
    patch: int, offsets: tuple[int, ...], window: BlendWindow
) -> NDArray[np.float32]:
    """Weights of a patch on one axis among patches that start at ``offsets`` from it."""
    exponents = window.exponents(patch)
    total = np.zeros(patch)
    # exp(inf): the neighbour outweighs this patch beyond all floats, weight 0
    with np.errstate(over="ignore"):
        for offset in offsets:
            here, there = _overlap(patch, offset)
            total[here] += np.exp(exponents[there] - exponents[here])
    weights = (1.0 / total).astype(np.float32)
    weights.flags.writeable = False
    return weights


def _overlap(patch: int, offset: int) -> tuple[slice, slice]:
    """What a patch shares with one that starts ``offset`` voxels later, in both their voxels."""
    here = slice(max(0, offset), min(patch, patch + offset))
    there = slice(max(0, -offset), min(patch, patch - offset))
    return here, there


Offsets = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class _KeptWeights:
    """Weights of patches of windows with a floor, those used last, within some memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Zyx, Offsets, BlendWindow], NDArray[np.float32]]
        self._kept = OrderedDict()

    def get(self, shape: Zyx, offsets: Offsets, window: BlendWindow) -> NDArray[np.float32]:
        """The weights of a patch of a shape among patches at some offsets, per axis."""
        key = (shape, offsets, window)
        with self._lock:  # threads that want the same weights wait for them
            if key not in self._kept:
                self._kept[key] = _compute_weights(shape, offsets, window)
                while len(self._kept) > max(1, KEPT_BYTES // self._kept[key].nbytes):
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


_kept_weights = _KeptWeights()


def _compute_weights(shape: Zyx, offsets: Offsets, window: BlendWindow) -> NDArray[np.float32]:
    z, y, x = (window.exponents(n) for n in shape)
    values = np.maximum(np.exp(z[:, None, None] + y[:, None] + x), window.floor)
    total = np.zeros(shape)
    for offset in product(*offsets):
        overlaps = [_overlap(n, each) for n, each in zip(shape, offset, strict=True)]
        total[tuple(here for here, _ in overlaps)] += values[tuple(there for _, there in overlaps)]
    values /= total
    weights: NDArray[np.float32] = values.astype(np.float32)
    weights.flags.writeable = False
    return weights
