"""Between a GPU and the host, beside what the GPU computes.

Copies are made on streams of their own, from or into memory that is pinned once. (CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution": a copy overlaps with kernels of other streams if the host's memory is page-locked.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Uploads:
    """From the host, by any of its threads: one array at a time is on its way; what has arrived is the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = _Pinned()
        self._copied: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    def begin(self, array: NDArray[Any]) -> Callable[[], torch.Tensor]:
        """Begin to copy an array; what comes after a call of what is returned, in the caller's stream, waits for it."""
        with self._lock:
            if self._copied is not None:
                self._copied.synchronize()  # until then what is pinned is being read
            pinned = self._pinned.memory(array.nbytes).view(_dtype(array)).view(array.shape)
            np.copyto(pinned.numpy(), array)
            with torch.cuda.stream(self._stream):
                tensor = torch.empty(array.shape, dtype=pinned.dtype, device=self._device)
                tensor.copy_(pinned, non_blocking=True)
                copied = self._copied = self._stream.record_event()

        def arrived() -> torch.Tensor:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(copied)
            tensor.record_stream(here)  # or its memory would be the next upload's while it is still read
            return tensor

        return arrived


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
    """Memory of the host that a GPU copies from or into by itself, as much as was ever needed."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def memory(self, size: int) -> torch.Tensor:
        """So many of its bytes, the first ones; what an earlier call gave is no longer to be used."""
        if len(self._bytes) < size:
            try:
                self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system pins no more: then the copy is awaited at once
                self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size]


def _dtype(array: NDArray[Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype
