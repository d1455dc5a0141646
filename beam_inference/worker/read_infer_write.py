"""A run of chunks with look-ahead reads and trailing writes, over three callables.

While the device computes a chunk, the inputs of the following ones are read and the results of
earlier ones are written: as many as hide how long the store takes, and no more than memory allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from beam_inference.errors import ChunkFault
from beam_inference.worker.pace import Pace

Input = TypeVar("Input")
Result = TypeVar("Result")
Outcome = TypeVar("Outcome")


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
