"""Live progress of a launch, from its receipts: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from beam_inference.errors import BeamInferenceError

logger = logging.getLogger(__name__)

_LINE_SECONDS = 10.0


class Progress:
    """Chunks done, voxels per second and time left, on standard error.

    Args:
        total: chunks to do. voxels_per_chunk: their mean size.
        count_done: how many of them are done; called seldom enough not to matter.
    """

    def __init__(self, total: int, voxels_per_chunk: float, count_done: Callable[[], int]) -> None:
        self._count_done = count_done
        self._total = total
        self._voxels_per_chunk = voxels_per_chunk
        self._console = Console(file=sys.stderr)
        self._bar = Bar(
            TextColumn("chunks"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or logger.isEnabledFor(logging.INFO),
        )
        self._next_count = self._next_line = 0.0

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._at_start = self._done = self._count_done()
        self._bar.start()
        self._task = self._bar.add_task("", total=self._total, completed=self._done, rate="")
        self._next_line = self._start + _LINE_SECONDS
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next_count = 0.0
        self.update()
        self._bar.stop()

    def update(self) -> None:
        """Show what is done by now, if it is time to look."""
        now = time.monotonic()
        if now < self._next_count:
            return
        try:
            self._done = self._count_done()
        except BeamInferenceError:
            return  # the launch itself will tell
        spent = time.monotonic() - now
        self._next_count = now + max(0.5, 20 * spent)  # listing many receipts must not compete with the job
        rate = self._rate(now)
        self._bar.update(self._task, completed=self._done, rate=f"{rate / 1e6:.2f} Mvoxel/s" if rate else "")
        if self._bar.disable and now >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            left = (self._total - self._done) * self._voxels_per_chunk / rate if rate else None
            remaining = f", {left:.0f} s left" if left is not None else ""
            self.say(f"{self._done} of {self._total} chunks, {rate / 1e6:.2f} Mvoxel/s{remaining}")

    def say(self, message: str) -> None:
        """A line, above the bar if there is one."""
        if logger.isEnabledFor(logging.INFO):  # structured logs have progress among them
            logger.info(message, extra={"done": self._done, "chunks": self._total})
        elif self._bar.disable:
            print(message, file=self._console.file, flush=True)
        else:
            self._console.print(message)

    def _rate(self, now: float) -> float:
        """Voxels per second since the launch began."""
        return (self._done - self._at_start) * self._voxels_per_chunk / max(1e-9, now - self._start)
