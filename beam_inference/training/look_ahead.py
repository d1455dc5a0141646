"""Making what is asked for next while the asker works: in order, as far ahead as hides the wait."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Generic, TypeVar, cast

Item = TypeVar("Item")

_FIRST_DEPTH = 8
_MARGIN = 2.0
"""How much longer than lately an item may take to make without anybody waiting for it."""
_FORGETTING = 0.05


class LookAhead(Generic[Item]):
    """Items that threads make ahead of whoever takes them.

    How many are under way follows from how long one takes to make and how long the taker works
    between two, both as measured. The items and their order depend on neither.

    Args:
        make: makes the item of a number; called in threads.
        most: items under way or waiting to be taken, at most.
    """

    def __init__(self, make: Callable[[int], Item], most: int) -> None:
        self._make = make
        self._most = most
        self._longest = 0.0
        self._between: float | None = None

    @property
    def depth(self) -> int:
        """How many items are to be under way, as measured so far."""
        if self._between is None:
            return min(self._most, _FIRST_DEPTH)
        wanted = _MARGIN * self._longest / max(self._between, 1e-6)
        return min(self._most, 2 + math.ceil(min(wanted, self._most)))

    def items(self, numbers: Iterable[int]) -> Generator[Item]:
        """The items of some numbers, in their order.

        An error of an item is raised when it is its turn. Closing the iterator waits for the items
        that are being made, and makes no others.
        """
        left = iter(numbers)
        pending: deque[Future[Item]] = deque()
        pool = ThreadPoolExecutor(self._most, thread_name_prefix="samples")
        try:
            while True:
                while len(pending) < self.depth and (number := next(left, None)) is not None:
                    pending.append(pool.submit(self._time, number))
                if not pending:
                    return
                item = pending.popleft().result()
                taken = time.monotonic()
                yield item
                self._note_taking(time.monotonic() - taken)
        finally:
            pool.shutdown(cancel_futures=True)

    def _time(self, number: int) -> Item:
        begun = time.monotonic()
        item = self._make(number)
        seconds = time.monotonic() - begun
        self._longest = max(seconds, self._longest * (1 - _FORGETTING))
        return item

    def _note_taking(self, seconds: float) -> None:
        before = seconds if self._between is None else self._between
        self._between = before + 0.2 * (seconds - before)


def make_one_ahead(items: Iterator[Item], is_closed: Event) -> Generator[Item]:
    """The items of an iterator, each made by a thread while the one before is used.

    An error of an item is raised when it is its turn. Closing the iterator waits for the item that
    is being made.

    Args:
        items: makes them.
        is_closed: is set once nobody takes items any more, also in the midst of the first one:
            what takes long to make may be given up then, by any error.
    """
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        try:
            item = pool.submit(next, items, end).result()
            while item is not end:
                following = pool.submit(next, items, end)
                yield cast(Item, item)
                item = following.result()
        finally:
            is_closed.set()
