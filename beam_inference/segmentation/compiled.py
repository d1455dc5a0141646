"""The compiled loops of this package, imported only where they are needed."""

from __future__ import annotations

from types import ModuleType

from beam_inference.errors import ConfigError


def kernels() -> ModuleType:
    """Import :mod:`~beam_inference.segmentation.kernels`.

    Raises:
        ConfigError: Numba is not installed.
    """
    try:
        from beam_inference.segmentation import kernels as module
    except ImportError as error:
        raise ConfigError(
            f"this needs Numba ({error}): pip install 'beam-inference[segmentation]', here and on "
            "workers"
        ) from None
    return module
