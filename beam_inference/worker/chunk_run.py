"""A run of chunks with look-ahead reads and trailing writes, over three callables: pure.

While the device computes chunk k, the cutout of chunk k + 1 is read and the result of chunk k - 1
is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from beam_inference.errors import ChunkFault

Cutout = TypeVar("Cutout")
Result = TypeVar("Result")
Outcome = TypeVar("Outcome")

LOOK_AHEAD = 1
"""Cutouts read ahead of the one in use."""
TRAILING_WRITES = 1
"""Results being written while the next one is computed."""


def run_chunks(
    indices: Sequence[int],
    read: Callable[[int], Cutout],
    infer: Callable[[int, Cutout], Result],
    write: Callable[[int, Result], Outcome],
    quarantine: Callable[[int, ChunkFault], Outcome],
    should_stop: Callable[[], bool],
) -> Iterator[Outcome]:
    """Do the chunks in order; yield each one's outcome once ``write`` (or ``quarantine``) has returned it.

    ``read`` and ``write`` run on threads of their own, ``infer`` on the caller's. A
    :class:`ChunkFault` from any of them is handed to ``quarantine`` and the run goes on. Once
    ``should_stop()``, no further chunk is started. Any other exception ends the run, but only after
    the writes under way are finished, so nothing is torn.
    """
    with ThreadPoolExecutor(1, "read") as readers, ThreadPoolExecutor(1, "write") as writers:
        reads: deque[tuple[int, Future[Cutout]]] = deque()
        writes: deque[tuple[int, Future[Outcome]]] = deque()
        waiting = deque(indices)

        def written() -> Outcome:
            index, future = writes.popleft()
            try:
                return future.result()
            except ChunkFault as fault:
                return quarantine(index, fault)
            finally:
                # it holds the fault, whose traceback holds this frame, and the chunk's arrays
                del future

        try:
            while waiting or reads:
                if should_stop():
                    break
                while waiting and len(reads) <= LOOK_AHEAD:
                    index = waiting.popleft()
                    reads.append((index, readers.submit(read, index)))
                index, cutout = reads.popleft()
                try:
                    result = infer(index, cutout.result())
                except ChunkFault as fault:
                    yield quarantine(index, fault)
                    continue
                finally:
                    del cutout  # the array it holds is as large as the next one's
                if len(writes) == TRAILING_WRITES:
                    yield written()
                writes.append((index, writers.submit(write, index, result)))
                del result
            while writes:
                yield written()
        finally:
            for _, future in reads:
                future.cancel()
