"""Translates what devices raise into this package's errors."""

from __future__ import annotations

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
        # the CPU's allocator has no exception of its own
        if "can't allocate memory" in str(error):
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
        raise
