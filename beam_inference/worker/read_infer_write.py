"""A run of chunks with look-ahead reads and trailing writes, over three callables.

While the device computes chunk k, the input of chunk k + 1 is read and the result of chunk k - 1 is
written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from beam_inference.errors import ChunkFault

Input = TypeVar("Input")
Result = TypeVar("Result")
Outcome = TypeVar("Outcome")

LOOK_AHEAD = 1
"""Inputs read ahead of the one in use."""
TRAILING_WRITES = 1
"""Results being written while the next one is computed."""


def run_chunks(
    indices: Sequence[int],
    read: Callable[[int], Input],
    infer: Callable[[int, Input], Result],
    write: Callable[[int, Result], Outcome],
    quarantine: Callable[[int, ChunkFault], Outcome],
    should_stop: Callable[[], bool],
) -> Iterator[Outcome]:
    """Do chunks in order; yield each one's outcome once it is written or quarantined.

    Args:
        indices: the chunks.
        read: reads a chunk's input, on a thread of its own.
        infer: computes a chunk's result from its input, on the caller's thread.
        write: writes a chunk's result, on a thread of its own.
        quarantine: is given each :class:`ChunkFault`; the run then goes on.
        should_stop: no further chunk is started once this is true.

    Raises:
        Exception: any other error of a callable; it ends the run, but only after the writes under
            way are finished, so nothing is torn.
    """
    with ThreadPoolExecutor(1, "read") as readers, ThreadPoolExecutor(1, "write") as writers:
        reads: deque[tuple[int, Future[Input]]] = deque()
        writes: deque[tuple[int, Future[Outcome]]] = deque()
        waiting = deque(indices)

        def await_write() -> Outcome:
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
                index, chunk_input = reads.popleft()
                try:
                    result = infer(index, chunk_input.result())
                except ChunkFault as fault:
                    yield quarantine(index, fault)
                    continue
                finally:
                    del chunk_input  # the array it holds is as large as the next one's
                if len(writes) == TRAILING_WRITES:
                    yield await_write()
                writes.append((index, writers.submit(write, index, result)))
                del result
            while writes:
                yield await_write()
        finally:
            for _, future in reads:
                future.cancel()
