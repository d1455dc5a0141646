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

from beam_inference.config.devices import TRAITS, DeviceKind, kind_of

_CLAIMS: list[int] = []


@functools.cache
def claim_device(count: int) -> int:
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


def find_accelerator() -> DeviceKind | None:
    """The kind of accelerator that PyTorch sees; it is not imported where it can see none."""
    if "torch" not in sys.modules and not may_have_accelerator():
        return None
    try:
        import torch
    except ImportError:
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type not in TRAITS:
        return None
    return kind_of(accelerator.type)


def count_devices(device: str) -> int:
    """Count the devices of this machine that a job on ``device`` may use at a time.

    It is 1 for the CPU, and for a device that is named with its number; 0 where there is none.
    """
    if device == "cpu":
        return 1
    if kind_of(device) != find_accelerator():
        return 0
    import torch

    return 1 if ":" in device else torch.accelerator.device_count()


def may_have_accelerator() -> bool:
    """Whether PyTorch may see an accelerator, as far as that is known before it is imported.

    A PyTorch that was built without CUDA, ROCm and XPU sees none, but on a Mac; nor one that was
    built for CUDA alone, without its driver.
    """
    if sys.platform == "darwin":
        return True
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        built_for = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except Exception:  # a PyTorch that lies there otherwise
        return True
    if not {"cuda", "hip"} <= built_for.keys():
        return True
    if built_for["hip"] is not None or built_for.get("xpu") is not None:
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


def device_memory(device: str) -> int | None:
    """Bytes of memory of a job's device; None on the CPU, and where that is not known.

    A device that is absent is refused when the network is loaded, not here.
    """
    kind = kind_of(device)
    if not TRAITS[kind].reports_memory or find_accelerator() != kind:
        return None
    import torch

    number = int(device.partition(":")[2] or 0)
    if number >= torch.accelerator.device_count():
        return None
    return int(torch.accelerator.get_memory_info(number)[1])


def start_device_peak(device: str) -> int:
    """Return bytes of an accelerator in use now, from which :func:`device_peak` counts."""
    if not TRAITS[kind_of(device)].reports_memory:
        return sys.maxsize
    import torch

    torch.accelerator.reset_peak_memory_stats()
    return int(torch.accelerator.memory_allocated())


def device_peak(device: str) -> int:
    """The most bytes of an accelerator in use since :func:`start_device_peak`; 0 if unknown."""
    if not TRAITS[kind_of(device)].reports_memory:
        return 0
    import torch

    return int(torch.accelerator.max_memory_allocated())
