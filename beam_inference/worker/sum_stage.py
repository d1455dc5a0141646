"""The first stage of ``seams: exchange``: every patch is computed once, by the chunk that owns it.

Blocks that no other chunk touches are written at once. Sums that others need are kept as seam
files, and a first receipt says so.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence

from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.seam_sums import split_sums
from beam_inference.job.messages import Record
from beam_inference.job.records import Part
from beam_inference.worker.chunk_steps import ChunkSteps
from beam_inference.worker.device_turns import ChunkOutput, ReadInput
from beam_inference.worker.effort import Effort
from beam_inference.worker.read_infer_write import run_chunks


class SumStage:
    """Computes the patches that chunks own, and keeps their sums for the chunks that need them."""

    def __init__(self, steps: ChunkSteps) -> None:
        self._steps = steps
        self._exchange = steps.exchange_plan()

    def run(self, indices: Sequence[int]) -> Iterator[Record]:
        """Compute patches of chunks in order, as far as a chunk without a receipt needs them.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        return self._steps.journal.log_run(indices, self._run(indices))

    def waiting_chunks(self, indices: Sequence[int]) -> list[int]:
        """Chunks without a receipt among the given ones and those that their patches touch."""
        touched = set(indices)
        for index in indices:
            touched.update(self._exchange.receivers(index))
        done = self._steps.journal.read_receipts(sorted(touched))
        return [index for index in sorted(touched) if index not in done]

    def _run(self, indices: Sequence[int]) -> Iterator[Record]:
        steps = self._steps
        opened = steps.opened
        summed = set()
        if opened.launch.honour_receipts:
            summed = {receipt.chunk for receipt in opened.state.read_sums(indices)}
        unsummed = [index for index in indices if index not in summed]
        needed = {index for index in self.waiting_chunks(indices) if not steps.is_masked(index)}
        todo = [index for index in unsummed if needed.intersection(self._exchange.receivers(index))]
        for index in unsummed:
            if index not in todo and self._is_needless(index):
                self._write_empty_sums(index)
        yield from run_chunks(
            todo,
            self._read,
            self._infer,
            lambda index, output: self._write(index, output, needed),
            steps.journal.quarantine,
            steps.should_stop,
        )

    def _is_needless(self, index: int) -> bool:
        """Whether a chunk owns patches, and the output is wanted nowhere that they touch."""
        receivers = self._exchange.receivers(index)
        return bool(receivers) and all(map(self._steps.is_masked, receivers))

    def _write_empty_sums(self, index: int) -> None:
        """Write a first receipt without sums: the chunk's patches need not be computed."""
        opened = self._steps.opened
        effort = Effort(opened.job.config.inference.patches_per_call)
        opened.state.write_sums(self._steps.journal.receipt(index, [], effort))

    def _owned_work(self, index: int) -> ChunkWork:
        work = self._exchange.owned_work(index)
        assert work is not None  # a chunk that owns nothing has no receivers
        return work

    def _read(self, index: int) -> ReadInput:
        return self._steps.read(index, self._owned_work(index).input_box)

    def _infer(self, index: int, read: ReadInput) -> ChunkOutput:
        return self._steps.device.infer(index, read, [self._owned_work(index)], next)

    def _write(self, index: int, output: ChunkOutput, needed: Container[int]) -> Record:
        opened = self._steps.opened
        effort = output.effort
        start = time.perf_counter()
        for receiver, pieces in split_sums(self._exchange, index, output.array):
            if receiver in needed:
                opened.seam_files.write(receiver, index, pieces)
        parts: list[Part] = []
        attempts = 1
        written_bytes = 0
        private = self._exchange.private_box(index)
        if private is not None:  # no other chunk adds to it
            core = self._owned_work(index).core_box
            sums = output.array[(slice(None), *private.slices_in(core))]
            array = opened.postprocessing.encode(sums, private, private)
            written = self._steps.write(index, private, array)
            parts = [written.part]
            attempts = written.attempts
            written_bytes = array.nbytes
        effort = effort.with_seconds("write", time.perf_counter() - start)
        effort = effort.with_attempts("write", attempts)
        opened.state.write_sums(self._steps.journal.receipt(index, parts, effort))
        return Record(
            index,
            "summed",
            output.read_bytes,
            written_bytes,
            dict(effort.seconds),
            effort.uniform_patches,
        )
