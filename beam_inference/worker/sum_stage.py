"""The first stage of ``strategy: exchange``: each patch is computed once, by its owner.

Blocks that no other chunk touches are written at once. Sums that others need are kept as seam
files, and a first receipt says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Container, Iterator, Sequence

from beam_inference.errors import ChunkFault
from beam_inference.geometry.chunk_work import ChunkWork
from beam_inference.geometry.seam_sums import split_sums
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER, folders
from beam_inference.job.messages import Record
from beam_inference.job.records import Part
from beam_inference.worker.chunk_steps import ChunkSteps
from beam_inference.worker.device_turns import ChunkOutput, ReadInput
from beam_inference.worker.effort import Effort
from beam_inference.worker.read_infer_write import run_chunks

logger = logging.getLogger(__name__)


class SumStage:
    """Computes the patches that chunks own, and keeps their sums for the chunks that need them."""

    name = "sums"

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
        """Return the chunks that have no receipt: the second stage finishes them."""
        return self._steps.journal.without_receipt(indices)

    def list_done(self, start: int, stop: int) -> Collection[int]:
        """List the chunks of ``start … stop`` whose patches are computed, as far as names tell.

        Chunks that own none, and those that are done themselves, have none to compute.
        """
        state = self._steps.opened.state
        done = {*state.sums_indices(start, stop), *state.receipt_indices(start, stop)}
        owners = self._exchange.owned_work
        return done.union(
            index for index in range(start, stop) if index not in done and owners(index) is None
        )

    def undone_chunks(self, indices: Sequence[int]) -> list[int]:
        """Return the chunks that own patches which are not computed."""
        summed = {receipt.chunk for receipt in self._steps.opened.state.read_sums(indices)}
        return [
            index
            for index in self._steps.journal.without_receipt(indices)
            if index not in summed and self._exchange.owned_work(index) is not None
        ]

    def _run(self, indices: Sequence[int]) -> Iterator[Record]:
        steps = self._steps
        summed = set()
        if steps.opened.launch.honour_receipts:
            summed = {receipt.chunk for receipt in steps.opened.state.read_sums(indices)}
        unsummed = [index for index in indices if index not in summed]
        receivers = self._list_receivers(unsummed)
        for index in unsummed:
            if self._is_needless(index):
                self._write_empty_sums(index)
        yield from run_chunks(
            [index for index in unsummed if receivers[index]],
            self._read,
            self._infer,
            lambda index, output: self._write(index, output, receivers[index]),
            self._leave,
            steps.should_stop,
            steps.pace,
        )

    def _list_receivers(self, indices: Sequence[int]) -> dict[int, set[int]]:
        """List the chunks that sums of some chunks are computed for.

        These are without a receipt, the output is wanted in them, and they can be put together:
        none of their contributors was done by recomputing, and so left no sums. Chunks that are
        done themselves compute nothing.
        """
        exchange = self._exchange
        touched = {index: exchange.receivers(index) for index in indices}
        contributors = {
            receiver: exchange.contributors(receiver)
            for receiver in {receiver for some in touched.values() for receiver in some}
        }
        neighbours = {index for some in contributors.values() for index in some}
        done = self._done_chunks(neighbours.union(indices, contributors))
        state = self._steps.opened.state
        without_sums = done.difference(each.chunk for each in state.read_sums(sorted(done)))
        wanted = {
            receiver
            for receiver, some in contributors.items()
            if receiver not in done
            and without_sums.isdisjoint(some)
            and not self._steps.is_masked(receiver)
        }
        return {
            index: set() if index in done else wanted.intersection(touched[index])
            for index in indices
        }

    def _is_needless(self, index: int) -> bool:
        """Whether a chunk owns patches, and the output is wanted nowhere that they touch."""
        receivers = self._exchange.receivers(index)
        return bool(receivers) and all(map(self._steps.is_masked, receivers))

    def _write_empty_sums(self, index: int) -> None:
        """Write a first receipt without sums: the chunk's patches need not be computed."""
        opened = self._steps.opened
        effort = Effort(opened.job.config.inference.patches_per_call)
        opened.state.write_sums(self._steps.journal.receipt(index, {}, effort))

    def _done_chunks(self, chunks: Collection[int]) -> set[int]:
        """Return the chunks that have a receipt; a listing says which are worth a request."""
        state = self._steps.opened.state
        count = self._steps.opened.job.plan.chunks.count
        wanted = {index // CHUNKS_PER_FOLDER for index in chunks}
        listed = {
            index
            for start, stop in folders(count)
            if start // CHUNKS_PER_FOLDER in wanted
            for index in state.receipt_indices(start, stop)
        }
        return {*self._steps.journal.read_receipts(sorted(listed.intersection(chunks)))}

    def _leave(self, index: int, fault: ChunkFault) -> Record:
        """Leave a chunk to the second stage, which does it without its neighbours.

        What fails here may lie where only a neighbour needs it. So the chunks that end in
        quarantine are the same by every strategy.
        """
        logger.warning(
            "chunk %d: sums cannot be exchanged (%s); it is left to be computed alone", index, fault
        )
        return Record(index, "left")

    def _owned_work(self, index: int) -> ChunkWork:
        work = self._exchange.owned_work(index)
        assert work is not None  # a chunk that owns nothing has no receivers
        return work

    def _read(self, index: int) -> ReadInput:
        return self._steps.read(index, self._owned_work(index).input_box)

    def _infer(self, index: int, read: ReadInput) -> ChunkOutput:
        return self._steps.device.infer(index, read, self._owned_work(index))

    def _write(self, index: int, output: ChunkOutput, receivers: Container[int]) -> Record:
        opened = self._steps.opened
        effort = output.effort
        start = time.perf_counter()
        for receiver, pieces in split_sums(self._exchange, index, output.array):
            if receiver in receivers:
                opened.seam_files.write(receiver, index, pieces)
        parts: dict[str, list[Part]] = {}
        attempts = 1
        written_bytes = 0
        private = self._exchange.private_box(index)
        if private is not None:  # no other chunk adds to it
            core = self._owned_work(index).core_box
            summed = private.intersection(core)  # beyond it there is only background
            sums = output.array[(slice(None), *summed.slices_in(core))]
            arrays = opened.postprocessing.encode(sums, summed, private)
            written = self._steps.write(index, private, arrays)
            parts = {key: [part] for key, part in written.parts.items()}
            attempts = written.attempts
            written_bytes = sum(array.nbytes for array in arrays)
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
