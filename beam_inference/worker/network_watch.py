"""Ends a process whose network does not answer any more.

A thread that hangs in a library or a driver cannot be interrupted. So the process ends: a runner
with other workers does its chunks again, and a launch on one machine says how to go on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import Forward
from beam_inference.errors import FAILED

logger = logging.getLogger(__name__)

FIRST_CALL_SECONDS = 3600.0
"""What the first call of a process may take, which often compiles the network."""
LEAST_SECONDS = 600.0
"""What a later call may take at least, where the job does not say how long."""
FACTOR = 20
"""What a later call may take, in times of the first."""


class NetworkWatch:
    """Watches the network calls of a process, which one thread at a time makes.

    Args:
        seconds: what a call may take; None for :data:`FACTOR` times the first call, and at least
            :data:`LEAST_SECONDS`.
        give_up: what is done with the message once a call takes longer; it ends the process.
        look_seconds: how often the watch looks, at least.
    """

    def __init__(
        self,
        seconds: float | None = None,
        give_up: Callable[[str], None] | None = None,
        look_seconds: float = 5.0,
    ) -> None:
        self._is_learning = seconds is None
        self._seconds = FIRST_CALL_SECONDS if seconds is None else seconds
        self._give_up = give_up or end_process
        self._look_seconds = min(look_seconds, self._seconds)
        self._deadline = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Watch while something is computed; each call of the network begins a new term.

        Args:
            what: is computed, for the message, such as "chunk 7".
        """
        self._begin_term(time.monotonic())
        done = threading.Event()
        threading.Thread(target=self._look, args=(what, done), daemon=True, name="watch").start()
        try:
            yield
        finally:
            done.set()

    def wrap_predictor(self, predictor: Predictor) -> Predictor:
        """Return a network whose calls are watched."""
        return Predictor(predictor.device, self.wrap(predictor), predictor.description)

    def wrap(self, predictor: Predictor) -> Forward:
        """Return the forward pass of a network, with each call in a term of its own."""

        def predict_watched(batch: Any) -> Any:
            start = time.monotonic()
            self._begin_term(start)
            predictions = predictor.predict(batch)
            end = time.monotonic()
            if self._is_learning:
                self._is_learning = False
                self._seconds = max(LEAST_SECONDS, FACTOR * (end - start))
            self._begin_term(end)
            return predictions

        return predict_watched

    def _begin_term(self, now: float) -> None:
        with self._lock:
            self._deadline = now + self._seconds

    def _look(self, what: str, done: threading.Event) -> None:
        while not done.wait(self._look_seconds):
            with self._lock:
                is_late = time.monotonic() > self._deadline
            if is_late:
                self._give_up(
                    f"{what}: the network has not answered for {self._seconds:.0f} s "
                    "(job.timeouts.network), so this process ends. Chunks that are done keep their "
                    "receipts. Where no other worker goes on with the rest, give the same command "
                    "again; if the network is only slow, raise job.timeouts.network."
                )
                return


def end_process(message: str) -> None:
    """Say why, and end the process at once, with all threads that hang."""
    logger.critical("%s", message)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(FAILED)
