"""The device that a process uses."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import runpy
import sys
import tempfile
from pathlib import Path

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
    """Whether PyTorch is there and sees a CUDA device; it is not imported where it cannot."""
    if "torch" not in sys.modules and not may_have_cuda():
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def may_have_cuda() -> bool:
    """Whether PyTorch may see a CUDA device, as far as that is known before it is imported.

    A PyTorch that was built without CUDA and ROCm sees none, nor one for CUDA without its driver.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        built_for = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except Exception:  # a PyTorch that lies there otherwise
        return True
    if not {"cuda", "hip"} <= built_for.keys() or built_for["hip"] is not None:
        return True
    return built_for["cuda"] is not None and _has_cuda_driver()


def _has_cuda_driver() -> bool:
    if sys.platform != "linux":
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_memory() -> int | None:
    """Bytes of memory of the CUDA device, or None where there is none."""
    if not has_cuda():
        return None
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)
