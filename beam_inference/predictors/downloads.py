"""From a GPU to the host, beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray


class Downloads:
    """One tensor at a time is on its way: what has arrived is good until the next one begins.

    Copies are made on a stream of their own into memory that is pinned once. (CUDA C++ Programming Guide, "Asynchronous
    Concurrent Execution": a copy overlaps with kernels of other streams if the host's memory is page-locked.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def begin(self, tensor: torch.Tensor, values: int) -> Callable[[], NDArray[Any]]:
        """Begin to copy a tensor that nothing writes to any more; a call of what is returned waits for it.

        ``values`` says how many a tensor of its kind has at most, so that memory is pinned for the largest one at once.
        """
        pinned = self._memory(values * tensor.element_size())[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
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

    def _memory(self, size: int) -> torch.Tensor:
        if len(self._pinned) < size:
            try:
                self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the system pins no more: then the copy is awaited at once
                self._pinned = torch.empty(size, dtype=torch.uint8)
        return self._pinned
