"""Turns on the device: one chunk at a time is computed, with retries."""

from __future__ import annotations

import time
from dataclasses import dataclass

from beam_inference.arrays import AnyArray
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.errors import (
    BeamInferenceError,
    ChunkFault,
    DeviceOutOfMemory,
    NonFiniteError,
    WorkerFault,
)
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.worker.chunk_inference import ChunkInference, ChunkResult, WaitingChunk
from beam_inference.worker.chunk_input import ChunkInput
from beam_inference.worker.effort import Effort
from beam_inference.worker.journal import Journal
from beam_inference.worker.non_finite import explain_non_finite
from beam_inference.worker.open_job import OpenJob
from beam_inference.worker.pace import Pace
from beam_inference.worker.process_health import ProcessHealth


@dataclass(frozen=True, slots=True)
class ReadInput:
    """A chunk's input, and what it cost to read it."""

    input: ChunkInput
    seconds: float
    attempts: int


@dataclass(frozen=True, slots=True)
class ChunkOutput:
    """Computed values of a chunk: its output, or sums.

    Attributes:
        array: shape (channels, Z, Y, X).
        read_bytes: bytes of the input.
        effort: what the chunk has cost so far.
    """

    array: AnyArray
    read_bytes: int
    effort: Effort


class DeviceTurns:
    """Lets the threads of a process take turns on the device.

    Args:
        opened: the job and its network.
        inference: runs the network on chunks.
        journal: logs failed attempts.
        pace: notes how long chunks take on the device.
    """

    def __init__(
        self, opened: OpenJob, inference: ChunkInference, journal: Journal, pace: Pace
    ) -> None:
        self._opened = opened
        self._pace = pace
        self._inference = inference
        self._journal = journal
        self._queue = opened.queue
        self._health = ProcessHealth(opened)

    def infer(
        self, index: int, read: ReadInput, work: ChunkWork, encoding: Encoding = AS_COMPUTED
    ) -> ChunkOutput:
        """Compute the patches of a work on a chunk's input, and blend them.

        Args:
            index: the chunk.
            read: its input.
            work: the patches, and the box that they are blended into.
            encoding: dtype and value range of the result.

        Raises:
            ChunkFault: the network fails on this chunk.
            WorkerFault: the network fails on any chunk.
        """
        with self._queue.turn(WaitingChunk(self._inference, read.input, work)):
            start = time.perf_counter()  # waiting for the device is not using it
            try:
                with self._opened.watch.watch(f"chunk {index}"):
                    success = self._pace.measure(
                        "infer",
                        self._journal.attempt,
                        lambda: self._compute(read.input, work, encoding),
                        index,
                        "infer",
                        lambda error: not isinstance(error, BeamInferenceError),
                    )
            except DeviceOutOfMemory as error:
                raise WorkerFault(str(error)) from error
            except ChunkFault as fault:
                self._health.note_failure(fault, read.input.array)
                raise
            finally:
                read.input.free_device_arrays()
            self._health.note_success()
        result = success.value
        effort = Effort(
            result.batch_size,
            result.uniform_patches,
            result.patches_beyond_bound,
            {"read": read.seconds, "infer": time.perf_counter() - start},
            {"read": read.attempts, "infer": success.attempts},
        )
        return ChunkOutput(result.core, read.input.array.nbytes, effort)

    def _compute(self, cutout: ChunkInput, work: ChunkWork, encoding: Encoding) -> ChunkResult:
        while True:
            try:
                return self._inference.infer(cutout, work, encoding, self._queue.waiting)
            except NonFiniteError:
                raise NonFiniteError(explain_non_finite(cutout.array)) from None
            except DeviceOutOfMemory:
                if not self._opened.predictor.device.make_room():
                    raise
