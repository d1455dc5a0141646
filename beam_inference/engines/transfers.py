"""Copies between the host and a GPU, while the GPU computes.

They are made on streams of their own, from or into memory that is pinned once. A copy overlaps with
kernels of other streams if the host's memory is page-locked (CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution").
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

import numpy as np
import torch

from beam_inference.arrays import AnyArray

logger = logging.getLogger(__name__)


class Uploads:
    """Sends arrays to the GPU ahead of when they are needed, one at a time, from any thread.

    Where the memory for that is needed for something else, nothing is sent ahead any more.
    """

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._device = device
        self._stream = stream or torch.Stream(device)
        self._pinned = _Pinned()
        self._copied: torch.Event | None = None
        self._ahead: Callable[[], _Upload | None] = lambda: None
        self._is_stopped = False
        self._sending = threading.Lock()
        self._taking = threading.Lock()

    def begin(self, array: AnyArray) -> Callable[[], torch.Tensor | None]:
        """Begin to copy an array, if no other one waits to be taken.

        Returns:
            A function that takes the tensor, once; None if the array was not sent. Whatever the
            caller's stream does after that call waits for the copy.
        """
        upload = _Upload(self._device, self._taking)
        with self._sending, torch.accelerator.device_index(self._device.index):
            ahead = self._ahead()
            if not self._is_stopped and (ahead is None or ahead.sent is None):
                upload.sent = self._send(array)
                self._ahead = weakref.ref(upload)  # who never takes it holds nobody up
        return upload.take

    def stop(self) -> None:
        """Send nothing ahead from now on."""
        self._is_stopped = True
        logger.info("the device has no room for the next chunk's input before its turn")

    def give_up(self) -> bool:
        """Drop the array that waits to be taken, and stop; False if none waits."""
        with self._sending:  # what is being sent now takes memory, too
            ahead = self._ahead()
        if ahead is None or not ahead.drop():
            return False
        self.stop()
        return True

    def _send(self, array: AnyArray) -> tuple[torch.Tensor, torch.Event]:
        if self._copied is not None:
            self._copied.synchronize()  # until then what is pinned is being read
        pinned = self._pinned.memory(array.nbytes).view(_dtype(array)).view(array.shape)
        np.copyto(pinned.numpy(), array)
        with self._stream:
            tensor = torch.empty(array.shape, dtype=pinned.dtype, device=self._device)
            tensor.copy_(pinned, non_blocking=True)
            self._copied = self._stream.record_event()
        return tensor, self._copied


class _Upload:
    """One array on its way: the tensor and its copy's event, until somebody takes them."""

    def __init__(self, device: torch.device, lock: threading.Lock) -> None:
        self.sent: tuple[torch.Tensor, torch.Event] | None = None
        self._device = device
        self._lock = lock

    def take(self) -> torch.Tensor | None:
        with self._lock:
            sent = self.sent
            self.sent = None
        if sent is None:
            return None
        tensor, copied = sent
        here = torch.accelerator.current_stream(self._device)
        here.wait_event(copied)
        # or its memory would be the next upload's while it is still read
        tensor.record_stream(here)
        return tensor

    def drop(self) -> bool:
        with self._lock:
            sent = self.sent
            self.sent = None
        return sent is not None


class Downloads:
    """Brings tensors to the host, one at a time; an array is valid until the next one begins."""

    def __init__(self, device: torch.device, stream: torch.Stream | None = None) -> None:
        self._device = device
        self._stream = stream or torch.Stream(device)
        self._pinned = _Pinned()

    def begin(self, tensor: torch.Tensor, values: int) -> Callable[[], AnyArray]:
        """Begin to copy a tensor.

        Args:
            tensor: nothing writes to it any more.
            values: that a tensor of its kind has at most; memory for the largest is pinned at once.

        Returns:
            A function that waits for the array.
        """
        pinned = self._pinned.memory(values * tensor.element_size())[: tensor.nbytes]
        pinned = pinned.view(tensor.dtype).view(tensor.shape)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            pinned.copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()
        tensor.record_stream(self._stream)  # or its memory would be another's while it is copied

        def wait() -> AnyArray:
            copied.synchronize()
            array: AnyArray = pinned.numpy()
            return array

        return wait


class _Pinned:
    """Memory of the host that a GPU can copy from and into by itself."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """Its first ``size`` bytes; what an earlier call returned must not be used any more."""
        if len(self._bytes) < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # never both
            try:
                self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system pins no more: then the copy is awaited at once
                self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size]


def _dtype(array: AnyArray) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
