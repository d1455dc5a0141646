"""A Dask cluster that has lost its workers, for which a pipeline would wait for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 20.0
_TELL_SECONDS = 60.0
_PATIENCE_SECONDS = 600.0


class IdleCluster:
    """Notes since when a cluster has had no workers.

    Args:
        has_no_workers: asks the cluster, which may take long.
        clock: seconds that pass.
        look: seconds between two looks.
        patience: seconds after which it is given up.
    """

    def __init__(
        self,
        has_no_workers: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
        look: float = _LOOK_SECONDS,
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self._has_no_workers = has_no_workers
        self._clock = clock
        self._look_seconds = look
        self._patience = patience
        self._next_look = clock() + look
        self._idle_since: float | None = None
        self._is_told = False
        self._is_given_up = False
        self._looking: threading.Thread | None = None

    def are_given_up(self) -> bool:
        """Look now and then, without waiting; whether its workers are given up, which comes once.

        They are if there have been none for too long.
        """
        now = self._clock()
        is_looking = self._looking is not None and self._looking.is_alive()
        if now >= self._next_look and not is_looking:
            self._next_look = now + self._look_seconds
            self._looking = threading.Thread(target=self._look, daemon=True)
            self._looking.start()
        idle = 0.0 if self._idle_since is None else now - self._idle_since
        if idle >= min(_TELL_SECONDS, self._patience) and not self._is_told:
            self._is_told = True
            logger.warning(
                "the Dask cluster has no workers. Start some: the launch waits for them, for %.0f "
                "more minutes",
                max(0.0, self._patience - idle) / 60,
            )
        if idle < self._patience or self._is_given_up:
            return False
        self._is_given_up = True
        return True

    def _look(self) -> None:
        if not self._has_no_workers():
            self._idle_since = None
            self._is_told = False
        elif self._idle_since is None:
            self._idle_since = self._clock()
