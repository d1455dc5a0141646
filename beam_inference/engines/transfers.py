"""Between a GPU and the host, beside what the GPU computes.

Copies are made on streams of their own, from or into memory that is pinned once. (CUDA C++
Programming Guide, "Asynchronous Concurrent Execution": a copy overlaps with kernels of other
streams if the host's memory is page-locked.)
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class Uploads:
    """From the host, by any of its threads: one array at a time is sent ahead of when it is needed.

    Where that takes memory which is needed for something else, nothing is sent ahead any more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = _Pinned()
        self._copied: torch.cuda.Event | None = None
        self._ahead: Callable[[], _Upload | None] = lambda: None
        self._is_stopped = False
        self._sending = threading.Lock()
        self._taking = threading.Lock()

    def begin(self, array: NDArray[Any]) -> Callable[[], torch.Tensor | None]:
        """Begin to copy an array, if no other one waits; a call of what is returned takes it, once; None if not sent.

        What comes after that call in the caller's stream waits for the copy.
        """
        upload = _Upload(self._device, self._taking)
        with self._sending, torch.cuda.device(self._device):
            ahead = self._ahead()
            if not self._is_stopped and (ahead is None or ahead.sent is None):
                upload.sent = self._sent(array)
                self._ahead = weakref.ref(upload)  # who never takes it holds nobody up
        return upload.take

    def stop(self) -> None:
        """Send nothing ahead any more."""
        self._is_stopped = True
        logger.info("the device has no room for the next chunk's input before its turn")

    def give_up(self) -> bool:
        """Drop what waits to be taken, and stop; False if nothing waits."""
        with self._sending:  # what is being sent now takes memory, too
            ahead = self._ahead()
        if ahead is None or not ahead.drop():
            return False
        self.stop()
        return True

    def _sent(self, array: NDArray[Any]) -> tuple[torch.Tensor, torch.cuda.Event]:
        if self._copied is not None:
            self._copied.synchronize()  # until then what is pinned is being read
        pinned = self._pinned.memory(array.nbytes).view(_dtype(array)).view(array.shape)
        np.copyto(pinned.numpy(), array)
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(array.shape, dtype=pinned.dtype, device=self._device)
            tensor.copy_(pinned, non_blocking=True)
            self._copied = self._stream.record_event()
        return tensor, self._copied


class _Upload:
    """What was sent and not yet taken of an array, if anything: the tensor, and when it is copied."""

    def __init__(self, device: torch.device, lock: threading.Lock) -> None:
        self.sent: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self._device = device
        self._lock = lock

    def take(self) -> torch.Tensor | None:
        with self._lock:
            sent = self.sent
            self.sent = None
        if sent is None:
            return None
        tensor, copied = sent
        here = torch.cuda.current_stream(self._device)
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
    """To the host: one tensor at a time is on its way, and what has arrived is good until the next one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = _Pinned()

    def begin(self, tensor: torch.Tensor, values: int) -> Callable[[], NDArray[Any]]:
        """Begin to copy a tensor that nothing writes to any more; a call of what is returned waits for it.

        ``values`` says how many a tensor of its kind has at most, so that memory is pinned for the
        largest one at once.
        """
        pinned = self._pinned.memory(values * tensor.element_size())[: tensor.nbytes]
        pinned = pinned.view(tensor.dtype).view(tensor.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(tensor, non_blocking=True)
            copied = self._stream.record_event()
        tensor.record_stream(self._stream)  # or its memory would be another's while it is copied

        def arrived() -> NDArray[Any]:
            copied.synchronize()
            array: NDArray[Any] = pinned.numpy()
            return array

        return arrived


class _Pinned:
    """Memory of the host that a GPU copies from or into by itself."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """So many of its bytes, the first ones; what an earlier call gave is no longer to be used."""
        if len(self._bytes) < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # never both
            try:
                self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system pins no more: then the copy is awaited at once
                self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size]


def _dtype(array: NDArray[Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
