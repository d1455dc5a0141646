"""The stage that does chunks without their neighbours, from every patch that touches them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

from beam_inference.job.messages import Record
from beam_inference.worker.chunk_steps import ChunkSteps, CoreOutput
from beam_inference.worker.device_turns import ReadInput
from beam_inference.worker.read_infer_write import run_chunks


class InferStage:
    """Reads, computes and writes chunks, each from every patch that touches it."""

    name = "infer"

    def __init__(self, steps: ChunkSteps) -> None:
        self._steps = steps
        self._plan = steps.opened.job.plan

    def run(self, indices: Sequence[int]) -> Iterator[Record]:
        """Do chunks in order; yield each one's record once the chunk is durable.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        return self._steps.journal.log_run(indices, self._run(indices))

    def list_done(self, start: int, stop: int) -> Collection[int]:
        """List the chunks of ``start … stop`` that have a receipt, as far as names tell."""
        return {*self._steps.opened.state.receipt_indices(start, stop)}

    def undone_chunks(self, indices: Sequence[int]) -> list[int]:
        """Return the chunks that have no receipt."""
        return self._steps.journal.without_receipt(indices)

    def _run(self, indices: Sequence[int]) -> Iterator[Record]:
        steps = self._steps
        receipts = steps.journal.read_receipts(indices)
        for receipt in receipts.values():
            yield steps.journal.record_of(receipt)
        missing = [index for index in indices if index not in receipts]
        masked = {index for index in missing if steps.is_masked(index)}
        for index in missing:
            if index in masked and not steps.should_stop():
                yield steps.write_blank(index)
        yield from run_chunks(
            [index for index in missing if index not in masked],
            self._read,
            steps.infer_core,
            self._write,
            steps.journal.quarantine,
            steps.should_stop,
            steps.pace,
        )

    def _read(self, index: int) -> ReadInput:
        return self._steps.read(index, self._plan.work(index).input_box)

    def _write(self, index: int, output: CoreOutput) -> Record:
        steps = self._steps
        start = time.perf_counter()
        written = steps.write(index, self._plan.chunks.core_box(index), output.arrays)
        effort = output.effort.with_seconds("write", time.perf_counter() - start)
        effort = effort.with_attempts("write", written.attempts)
        parts = {key: [part] for key, part in written.parts.items()}
        steps.opened.state.write_receipt(steps.journal.receipt(index, parts, effort))
        return Record(
            index,
            "done",
            output.read_bytes,
            sum(array.nbytes for array in output.arrays),
            dict(effort.seconds),
            effort.uniform_patches,
        )
