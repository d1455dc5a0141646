"""Networks on the host, given as functions of NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.engines.identity import DESCRIPTION
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import AS_COMPUTED, Device, Encoding
from beam_inference.errors import DeviceOutOfMemory

Function = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def unchanged(batch: Any) -> Any:
    """The batch itself."""
    return batch


def position_dependent(batch: NDArray[np.float32]) -> NDArray[np.float32]:
    """Two channels that depend on where a voxel is in its patch: errors of geometry show."""
    z, y, x = (np.linspace(1, 2, n, dtype=np.float32) for n in batch.shape[2:])
    ramp = z[:, None, None] * y[:, None] ** 2 * x**3
    return np.concatenate([batch * ramp, batch - ramp], axis=1)


class NumpyNetwork(Predictor):
    """A network on the host; notes the size of each batch.

    Args:
        function: maps a batch (N, C, Z, Y, X) to predictions.
        largest_batch: patches for which the device has memory.
        device: where its arrays are.
    """

    def __init__(
        self,
        function: Function = unchanged,
        largest_batch: int = 10**9,
        device: Device | None = None,
    ) -> None:
        super().__init__(device or NumpyDevice(), self._predict, DESCRIPTION)
        self.batches: list[int] = []
        self._function = function
        self._largest_batch = largest_batch

    def _predict(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(batch) > self._largest_batch:
            raise DeviceOutOfMemory("no room")
        self.batches.append(len(batch))
        return self._function(batch)


class RemoteDevice(NumpyDevice):
    """A device whose arrays do not count as the host's, and whose downloads arrive late."""

    on_host = False

    def __init__(self) -> None:
        self._pending_downloads = 0

    def download(
        self, array: NDArray[np.float32], encoding: Encoding = AS_COMPUTED
    ) -> Callable[[], NDArray[Any]]:
        """The array, encoded; its values are there once they are waited for."""
        values = super().download(array.copy(), encoding)()
        late = np.full_like(values, 77)
        self._pending_downloads += 1
        assert self._pending_downloads == 1, "memory for one is what is projected"

        def wait() -> NDArray[Any]:
            late[...] = values
            self._pending_downloads -= 1
            return late

        return wait


class NotingDevice(NumpyDevice):
    """A device that notes which threads begin uploads."""

    def __init__(self) -> None:
        self.uploading_threads: list[str] = []

    def begin_upload(self, array: NDArray[Any]) -> Callable[[], NDArray[Any]]:
        """A function that returns the array itself."""
        self.uploading_threads.append(threading.current_thread().name)
        return super().begin_upload(array)


class ScarceDevice(NumpyDevice):
    """A device with an array in the way that was sent ahead.

    From the second call of one method on, there is no room until :meth:`make_room` is called.

    Args:
        fails_at: the method that finds no room: "upload", "predict" or "download".

    Attributes:
        calls: calls of that method so far.
        times_made_room: calls of :meth:`make_room`.
    """

    def __init__(self, fails_at: str) -> None:
        self.calls = 0
        self.times_made_room = 0
        self._fails_at = fails_at

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself, if there is room."""
        self.need_room("upload")
        return super().upload(array)

    def download(
        self, array: NDArray[np.float32], encoding: Encoding = AS_COMPUTED
    ) -> Callable[[], NDArray[Any]]:
        """The array, encoded, if there is room."""
        self.need_room("download")
        return super().download(array, encoding)

    def make_room(self) -> bool:
        """Drop what was sent ahead; True the first time."""
        self.times_made_room += 1
        return self.times_made_room == 1

    def need_room(self, method: str) -> None:
        """Raise if a method finds no room."""
        if method != self._fails_at:
            return
        self.calls += 1
        if self.calls > 1 and not self.times_made_room:
            raise DeviceOutOfMemory("no room")
