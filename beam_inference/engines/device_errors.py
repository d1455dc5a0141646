"""Translates what devices raise into this package's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from beam_inference.errors import DeviceOutOfMemory, WorkerFault

_OUT_OF_MEMORY = ("can't allocate memory", "MPS backend out of memory")


def empty_cache() -> None:
    """Give back the memory of an accelerator that PyTorch keeps for later."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()


@contextmanager
def device_errors() -> Iterator[None]:
    """Translate torch's device errors into this package's."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        empty_cache()
        raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
    except torch.AcceleratorError as error:
        if "out of memory" in str(error):  # of what libraries allocate beside PyTorch's cache
            empty_cache()
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
        raise WorkerFault(f"the device is lost: {str(error).splitlines()[0]}") from error
    except MemoryError as error:
        raise DeviceOutOfMemory(str(error)) from error
    except RuntimeError as error:
        # the allocators of the CPU and of mps have no exception of their own
        if any(text in str(error) for text in _OUT_OF_MEMORY):
            raise DeviceOutOfMemory(str(error).splitlines()[0]) from error
        raise
