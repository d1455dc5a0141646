"""A run of chunks with look-ahead reads and trailing writes, over three callables.

While the device computes a chunk, the inputs of the following ones are read and the results of
earlier ones are written: as many as hide how long the store takes, and no more than memory allows.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

from beam_inference.errors import ChunkFault

Input = TypeVar("Input")
Result = TypeVar("Result")
Outcome = TypeVar("Outcome")
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

    def add_threads(self, number: int) -> None:
        """Change the number of threads that work; without any there are places for one."""
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
        for slots in (self.inputs, self.results, self.computing):
            slots.add_threads(1)
        try:
            yield
        finally:
            for slots in (self.inputs, self.results, self.computing):
                slots.add_threads(-1)

    def measure(
        self,
        stage: Literal["claim", "read", "infer", "write"],
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
        computing = self._means.get("infer")
        if seconds is None or computing is None:
            return self.depth
        return max(1, min(self.depth, math.ceil(_RESERVE * seconds / max(computing, 1e-6))))

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
        computing = max(length * means.get("infer", self._chunk_seconds), 1e-6)
        if waiting <= _SMALL_SHARE * computing:
            return 0
        return min(MOST_STRETCHES, math.ceil(_RESERVE * waiting / computing))


def run_chunks(
    indices: Sequence[int],
    read: Callable[[int], Input],
    infer: Callable[[int, Input], Result],
    write: Callable[[int, Result], Outcome],
    quarantine: Callable[[int, ChunkFault], Outcome],
    should_stop: Callable[[], bool],
    pace: Pace,
) -> Iterator[Outcome]:
    """Do chunks in order; yield each one's outcome once it is written or quarantined.

    Args:
        indices: the chunks.
        read: reads a chunk's input, on threads of its own.
        infer: computes a chunk's result from its input, on the caller's thread. It measures by
            ``pace`` how long it computes: only it can tell that from waiting for the device.
        write: writes a chunk's result, on threads of its own.
        quarantine: is given each :class:`ChunkFault`; the run then goes on.
        should_stop: no further chunk is started once this is true.
        pace: says how many inputs are read ahead, and how many results are being written.

    Raises:
        Exception: any other error of a callable; it ends the run, but only after the writes under
            way are finished, so nothing is torn.
    """
    with (
        ThreadPoolExecutor(pace.depth, "read") as readers,
        ThreadPoolExecutor(pace.depth, "write") as writers,
    ):
        reads: deque[tuple[int, Future[Input]]] = deque()
        writes: deque[tuple[int, Future[Outcome]]] = deque()
        waiting = deque(indices)
        try:
            while waiting or reads:
                if should_stop():
                    break
                while (
                    waiting
                    and len(reads) <= pace.suitable_depth("read")
                    and pace.inputs.take(wait=not reads)
                ):
                    index = waiting.popleft()
                    reads.append((index, readers.submit(pace.measure, "read", read, index)))
                index, chunk_input = reads.popleft()
                wait([chunk_input])  # before a place for the result is taken
                try:
                    result = _infer(infer, index, chunk_input, pace)
                except ChunkFault as fault:
                    yield quarantine(index, fault)
                    continue
                finally:
                    del chunk_input  # the array it holds is as large as the next one's
                try:
                    while len(writes) >= pace.suitable_depth("write"):
                        yield _await_write(*writes.popleft(), quarantine)
                except BaseException:
                    pace.results.give_back()
                    raise
                writes.append((index, writers.submit(_write, write, index, result, pace)))
                del result
            while writes:
                yield _await_write(*writes.popleft(), quarantine)
        finally:
            for _, future in reads:
                future.cancel()
                pace.inputs.give_back()


def _infer(
    infer: Callable[[int, Input], Result], index: int, chunk_input: Future[Input], pace: Pace
) -> Result:
    """Compute a result, for which a place is taken, from an input, whose place is given back."""
    pace.results.take(wait=True)
    pace.computing.take(wait=True)
    try:
        return infer(index, chunk_input.result())
    except BaseException:
        pace.results.give_back()
        raise
    finally:
        pace.computing.give_back()
        pace.inputs.give_back()


def _write(
    write: Callable[[int, Result], Outcome], index: int, result: Result, pace: Pace
) -> Outcome:
    try:
        return pace.measure("write", write, index, result)
    finally:
        pace.results.give_back()


def _await_write(
    index: int, future: Future[Outcome], quarantine: Callable[[int, ChunkFault], Outcome]
) -> Outcome:
    try:
        return future.result()
    except ChunkFault as fault:
        return quarantine(index, fault)
    finally:
        # it holds the fault, whose traceback holds this frame, and the chunk's arrays
        del future
