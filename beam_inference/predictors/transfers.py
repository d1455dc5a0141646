"""Between a GPU and the host, beside what the GPU computes.

Copies are made on streams of their own, from or into memory that is pinned once. (CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution": a copy overlaps with kernels of other streams if the host's memory is page-locked.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Uploads:
    """From the host, by any of its threads: one array at a time is sent ahead of when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = _Pinned()
        self._copied: torch.cuda.Event | None = None
        self._ahead: Callable[[], _Upload | None] = lambda: None
        self._lock = threading.Lock()

    def begin(self, array: NDArray[Any], most_bytes: int) -> Callable[[], torch.Tensor | None]:
        """Begin to copy an array; a call of what is returned gives it on the device, or None if it was not sent.

        What comes after that call in the caller's stream waits for the copy. Nothing is sent where another array waits
        to be asked for. ``most_bytes`` are those of the largest array that is to come: memory is pinned for it at once.
        """
        upload = _Upload(self._device, self._lock)
        with self._lock, torch.cuda.device(self._device):
            before = self._ahead()
            if before is None or not before.waits:
                if self._copied is not None:
                    self._copied.synchronize()  # until then what is pinned is being read
                pinned = self._pinned.memory(array.nbytes, most_bytes).view(_dtype(array)).view(array.shape)
                np.copyto(pinned.numpy(), array)
                with torch.cuda.stream(self._stream):
                    tensor = torch.empty(array.shape, dtype=pinned.dtype, device=self._device)
                    tensor.copy_(pinned, non_blocking=True)
                    self._copied = self._stream.record_event()
                    upload.sent = tensor, self._copied
                    self._ahead = weakref.ref(upload)  # who never asks for it holds nobody up
        return upload.arrived

    def give_up(self) -> bool:
        """Drop what was sent and nobody has asked for; whether there was any."""
        with self._lock:
            upload = self._ahead()
            if upload is None or not upload.waits:
                return False
            upload.sent = None
            return True


class _Upload:
    """What was sent of an array, if anything was: the tensor, and when it is copied."""

    def __init__(self, device: torch.device, lock: threading.Lock) -> None:
        self.sent: tuple[torch.Tensor, torch.cuda.Event] | None = None
        self.is_taken = False
        self._device, self._lock = device, lock

    @property
    def waits(self) -> bool:
        return self.sent is not None and not self.is_taken

    def arrived(self) -> torch.Tensor | None:
        with self._lock:
            self.is_taken = True
            if self.sent is None:
                return None
            tensor, copied = self.sent
        here = torch.cuda.current_stream(self._device)
        here.wait_event(copied)
        tensor.record_stream(here)  # or its memory would be the next upload's while it is still read
        return tensor


class Downloads:
    """To the host: one tensor at a time is on its way, and what has arrived is good until the next one begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = _Pinned()

    def begin(self, tensor: torch.Tensor, values: int) -> Callable[[], NDArray[Any]]:
        """Begin to copy a tensor that nothing writes to any more; a call of what is returned waits for it.

        ``values`` says how many a tensor of its kind has at most, so that memory is pinned for the largest one at once.
        """
        pinned = self._pinned.memory(tensor.nbytes, values * tensor.element_size())
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

    def memory(self, size: int, most: int) -> torch.Tensor:
        """So many of its bytes, which are at least ``most``; what an earlier call gave is no longer to be used."""
        if len(self._bytes) < size:
            most = max(size, most)
            try:
                self._bytes = torch.empty(most, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system pins no more: then the copy is awaited at once
                self._bytes = torch.empty(most, dtype=torch.uint8)
        return self._bytes[:size]


def _dtype(array: NDArray[Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
