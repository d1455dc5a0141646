"""The steps that all stages of a job do to a chunk: read, compute, write."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from beam_inference.arrays import AnyArray
from beam_inference.errors import ChunkFault, StalledReadError, TransientReadError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.seam_exchange import SeamExchangePlan
from beam_inference.job.messages import Record
from beam_inference.job.ownership import Claim
from beam_inference.job.parts import cutout, output_spec
from beam_inference.job.records import Part
from beam_inference.job.runs import chunk_seconds_of
from beam_inference.job.state import StopRequest
from beam_inference.volumes.volume import TransientWriteError, Volume
from beam_inference.worker.chunk_inference import ChunkInference
from beam_inference.worker.device_turns import DeviceTurns, ReadInput
from beam_inference.worker.effort import Effort
from beam_inference.worker.journal import Journal
from beam_inference.worker.open_job import OpenJob
from beam_inference.worker.pace import Pace
from beam_inference.worker.retries import Success

MOST_STALLED_READS = 3
"""Reads that a process gives up, one after the other, before it is itself at fault."""


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box that was durably written in every output.

    Attributes:
        parts: what was written in each output, by its key in the job file.
        attempts: the most attempts that one of them took.
    """

    parts: Mapping[str, Part]
    attempts: int


@dataclass(frozen=True, slots=True)
class CoreOutput:
    """A chunk as it is to be written.

    Attributes:
        arrays: of each output, shape (channels, Z, Y, X).
        read_bytes: bytes of the input.
        effort: what the chunk has cost so far.
    """

    arrays: Sequence[AnyArray]
    read_bytes: int
    effort: Effort


class ChunkSteps:
    """Does single steps of chunks on an opened job; threads may share it.

    Args:
        opened: the job.
        inference: runs its network on chunks.

    Attributes:
        opened: the job.
        journal: receipts, quarantine records and log lines.
        device: the network's turns.
        should_stop: whether the launch was asked to stop.
        pace: how many chunks are read ahead, and written behind.
    """

    def __init__(self, opened: OpenJob, inference: ChunkInference) -> None:
        self.opened = opened
        self.journal = Journal(opened.launch, opened.job, opened.state)
        self.pace = Pace(opened.launch.io_depth, chunk_seconds_of(opened.job))
        self.device = DeviceTurns(opened, inference, self.journal, self.pace)
        self.should_stop = StopRequest(opened.state, opened.launch.id)
        self._claims = [
            Claim(opened.job, opened.state, output_spec(opened.job, key).url)
            for key in opened.job.config.written_keys
        ]
        self._inference = inference
        self._stalled_reads = 0

    def exchange_plan(self) -> SeamExchangePlan:
        """What chunks of the job give to each other.

        Raises:
            ValueError: they give nothing to each other.
        """
        exchange = self.opened.job.plan.exchange
        if exchange is None:
            raise ValueError("chunks of this launch exchange nothing")
        return exchange

    def is_masked(self, index: int) -> bool:
        """Whether the output is wanted nowhere in a chunk."""
        return self.opened.mask.excludes(self.opened.job.plan.chunks.core_box(index))

    def read(self, index: int, box: BoundingBox) -> ReadInput:
        """Read a chunk's input, and begin to bring it to the device.

        Raises:
            ChunkFault: the input cannot be read.
            WorkerFault: several reads of this process have stalled, one after the other.
        """
        opened = self.opened
        start = time.perf_counter()
        try:
            success = self.journal.attempt(
                lambda: cutout(opened.job.config, opened.input, box),
                index,
                "read",
                lambda error: isinstance(error, TransientReadError),
            )
        except ChunkFault as fault:
            if isinstance(fault.__cause__, StalledReadError):
                self._note_stalled_read(fault)
                cause = f"{fault} (job.timeouts.read)"
                raise ChunkFault(cause, fault.stage, fault.attempts) from fault
            raise
        self._stalled_reads = 0
        seconds = time.perf_counter() - start
        chunk_input = self._inference.start_upload(success.value, box)
        return ReadInput(chunk_input, seconds, success.attempts)

    def _note_stalled_read(self, fault: ChunkFault) -> None:
        """Count the reads that were given up: each may keep one of TensorStore's threads for ever.

        Raises:
            WorkerFault: there are too many for this process to go on.
        """
        self._stalled_reads += 1
        if self._stalled_reads > MOST_STALLED_READS:
            raise WorkerFault(
                f"{self._stalled_reads} reads of this process, one after the other, took longer "
                f"than job.timeouts.read; the last one: {fault}. Is the store still there? Give "
                "the same command again, or raise job.timeouts.read if the store is only slow."
            ) from fault

    def infer_core(self, index: int, read: ReadInput) -> CoreOutput:
        """Compute a chunk's core as it is to be written, from every patch that touches it.

        Raises:
            ChunkFault: the network or an operator fails on this chunk.
            WorkerFault: this process cannot go on.
        """
        plan = self.opened.job.plan
        postprocessing = self.opened.postprocessing
        work = plan.work(index)
        output = self.device.infer(index, read, work, postprocessing.device_encoding)
        core_box = plan.chunks.core_box(index)
        arrays = self.pace.measure(
            "postprocess", postprocessing.finish, output.array, work.core_box, core_box
        )
        return CoreOutput(arrays, output.read_bytes, output.effort)

    def write(self, index: int, box: BoundingBox, arrays: Sequence[AnyArray]) -> WrittenBox:
        """Write whole blocks of a chunk into every output, durably.

        Args:
            index: the chunk.
            box: the blocks.
            arrays: of each output, shape (channels, Z, Y, X).

        Raises:
            WorkerFault: they cannot be written, or read back, or are another job's by now.
        """
        volumes = [output.volume for output in self.opened.outputs]
        return self._write_all(volumes, index, box, arrays)

    def write_blank(self, index: int) -> Record:
        """Write a chunk in which the output is wanted nowhere, and its receipt.

        Raises:
            WorkerFault: it cannot be written, or read back.
        """
        opened = self.opened
        box = opened.job.plan.chunks.core_box(index)
        arrays = opened.postprocessing.blank(box)
        volumes = [output.blank_volume for output in opened.outputs]
        written = self._write_all(volumes, index, box, arrays)
        effort = Effort(opened.job.config.inference.patches_per_call)
        effort = effort.with_attempts("write", written.attempts)
        parts = {key: [part] for key, part in written.parts.items()}
        opened.state.write_receipt(self.journal.receipt(index, parts, effort))
        return Record(index, "done", 0, sum(array.nbytes for array in arrays))

    def _write_all(
        self,
        volumes: Sequence[Volume],
        index: int,
        box: BoundingBox,
        arrays: Sequence[AnyArray],
    ) -> WrittenBox:
        parts: dict[str, Part] = {}
        attempts = 1
        for claim in self._claims:
            claim.check()
        outputs = self.opened.outputs
        for output, volume, array in zip(outputs, volumes, arrays, strict=True):
            success = self._write(volume, index, box, array, is_lossy=output.is_lossy)
            parts[output.key] = Part.of(box, success.value)
            attempts = max(attempts, success.attempts)
        for preview in self.opened.previews:
            array = preview.make(arrays[preview.source], box)
            small = preview.box_of(box)
            success = self._write(preview.volume, index, small, array, is_lossy=False)
            parts[preview.key] = Part.of(small, array)
            attempts = max(attempts, success.attempts)
        return WrittenBox(parts, attempts)

    def _write(
        self, output: Volume, index: int, box: BoundingBox, array: AnyArray, *, is_lossy: bool
    ) -> Success[AnyArray]:
        """Write an array, and return what reads back; the number of attempts comes with it."""
        timeouts = self.opened.job.config.job.timeouts

        def write() -> AnyArray:
            output.write(box, array, timeouts.write)
            return output.read(box, timeouts.read) if is_lossy else array

        try:
            return self.journal.attempt(
                write,
                index,
                "write",
                lambda error: isinstance(error, (TransientWriteError, TransientReadError)),
            )
        except ChunkFault as fault:  # the destination's, not the chunk's
            raise WorkerFault(f"chunk {index} cannot be written, or read back: {fault}") from fault
