"""Which GPU a process has, and what devices fail by."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from beam_inference.errors import DeviceOutOfMemory, WorkerFault


@contextmanager
def device_errors() -> Iterator[None]:
    """Translate torch's device errors into this package's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
    except torch.AcceleratorError as error:
        if "out of memory" in str(error):  # of what libraries allocate beside PyTorch's cache
            torch.cuda.empty_cache()
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
        raise WorkerFault(f"the device is lost: {str(error).splitlines()[0]}") from error
    except MemoryError as error:
        raise DeviceOutOfMemory(str(error)) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # the CPU's allocator has no exception of its own
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
        raise


_CLAIMS: list[int] = []


@functools.cache
def claimed_cuda_device(count: int) -> int:
    """This process's device: process k of the machine uses device k mod count.

    Processes count themselves by locking the first free one of a row of files, which the system unlocks at their end.
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
