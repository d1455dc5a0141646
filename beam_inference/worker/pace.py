"""How many chunks are under way at a time: as many as hide how long stores take, as measured.

No more arrays are held than memory was planned for, whatever is under way.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")

LARGEST_DEPTH = 16
"""Most inputs that are read ahead, and results that are being written, if nothing else is said."""

MOST_STRETCHES = 32
"""Most stretches that are begun before their turn: each is a thread, and claimed for a while."""

_REMEMBERED = 8
"""Chunks over which times are averaged; the latest ones count most."""

_RESERVE = 1.5
"""Stores are not always as fast: so many times the mean is covered."""

_UNKNOWN_SECONDS = 1.0
"""What a chunk is taken to take until one was computed, if the network was not tried."""

_SMALL_SHARE = 0.02
"""Waits that are no longer than this share of what is computed meanwhile are let be."""


class Slots:
    """Places for arrays of chunks, which all runs of a process share.

    Args:
        each: places for each thread that works.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._threads = 0
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def count_thread(self) -> Iterator[None]:
        """Count a thread that works; without any there are places for one."""
        self._add_threads(1)
        try:
            yield
        finally:
            self._add_threads(-1)

    def _add_threads(self, number: int) -> None:
        with self._changed:
            self._threads += number
            self._changed.notify_all()

    def take(self, *, wait: bool) -> bool:
        """Take a place; whether there was one, which is so in any case if this waits for it."""
        with self._changed:
            while self._taken >= self._each * max(1, self._threads):
                if not wait:
                    return False
                self._changed.wait()
            self._taken += 1
            return True

    def give_back(self) -> None:
        """Give a place back."""
        with self._changed:
            self._taken -= 1
            self._changed.notify()


class Pace:
    """How long the stages of chunks take, as all runs of a process measure it.

    Args:
        depth: most inputs that a thread reads ahead, and most results that it is writing.
        chunk_seconds: that the network is expected to take for a chunk; 0 if nobody knows.

    Attributes:
        depth: the same.
        inputs: places for inputs, those that are computed from included.
        results: places for results.
        computing: places for chunks that are computed, and made fit to be written: what that takes
            beside input and result is planned once for each thread.
    """

    def __init__(self, depth: int, chunk_seconds: float = 0.0) -> None:
        self.depth = depth
        self._chunk_seconds = chunk_seconds or _UNKNOWN_SECONDS
        self.inputs = Slots(depth + 1)
        self.results = Slots(depth + 1)
        self.computing = Slots(1)
        self._means: dict[str, float] = {}

    @contextmanager
    def count_thread(self) -> Iterator[None]:
        """Count a thread of the runner that works: memory is planned for each of them."""
        with (
            self.inputs.count_thread(),
            self.results.count_thread(),
            self.computing.count_thread(),
        ):
            yield

    def measure(
        self,
        stage: Literal["claim", "read", "infer", "postprocess", "write"],
        action: Callable[Arguments, Value],
        *arguments: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Value:
        """Do an action of a stage, and note how long it took."""
        start = time.perf_counter()
        value = action(*arguments, **keywords)
        seconds = time.perf_counter() - start
        mean = self._means.get(stage, seconds)
        self._means[stage] = mean + (seconds - mean) / _REMEMBERED
        return value

    def suitable_depth(self, stage: Literal["read", "write"]) -> int:
        """How many of a stage are to be under way, at least one.

        As long as nothing was measured it is as many as are allowed: few chunks leave no time to
        find out.
        """
        seconds = self._means.get(stage)
        if seconds is None or "infer" not in self._means:
            return self.depth
        computing = self._chunk_computing()
        return max(1, min(self.depth, math.ceil(_RESERVE * seconds / max(computing, 1e-6))))

    def _chunk_computing(self) -> float:
        """Seconds of a chunk on the device, and of what makes it fit to be written."""
        infer = self._means.get("infer", self._chunk_seconds)
        return infer + self._means.get("postprocess", 0.0)

    def suitable_stretches(self, length: int) -> int:
        """How many stretches of chunks are to be begun while another one is computed.

        Each waits for its claim, for receipts, its first input and its last write, and for its
        claim to be given back. Long stretches need none ahead. As long as no claim was measured it
        is one, and no more than needed then: what this process claims, no other one does.

        Args:
            length: chunks of a stretch.
        """
        means = self._means
        if "claim" not in means:
            return 1
        claim = means["claim"]
        waiting = 3 * claim + means.get("read", claim) + means.get("write", claim)
        computing = max(length * self._chunk_computing(), 1e-6)
        if waiting <= _SMALL_SHARE * computing:
            return 0
        return min(MOST_STRETCHES, math.ceil(_RESERVE * waiting / computing))
