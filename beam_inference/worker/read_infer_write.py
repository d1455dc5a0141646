"""A run of chunks with look-ahead reads and trailing writes, over three callables.

While the device computes a chunk, the inputs of the following ones are read and the results of
earlier ones are written: as many as hide how long the store takes, and no more than memory allows.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal, ParamSpec, TypeVar

from beam_inference.errors import ChunkFault

Input = TypeVar("Input")
Result = TypeVar("Result")
Outcome = TypeVar("Outcome")
Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")

LARGEST_DEPTH = 16
"""Most inputs that are read ahead, and results that are being written, if nothing else is said."""

_REMEMBERED = 8
"""Chunks over which times are averaged; the latest ones count most."""

_RESERVE = 1.5
"""Stores are not always as fast: so many times the mean is covered."""


class Pace:
    """How long the stages of chunks take, as all runs of a process measure it.

    Args:
        depth: most inputs that are read ahead, and most results that are being written.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._means: dict[str, float] = {}

    def measure(
        self,
        stage: Literal["read", "infer", "write"],
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
        infer: computes a chunk's result from its input, on the caller's thread.
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
                while waiting and len(reads) <= pace.suitable_depth("read"):
                    index = waiting.popleft()
                    reads.append((index, readers.submit(pace.measure, "read", read, index)))
                index, chunk_input = reads.popleft()
                wait([chunk_input])  # so that this is not counted as computing
                try:
                    result = pace.measure("infer", infer, index, chunk_input.result())
                except ChunkFault as fault:
                    yield quarantine(index, fault)
                    continue
                finally:
                    del chunk_input  # the array it holds is as large as the next one's
                while len(writes) >= pace.suitable_depth("write"):
                    yield _await_write(*writes.popleft(), quarantine)
                writes.append((index, writers.submit(pace.measure, "write", write, index, result)))
                del result
            while writes:
                yield _await_write(*writes.popleft(), quarantine)
        finally:
            for _, future in reads:
                future.cancel()


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
