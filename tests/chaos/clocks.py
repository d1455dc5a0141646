"""Clocks that jump: each process that is launched sees one of its own, which can be set.

A small library of C stands between the processes and the clock of the system, where there is a
compiler. What measures time since start-up is left alone, as by a real clock that is set; and the
times of files are those of the machine, as of a file server whose clock is right.
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("shifted_clock.c")
_JUMPS = (30, 3700, 86400, 400 * 86400)
"""Seconds by which a clock is ahead; drafts count as left behind after an hour.

None is late but to those that are ahead: before the kernel's time, TensorStore's waits end at once.
"""


class Clocks:
    """The clocks of launched processes.

    Args:
        folder: where the file of each clock lies.
        library: as `build_library` makes it; None for clocks that are right, whatever happens.
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
            "CLOCK_SHIFT_FILE": str(file),
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


def build_library(folder: Path) -> Path | None:
    """Build the library that shifts clocks, in a folder; None where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "shifted_clock.so"
    words = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(_SOURCE)]
    subprocess.run([compiler, *words], check=True)
    return library


def _set(file: Path, seconds: int) -> None:
    with file.open("r+b" if file.exists() else "xb") as opened:  # processes have mapped this file
        opened.write(struct.pack("=q", seconds))
