"""Signals that ask a command to end, outside of a running job, which stops gently by itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from beam_inference.errors import AskedToStop

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

_LONGEST_IMPORT = 10.0
"""Seconds that an import may take to come to its end; then it is broken off all the same."""

_PAUSE = 0.1


@contextmanager
def requests_to_stop() -> Iterator[None]:
    """Treat SIGTERM and SIGUSR1 much as Ctrl-C: they raise an exception, which ends the command.

    Slurm sends SIGUSR1 before the time of a job is over, if it is told so. It may send it more than
    once: after the first time it is ignored, to the end of the process.

    Raises:
        AskedToStop: SIGTERM or SIGUSR1 has come.
        KeyboardInterrupt: SIGINT has.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    # who ignores Ctrl-C, as programs in the background do, goes on doing so
    numbers = [n for n in _NUMBERS if n != signal.SIGINT or _is_usual(n)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        handler.end()
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN:
            before[signal.SIGUSR1] = signal.SIG_IGN
        for number, each in before.items():
            signal.signal(number, each)


def _is_usual(number: int) -> bool:
    return signal.getsignal(number) == signal.default_int_handler


class _Handler:
    """Raises an exception, but not in the midst of an import.

    A library that is written in C cannot be imported again once that was broken off: it then says
    that it is broken, and the exception that was raised is lost.
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._again: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.end()
        now = time.monotonic()
        if self._first is None:
            self._first = now
        if _is_importing(frame) and now - self._first < _LONGEST_IMPORT:
            self._again = threading.Timer(_PAUSE, os.kill, (os.getpid(), number))
            self._again.daemon = True
            self._again.start()
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGUSR1:
            signal.signal(number, signal.SIG_IGN)
        raise AskedToStop

    def end(self) -> None:
        """Send no signal again."""
        if self._again is not None:
            self._again.cancel()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
