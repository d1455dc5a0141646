"""Blend weights of a chunk's patches on the network's device, in steps of exact sums."""

from __future__ import annotations

from itertools import product
from typing import Any, Protocol

import numpy as np

from beam_inference.engines.protocol import Device
from beam_inference.geometry.blending import BlendWindow, axis_weights, patch_weights
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.zyx import Zyx

Region = tuple[slice, slice, slice, slice]
"""Part of a patch: slices of arrays (Z, channels, Y, X)."""


class Weights(Protocol):
    """Weights of patches as device arrays."""

    def of_patch(self, index: Zyx, region: Region) -> Any:
        """The weights of a part of a patch, times the steps in one unit: (Z, 1, Y, X).

        They are good until the next call.
        """


class ProductWeights:
    """Weights that are products of one vector of each axis.

    Args:
        work: the chunk's patches.
        device: where the arrays are to be.
        window: without a floor.
        steps_per_unit: a power of two, so that the product with it is exact.
    """

    def __init__(
        self, work: ChunkWork, device: Device, window: BlendWindow, steps_per_unit: float
    ) -> None:
        self._device = device
        depth, *across = work.lattice.patch_shape
        self._product = device.empty((depth, 1, *across))
        self._along_z = _weights_along_z(work, device, window, steps_per_unit)
        self._planes = _weight_planes(work, device, window)

    def of_patch(self, index: Zyx, region: Region) -> Any:
        """See :class:`Weights`."""
        z, _, y, x = region
        product_of_region = self._product[region]
        along_z = self._along_z[index[0]][z]
        self._device.multiply(along_z, self._planes[index[1:]][y, x], product_of_region)
        return product_of_region


class WholeWeights:
    """Weights that are arrays as large as a patch.

    Args:
        work: the chunk's patches.
        device: where the arrays are to be.
        window: any.
        steps_per_unit: a power of two, so that the product with it is exact.
    """

    def __init__(
        self, work: ChunkWork, device: Device, window: BlendWindow, steps_per_unit: float
    ) -> None:
        self._work = work
        self._device = device
        self._window = window
        self._steps_per_unit = np.float32(steps_per_unit)

    def of_patch(self, index: Zyx, region: Region) -> Any:
        """See :class:`Weights`."""
        z, channels, y, x = region
        weights = patch_weights(self._work.lattice, index, self._window)[z, y, x]
        return self._device.upload((weights * self._steps_per_unit)[:, None])[:, channels]


def _weights_along_z(
    work: ChunkWork, device: Device, window: BlendWindow, steps_per_unit: float
) -> dict[int, Any]:
    """Blend weights along z, in steps, as device arrays (Z, 1, 1, 1), by the index along z."""
    axis = work.lattice.axes[0]
    weights = {
        k: axis_weights(axis, k, window) * np.float32(steps_per_unit) for k in work.patches[0]
    }
    return {k: device.upload(weights[k].reshape(-1, 1, 1, 1)) for k in weights}


def _weight_planes(
    work: ChunkWork, device: Device, window: BlendWindow
) -> dict[tuple[int, int], Any]:
    """Blend weights across z as device arrays (Y, X), by the patch's indices along y and x."""
    y, x = (
        {k: axis_weights(work.lattice.axes[axis], k, window) for k in work.patches[axis]}
        for axis in (1, 2)
    )
    planes = {}
    # Away from the domain's ends the weights of an axis are one and the same array.
    uploaded: dict[tuple[int, int], Any] = {}
    for j, i in product(y, x):
        key = (id(y[j]), id(x[i]))
        if key not in uploaded:
            uploaded[key] = device.upload(y[j][:, None] * x[i])
        planes[j, i] = uploaded[key]
    return planes
