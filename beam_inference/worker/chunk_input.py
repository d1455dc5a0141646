"""The voxels that a chunk needs, on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_inference.arrays import AnyArray
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx


class ChunkInput:
    """The voxels of a box on the host, whose copy on the device is made at most once.

    Args:
        array: shape (input channels, Z, Y, X), in the stored dtype.
        box: the voxels that the array holds.
        upload: gives the array as a device array; called by the thread that computes.

    Attributes:
        predictions: on the device, those of patches that were computed before the chunk's turn,
            by the size of their batch and their place in the lattice.

    Raises:
        ValueError: array and box differ in shape.
    """

    def __init__(self, array: AnyArray, box: BoundingBox, upload: Callable[[], Any]) -> None:
        if array.shape[1:] != box.shape:
            raise ValueError(f"the cutout has shape {array.shape[1:]}, the input box {box.shape}")
        self.predictions: dict[tuple[int, Zyx], Any] = {}
        self.array = array
        self.box = box
        self._upload = upload
        self._device_array: Any = None

    def on_device(self) -> Any:
        """Return the device array; upload it first if that was not done before."""
        if self._device_array is None:
            self._device_array = self._upload()
        return self._device_array

    def free_device_arrays(self) -> None:
        """Drop what is on the device, so that its memory is free for the next chunk's."""
        self._device_array = None
        self.predictions.clear()
