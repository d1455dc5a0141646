"""A small disk in memory that can be full, or not writable, for a while."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

MIB = 2**20
DISK_MIB = 512
_ATTEMPTS = 20


class SmallDisk:
    """A file system in memory, mounted while it is entered; only root can do so.

    Args:
        folder: where it is mounted.

    Attributes:
        is_mounted: whether it could be; if not, the folder lies on the disk around it, and is
            never full.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ballast = folder / "ballast"
        self.is_mounted = False

    def __enter__(self) -> SmallDisk:
        self._folder.mkdir(parents=True, exist_ok=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self._folder)]
        self.is_mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with suppress(OSError), self._ballast.open("wb") as file:
            while True:
                file.write(bytes(MIB))
                file.flush()

    def set_writable(self, *, writable: bool) -> bool:
        """Let it be written, or not; whether that succeeded: files open for writing prevent it."""
        option = "rw" if writable else "ro"
        for _ in range(_ATTEMPTS):
            words = ["mount", "-o", f"remount,{option}", str(self._folder)]
            if not subprocess.run(words, capture_output=True, check=False).returncode:
                return True
            time.sleep(0.02)
        return False

    def heal(self) -> None:
        """Let it be written, and remove what filled it."""
        if self.is_mounted:
            self.set_writable(writable=True)
            self._ballast.unlink(missing_ok=True)
