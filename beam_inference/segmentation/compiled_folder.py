"""The folder in which compiled loops are kept."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from beam_inference.engines.cache import cache_place


def compiled_folder() -> Path | None:
    """A folder of this user's for compiled loops; None where there is none that can be written.

    What lies there is run. So it is never one that others may write: then each process compiles.
    """
    place = cache_place()
    if place is None:
        return None
    folder = place.with_name(f"{place.name}-compiled")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return folder if is_own and not status.st_mode & 0o022 else None
