"""A device that is as late as a GPU: it is told what to do, and does it on threads of its own.

Values are computed at once, on the CPU; only the time that they take passes on the device's
threads, one for kernels, one for uploads and one for downloads. So figures of it say how a loop
hides copies and launches behind kernels, and nothing of kernels. What reads a single value (a
check for NaN) does not wait for it here, on a GPU it does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from beam_inference.arrays import AnyArray
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.engines.torch_device import TorchDevice


class Stream:
    """A thread that lets the time of one thing after the other pass."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.last: Future[Any] = self._thread.submit(bool)

    def take(self, seconds: float, *after: Future[Any]) -> Future[Any]:
        """Begin to take so many seconds, once some other things are done."""

        def pass_time() -> None:
            for each in after:
                each.result()
            time.sleep(seconds)

        return self.after(pass_time)

    def after(self, action: Callable[[], Any]) -> Future[Any]:
        """Begin to do something after all that this stream was told before."""
        self.last = self._thread.submit(action)
        return self.last


class LateDevice:
    """The CPU, behind the interface of devices, as late as it is told to be.

    Args:
        bytes_per_second: of uploads, and of downloads.
        kernel_seconds: that each operation of the loop takes.
    """

    def __init__(self, bytes_per_second: float = 1e9, kernel_seconds: float = 1e-5) -> None:
        cpu = TorchDevice(torch.device("cpu"))
        self._cpu = cpu
        self.session, self.copy, self.flip = cpu.session, cpu.copy, cpu.flip
        self.largest_magnitude, self.make_room = cpu.largest_magnitude, cpu.make_room
        self.on_host = False
        self.kernels, self.up, self.down = Stream(), Stream(), Stream()
        self.in_use = self.peak = 0
        self._rate = bytes_per_second
        self._kernel_seconds = kernel_seconds
        self._lock = threading.Lock()

    def synchronize(self) -> None:
        for stream in (self.up, self.kernels, self.down):
            stream.last.result()

    def start_peak(self) -> int:
        self.peak = self.in_use
        return self.in_use

    def begin_upload(self, array: AnyArray) -> Callable[[], torch.Tensor]:
        arrived = self.up.take(array.nbytes / self._rate)
        tensor = self._counted(torch.from_numpy(np.array(array)))

        def wait() -> torch.Tensor:
            self.kernels.take(0.0, arrived)  # kernels wait for it, the host does not
            return tensor

        return wait

    def upload(self, array: AnyArray) -> torch.Tensor:
        tensor = self.begin_upload(array)()
        self.up.last.result()
        return tensor

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._counted(self._cpu.empty(shape))

    def multiply(self, array: torch.Tensor, by: torch.Tensor, out: torch.Tensor) -> None:
        self._cpu.multiply(array, by, out)
        self.kernels.take(self._kernel_seconds)

    def add_rounded(self, sums: torch.Tensor, terms: torch.Tensor, step: float) -> None:
        self._cpu.add_rounded(sums, terms, step)
        self.kernels.take(self._kernel_seconds)

    def download(
        self, array: torch.Tensor, encoding: Encoding = AS_COMPUTED
    ) -> Callable[[], AnyArray]:
        result = self._cpu.download(array, encoding)().copy()
        arrived = self.down.take(result.nbytes / self._rate, self.kernels.last)

        def wait() -> AnyArray:
            arrived.result()
            return result

        return wait

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.nbytes
        with self._lock:
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
        weakref.finalize(tensor, self._free, size)
        return tensor

    def _free(self, size: int) -> None:
        with self._lock:
            self.in_use -= size


def late(predictor: Predictor, device: LateDevice, patch_seconds: float) -> Predictor:
    """The predictor on a late device, where each patch takes so many seconds."""

    def predict(batch: Any) -> Any:
        result = predictor.predict(batch)
        device.kernels.take(patch_seconds * len(batch))
        return result

    return replace(predictor, device=device, predict=predict)
