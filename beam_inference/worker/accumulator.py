"""The array in which a chunk's weighted predictions are added up."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.engines.protocol import AS_COMPUTED, Device, Encoding
from beam_inference.errors import NonFiniteError
from beam_inference.geometry.blending import axis_weights
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.zyx import Zyx
from beam_inference.worker.patches import Places


class Accumulator:
    """A chunk's core, blended in a slab on the device that moves along z, and encoded behind it."""

    def __init__(
        self, work: ChunkWork, places: Places, device: Device, channels: int, encoding: Encoding
    ) -> None:
        self._work = work
        self._device = device
        self._encoding = encoding
        depth, y, x = work.core_box.shape
        # All of them now: made between the network's answers, they would lie between the holes that
        # these leave.
        patch_depth, *across = work.lattice.patch_shape
        self._weights, self._weighted = (
            device.empty((patch_depth, n, *across)) for n in (1, channels)
        )
        self._along_z, self._planes = _axis_and_planes(work, device)
        self._places = places
        self._result: NDArray[Any] | None = None
        self._on_its_way: tuple[slice, Callable[[], NDArray[Any]]] | None = None
        if device.on_host and encoding == AS_COMPUTED:
            self._slab = device.empty((channels, depth, y, x)).swapaxes(0, 1)
        else:
            self._result = arrays.empty((channels, depth, y, x), encoding.dtype)
            # Z before the channels: what leaves, and what moves, is then one piece of memory.
            self._slab = device.empty((min(patch_depth, depth), channels, y, x))
        self._slab_start = 0  # in the core, along z
        self._rows = slice(0, 0)  # of the core, those that the layer under way touches

    def blend(self, index: Zyx, prediction: Any) -> None:
        """Add one patch's weighted prediction (C, Z, Y, X).

        It is not weighted in place: what the network returned may be its own buffer, or a view of
            one value. Products
        and sum are separate operations, each rounded on its own: a fused multiply-add may be used
            for some voxels of an array and not for others, which would make the bits depend on
            where a chunk is cut.
        """
        z, y, x = (places[k] for places, k in zip(self._places, index, strict=True))
        if z.core != self._rows:
            self._advance(z.core)
        here = (z.patch, slice(None), y.patch, x.patch)
        weights = self._weights[here]
        part = self._weighted[here]
        self._device.multiply(
            self._along_z[index[0]][z.patch], self._planes[index[1:]][y.patch, x.patch], weights
        )
        self._device.multiply(prediction.swapaxes(0, 1)[here], weights, part)
        sums = self._slab[
            z.core.start - self._slab_start : z.core.stop - self._slab_start, :, y.core, x.core
        ]
        sums += part  # not self._slab[...] += part, which would write them twice

    def finished(self) -> NDArray[Any]:
        """The core; no patch is left to blend."""
        self._leave(self._work.core_box.shape[0])
        if self._result is None:
            return self._device.download(self._slab)().swapaxes(0, 1)
        self._arrive(self._result)
        return self._result

    def _advance(self, rows: slice) -> None:
        """Go on to the next layer's rows: those before them are final, those after the last ones' begin as zeros."""
        begun = self._rows.stop
        self._leave(rows.start)
        if self._result is not None and rows.start > self._slab_start:
            gone = rows.start - self._slab_start
            kept = begun - rows.start
            for moved in range(0, kept, gone):  # a copy must not overlap its source
                here = slice(moved, min(moved + gone, kept))
                self._slab[here] = self._slab[here.start + gone : here.stop + gone]
            self._slab_start = rows.start
        self._slab[begun - self._slab_start : rows.stop - self._slab_start] = 0
        self._rows = rows

    def _leave(self, stop: int) -> None:
        """Check rows before ``stop`` and send them to the result; a GPU computes on while they are on their way."""
        if stop == self._rows.start:
            return
        part = self._slab[self._rows.start - self._slab_start : stop - self._slab_start]
        if self._result is not None:
            # the last ones, while the GPU still computes what is to leave now
            self._arrive(self._result)
        # A sum that is finite has finite terms, and takes one pass; one that is not may have
        # overflowed.
        if not (
            np.isfinite(float(part.sum()))
            or np.isfinite([float(part.min()), float(part.max())]).all()
        ):
            raise NonFiniteError("NaN or infinite values after blending")
        if self._result is not None:
            self._on_its_way = (
                slice(self._rows.start, stop),
                self._device.download(part, self._encoding),
            )
            if self._device.on_host:
                self._arrive(self._result)  # they are there, and would take memory

    def _arrive(self, result: NDArray[Any]) -> None:
        """Put what is on its way where it belongs in the result."""
        if self._on_its_way is not None:
            where, arrived = self._on_its_way
            result[:, where] = arrived().swapaxes(0, 1)
            self._on_its_way = None


def _axis_and_planes(
    work: ChunkWork, device: Device
) -> tuple[dict[int, Any], dict[tuple[int, int], Any]]:
    """Blend weights of a chunk's patches, on the device: (Z, 1, 1, 1) by index along z, (Y, X) by the others."""
    z, y, x = (
        {k: axis_weights(axis, k) for k in indices}
        for axis, indices in zip(work.lattice.axes, work.patches, strict=True)
    )
    # away from the domain's ends axes' weights are the same arrays
    planes = {}
    alike = {}
    for j, i in product(y, x):
        weights = (id(y[j]), id(x[i]))
        if weights not in alike:
            alike[weights] = device.upload(y[j][:, None] * x[i])
        planes[j, i] = alike[weights]
    return {k: device.upload(weights.reshape(-1, 1, 1, 1)) for k, weights in z.items()}, planes
