"""Patches of a chunk: where each lies in the cutout and in the core box, and batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from beam_inference.arrays import AnyArray
from beam_inference.engines.protocol import Device
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.zyx import Zyx


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


SlicesPerAxis: TypeAlias = list[dict[int, PatchSlices]]
"""Slices of a chunk's patches: a dict per axis ZYX, with the patch's lattice index as key."""


class ChunkPatches:
    """The network's inputs, cut out of a chunk's.

    Args:
        array: the chunk's input on the host, shape (channels, Z, Y, X).
        volume: the same as a device array.
        work: the patches of the chunk.
        device: makes the array in which batches are put together.
    """

    def __init__(self, array: AnyArray, volume: Any, work: ChunkWork, device: Device) -> None:
        self.slices = [axis_slices(work, axis) for axis in range(3)]
        self._array = array
        self._volume = volume
        self._start = work.input_box.start
        self._patch_shape = grown_shape(work.lattice.patch_shape, work.crop_margin)
        self._device = device
        self._batch: Any = None

    def uniform_value(self, index: Zyx) -> tuple[float, ...] | None:
        """Value of each channel if the patch is one value throughout; None if it is not."""
        patch = self._array[self._input_slices(index)]
        first = patch[:, :1, :1, :1]
        # Most patches differ at a glance: only the others are looked at voxel by voxel.
        parts = (patch[:, :1, :1], patch[:, ::7, ::7, ::7], patch)
        if not all((part == first).all() for part in parts):
            return None
        return tuple(first.ravel().tolist())

    def beyond(self, index: Zyx, volume: BoundingBox) -> list[tuple[slice, slice, slice]]:
        """Parts of a patch's input, which may overlap, that lie beyond the volume."""
        parts = []
        for axis, where in enumerate(self._input_slices(index)[1:]):
            first = self._start[axis] + where.start
            length = where.stop - where.start
            low = min(max(0, volume.start[axis] - first), length)
            high = min(max(0, volume.stop[axis] - first), length)
            for part in (slice(0, low), slice(high, length)):
                if part.start < part.stop:
                    z, y, x = (part if each == axis else slice(None) for each in range(3))
                    parts.append((z, y, x))
        return parts

    def batch(self, indices: Sequence[Zyx], batch_size: int) -> Any:
        """Device array (batch_size, channels, *patch) of patches; the last one fills up the rest.

        The next call overwrites it.
        """
        if self._batch is None or len(self._batch) != batch_size:
            self._batch = None  # before the next one is made: they would lie side by side
            shape = (batch_size, self._array.shape[0], *self._patch_shape)
            self._batch = self._device.empty(shape)
        slices = [self._input_slices(index) for index in indices]
        for position in range(batch_size):
            self._batch[position] = self._volume[slices[min(position, len(slices) - 1)]]
        return self._batch

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
