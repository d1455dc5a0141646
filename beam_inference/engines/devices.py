"""The device that a process uses."""

from __future__ import annotations

import functools
import os
import tempfile

_CLAIMS: list[int] = []


@functools.cache
def claim_cuda_device(count: int) -> int:
    """The number of this process's device: process k of the machine uses device k mod count.

    Processes count themselves by locking the first free one of a row of files, which the system
    unlocks at their end.
    """
    import fcntl

    folder = os.path.join(tempfile.gettempdir(), f"beam_inference_devices_{os.getuid()}")
    os.makedirs(folder, exist_ok=True)
    for k in range(4096):
        descriptor = os.open(os.path.join(folder, str(k)), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        _CLAIMS.append(descriptor)  # held open, and so locked, as long as the process lives
        return k % count
    return 0


def has_cuda() -> bool:
    """Whether PyTorch is there and sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def device_memory() -> int | None:
    """Bytes of memory of the CUDA device, or None where there is none."""
    try:
        import torch
    except ImportError:
        return None
    return (
        int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None
    )
