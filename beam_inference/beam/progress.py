"""Live progress of a launch, from its receipts: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from beam_inference.errors import BeamInferenceError
from beam_inference.foreign_text import clean_text

logger = logging.getLogger(__name__)

_LINE_SECONDS = 10.0


def tell(message: str) -> None:
    """Tell a line before there is any progress to show."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(message)
    else:
        print(clean_text(message), file=sys.stderr, flush=True)


class Phase(NamedTuple):
    """One phase of a run, and what is counted in it.

    Attributes:
        things: a word for them, such as "chunks".
        total: how many there are to do.
        voxels_per_thing: their mean size; 0 for things that have none.
        count_done: how many of them are done; called seldom enough not to matter.
    """

    things: str
    total: int
    voxels_per_thing: float
    count_done: Callable[[], int]


class Progress:
    """Things done, voxels per second and time left, on standard error.

    Args:
        phases: one after the other; each begins when the one before is complete, with a speed of
            its own.
    """

    def __init__(self, *phases: Phase) -> None:
        self._phase, *self._later = phases
        self._console = Console(file=sys.stderr)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal or logger.isEnabledFor(logging.INFO),
        )
        self._next_count = self._next_line = 0.0

    def __enter__(self) -> Self:
        self._begin(self._phase, self._phase.count_done())
        self._bar.start()
        self._next_line = self._start + _LINE_SECONDS
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._next_count = 0.0
        self.update()
        self._bar.stop()

    def _begin(self, phase: Phase, done: int) -> None:
        self._phase = phase
        self._start = time.monotonic()
        self._at_start = self._done = done
        self._task = self._bar.add_task(phase.things, total=phase.total, completed=done, rate="")

    def update(self) -> None:
        """Show what is done by now, if it is time to look."""
        now = time.monotonic()
        if now < self._next_count:
            return
        try:
            self._done = self._phase.count_done()
            while self._later and self._done >= self._phase.total:
                self._bar.update(self._task, completed=self._done)
                self._begin(self._later[0], self._later[0].count_done())
                del self._later[0]
        except BeamInferenceError:
            return  # the launch itself will tell
        spent = time.monotonic() - now
        # listing many receipts must not compete with the job
        self._next_count = now + max(0.5, 20 * spent)
        rate = self._rate(now)
        self._bar.update(
            self._task, completed=self._done, rate=f"{rate / 1e6:.2f} Mvoxel/s" if rate else ""
        )
        if self._bar.disable and now >= self._next_line:
            self._next_line = now + _LINE_SECONDS
            left = (
                (self._phase.total - self._done) * self._phase.voxels_per_thing / rate
                if rate
                else None
            )
            remaining = f", {left:.0f} s left" if left is not None else ""
            counted = f"{self._done} of {self._phase.total} {self._phase.things}"
            speed = f", {rate / 1e6:.2f} Mvoxel/s" if self._phase.voxels_per_thing else ""
            self.say(f"{counted}{speed}{remaining}")

    def say(self, message: str) -> None:
        """A line, above the bar if there is one."""
        if logger.isEnabledFor(logging.INFO):  # structured logs have progress among them
            logger.info(message, extra={"done": self._done, "chunks": self._phase.total})
        elif self._bar.disable:
            print(message, file=self._console.file, flush=True)
        else:
            self._console.print(message)

    def _rate(self, now: float) -> float:
        """Voxels per second since the phase began."""
        return (
            (self._done - self._at_start)
            * self._phase.voxels_per_thing
            / max(1e-9, now - self._start)
        )
