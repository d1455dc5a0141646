"""Patches of a chunk: where each lies in the cutout and in the core box, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from beam_inference.engines.protocol import Device
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.zyx import Zyx
from beam_inference.worker.chunk_input import ChunkInput


class PatchSlices(NamedTuple):
    """Slices of one patch along one axis.

    Attributes:
        cutout: the patch's input, in the cutout.
        patch: the voxels that it shares with the core, in the patch.
        core: the same voxels, in the core.
    """

    cutout: slice
    patch: slice
    core: slice


@dataclass(frozen=True, slots=True)
class Row:
    """A patch in a batch.

    Attributes:
        patches: of its chunk.
        index: its place in the lattice.
    """

    patches: ChunkPatches
    index: Zyx


class PatchBatch:
    """The array in which batches of one chunk's turn are put together.

    Args:
        shape: of a patch with its channels, (channels, Z, Y, X).
        device: makes the array.
    """

    def __init__(self, shape: tuple[int, ...], device: Device) -> None:
        self._shape = shape
        self._device = device
        self._array: Any = None

    def fill(self, rows: Sequence[Row], batch_size: int) -> Any:
        """Device array (batch_size, channels, *patch) of patches; the last one fills up the rest.

        The next call overwrites it.
        """
        if self._array is None or len(self._array) != batch_size:
            self._array = None  # before the next one is made: they would lie side by side
            self._array = self._device.empty((batch_size, *self._shape))
        for position in range(batch_size):
            row = rows[min(position, len(rows) - 1)]
            self._array[position] = row.patches.input(row.index)
        return self._array


SlicesPerAxis: TypeAlias = list[dict[int, PatchSlices]]
"""Slices of a chunk's patches: a dict per axis ZYX, with the patch's lattice index as key."""


class ChunkPatches:
    """The network's inputs, cut out of a chunk's.

    Args:
        cutout: the chunk's input, whose box holds ``work.input_box``.
        work: the patches of the chunk.

    Attributes:
        work: the patches of the chunk.
        slices: of each patch, by axis.
        known: the cutout's predictions, of patches that were computed before the chunk's turn.
    """

    def __init__(self, cutout: ChunkInput, work: ChunkWork) -> None:
        part = (slice(None), *work.input_box.slices_in(cutout.box))
        self.work = work
        self.slices = [axis_slices(work, axis) for axis in range(3)]
        self.known = cutout.predictions
        self._array = cutout.array[part]
        self._bits = self._array.view(f"u{self._array.itemsize}")
        self._volume = cutout.on_device()[part]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape (channels, Z, Y, X) of a patch's input."""
        patch = grown_shape(self.work.lattice.patch_shape, self.work.crop_margin)
        return (self._array.shape[0], *patch)

    def uniform_value(self, index: Zyx) -> bytes | None:
        """Dtype and bytes of each channel's value if the patch is one throughout; None if not.

        Bits are compared, because a network may tell -0.0 from 0.0. NaN is no value.
        """
        where = self._input_slices(index)
        patch = self._bits[where]
        first = patch[:, :1, :1, :1]
        # Most patches differ at a glance: only the others are looked at voxel by voxel.
        parts = (patch[:, :1, :1], patch[:, ::7, ::7, ::7], patch)
        if not all((part == first).all() for part in parts):
            return None
        if np.isnan(self._array[where][:, :1, :1, :1]).any():
            return None
        return self._array.dtype.str.encode() + first.tobytes()

    def beyond(self, index: Zyx, volume: BoundingBox) -> list[tuple[slice, slice, slice]]:
        """Parts of a patch's input, which may overlap, that lie beyond the volume."""
        parts = []
        for axis, where in enumerate(self._input_slices(index)[1:]):
            first = self.work.input_box.start[axis] + where.start
            length = where.stop - where.start
            low = min(max(0, volume.start[axis] - first), length)
            high = min(max(0, volume.stop[axis] - first), length)
            for part in (slice(0, low), slice(high, length)):
                if part.start < part.stop:
                    z, y, x = (part if each == axis else slice(None) for each in range(3))
                    parts.append((z, y, x))
        return parts

    def input(self, index: Zyx) -> Any:
        """Device array (channels, *patch) of a patch's input, in the stored dtype."""
        return self._volume[self._input_slices(index)]

    def _input_slices(self, index: Zyx) -> tuple[slice, ...]:
        per_axis = zip(self.slices, index, strict=True)
        return (slice(None), *(slices[k].cutout for slices, k in per_axis))


def axis_slices(work: ChunkWork, axis: int) -> dict[int, PatchSlices]:
    """Slices of each of a chunk's patches along one axis, by its index in the lattice.

    Raises:
        ValueError: a patch does not touch the core, or its input is not in the cutout.
    """
    core = work.core_box
    lattice = work.lattice.axes[axis]
    slices = {}
    for k in work.patches[axis]:
        first = lattice.patch_start(k)
        start = max(first, core.start[axis])
        stop = min(first + lattice.patch, core.stop[axis])
        read = first - work.crop_margin[axis] - work.input_box.start[axis]
        if start >= stop or read < 0:  # a negative slice would wrap around silently
            raise ValueError(
                f"patch {k} of axis {axis} misses the core {core}, or what is read, "
                f"{work.input_box}"
            )
        slices[k] = PatchSlices(
            slice(read, read + lattice.patch + 2 * work.crop_margin[axis]),
            slice(start - first, stop - first),
            slice(start - core.start[axis], stop - core.start[axis]),
        )
    return slices
