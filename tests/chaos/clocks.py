"""Clocks that jump: each process that is launched sees one of its own, which can be set.

libfaketime stands between the processes and the clock of the system, where it is installed. What
measures time since start-up is left alone, as by a real clock that is set; and the times of files
are those of the machine, as of a file server whose clock is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

_LIBRARIES = "lib*/**/faketime/libfaketimeMT.so.1"
_SHARED = Path("/dev/shm")
_JUMPS = (-400 * 86400, -86400, -3700, -30, 30, 3700, 86400, 400 * 86400)
"""Seconds by which a clock is off; drafts count as left behind after an hour."""


class Clocks:
    """The clocks of launched processes.

    Args:
        folder: where the file of each clock lies.
        library: libfaketime; None for clocks that are right, whatever happens.
    """

    def __init__(self, folder: Path, library: Path | None) -> None:
        self._folder = folder
        self._library = library
        self._files: list[Path] = []

    def make(self) -> dict[str, str]:
        """Make a clock that is right at first; returns the variables of the one who is to see it.

        Processes that it starts see the same clock.
        """
        if self._library is None:
            return {}
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"clock-{len(self._files)}"
        self._files.append(file)
        _set(file, 0)
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def jump(self, chance: random.Random) -> str | None:
        """Let one of the latest clocks jump; returns what was done, or None if there is none."""
        if not self._files:
            return None
        file = chance.choice(self._files[-4:])
        seconds = chance.choice([0, *_JUMPS])
        _set(file, seconds)
        return f"{file.name} is off by {seconds:+} s"

    def set_all(self, seconds: int) -> None:
        """Let all clocks be off by some seconds; 0 lets them be right, which is another jump."""
        for file in self._files:
            _set(file, seconds)


def find_library(folders: Iterable[Path] = (Path("/usr"), Path("/usr/local"))) -> Path | None:
    """Find libfaketime for programs of several threads; None where it is not installed."""
    return next((path for folder in folders for path in sorted(folder.glob(_LIBRARIES))), None)


def remove_shared_memory(sessions: Iterable[int]) -> None:
    """Remove what libfaketime leaves in memory if the leader of a session is killed."""
    for session in sessions:
        for name in (f"faketime_shm_{session}", f"sem.faketime_sem_{session}"):
            (_SHARED / name).unlink(missing_ok=True)


def _set(file: Path, seconds: int) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(f"{seconds:+}\n")
    draft.replace(file)  # no process reads half of it
