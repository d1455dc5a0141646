"""The compiled loops of this package, and the folder in which they are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
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


def compiled_folder() -> Path | None:
    """A folder of this user's for compiled loops; None where there is none that can be written.

    What lies there is run. So it is never one that others may write: then each process compiles.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(cache).expanduser() / "beam_inference" / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    is_own = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_own else None
