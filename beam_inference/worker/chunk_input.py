"""The voxels that a chunk needs, on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beam_inference.arrays import AnyArray
from beam_inference.geometry.bounding_box import BoundingBox


class ChunkInput:
    """The voxels of a box on the host, whose copy on the device is made at most once.

    Args:
        array: shape (input channels, Z, Y, X), in the stored dtype.
        box: the voxels that the array holds.
        upload: gives the array as a device array; called by the thread that computes.

    Raises:
        ValueError: array and box differ in shape.
    """

    def __init__(self, array: AnyArray, box: BoundingBox, upload: Callable[[], Any]) -> None:
        if array.shape[1:] != box.shape:
            raise ValueError(f"the cutout has shape {array.shape[1:]}, the input box {box.shape}")
        self.array = array
        self.box = box
        self._upload = upload
        self._device_array: Any = None

    def on_device(self) -> Any:
        """Return the device array; upload it first if that was not done before."""
        if self._device_array is None:
            self._device_array = self._upload()
        return self._device_array

    def free_device_array(self) -> None:
        """Drop the device array, so that the device's memory is free for the next chunk's."""
        self._device_array = None
