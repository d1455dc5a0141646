"""Stretches of chunks that are begun before their turn, so that the device need not wait for them.

A stretch waits for its claim, its receipts, its first input and its last write. While one waits,
others are computed: the runs of a process share the device and the places for arrays.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from beam_inference.errors import WorkerFault
from beam_inference.job.messages import Record
from beam_inference.worker.pace import MOST_STRETCHES

logger = logging.getLogger(__name__)

_KEPT = 1024
"""Stretches whose records are kept until their turn. Those of others are read from receipts."""

_Done = Future[list[Record] | None]


class StretchesAhead:
    """Does stretches of one stage on threads of its own.

    Args:
        free: stretches that are to be done, in order, as they are found: requests to the store go
            with that.
        do: does one; returns its records, or None if another worker has claimed it.
        wanted: says how many are to be under way.
    """

    def __init__(
        self,
        free: Iterator[int],
        do: Callable[[int], list[Record] | None],
        wanted: Callable[[], int],
    ) -> None:
        self._free = free
        self._do = do
        self._wanted = wanted
        self._is_exhausted = False
        self._finding = threading.Lock()
        self._lock = threading.Lock()
        self._active = 0
        self._begun: OrderedDict[int, _Done] = OrderedDict()
        self._had_turn: set[int] = set()
        self._threads: ThreadPoolExecutor | None = None

    def top_up(self) -> None:
        """Begin as many stretches as are wanted, beside those under way."""
        wanted = self._wanted()
        with self._lock:
            while not self._is_exhausted and self._active < wanted:
                self._active += 1
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(MOST_STRETCHES, "ahead")
                self._threads.submit(self._do_some)

    def take(self, number: int) -> list[Record] | None:
        """Wait for a stretch if it was begun here; otherwise it will not be.

        Returns:
            Its records; None if it is not done here.

        Raises:
            WorkerFault: this process cannot go on.
        """
        with self._lock:
            self._had_turn.add(number)  # free ones were listed a while ago, so it may come yet
            done = self._begun.pop(number, None)
        return None if done is None else done.result()

    def _do_some(self) -> None:
        """Do one stretch after the other, as long as as many are wanted."""
        try:
            while (found := self._begin_next()) is not None:
                number, done = found
                self.top_up()  # how many are wanted may be known by now
                try:
                    done.set_result(self._do(number))
                except BaseException as error:
                    # Its turn raises this, unless that comes in another process.
                    logger.warning(
                        "stretch %d was begun before its turn and failed: %s", number, error
                    )
                    done.set_exception(error)
                    return
                if self._active > self._wanted():
                    return
        finally:
            with self._lock:
                self._active -= 1

    def _begin_next(self) -> tuple[int, _Done] | None:
        """The next stretch to do; None if there is none."""
        with self._finding:
            try:
                for number in self._free:
                    with self._lock:
                        if number in self._had_turn or number in self._begun:
                            continue
                        done = self._begun[number] = _Done()
                        while len(self._begun) > _KEPT:
                            self._begun.popitem(last=False)
                    return number, done
            except WorkerFault as error:
                logger.warning("no stretches are begun before their turn: %s", error)
            self._is_exhausted = True
            return None
