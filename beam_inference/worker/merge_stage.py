"""The second stage of ``seams: exchange``: voxels that chunks share are summed and written.

A chunk whose seam files are lost is computed without its neighbours, to the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.errors import ChunkFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.seam_sums import Sums, merge_sums, seam_boxes
from beam_inference.job.messages import Record
from beam_inference.job.records import Receipt
from beam_inference.worker.chunk_steps import ChunkSteps
from beam_inference.worker.device_turns import ChunkOutput
from beam_inference.worker.effort import Effort
from beam_inference.worker.read_infer_write import run_chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SeamInput:
    """Sums that make up a chunk.

    Attributes:
        receipt: the chunk's first receipt, if it owns patches.
        contributors: chunks that add to it, in order.
        sums: arrays of each contributor; None if they are lost.
        seconds: time spent on reading them.
    """

    receipt: Receipt | None
    contributors: list[int]
    sums: list[list[Sums]] | None
    seconds: float


@dataclass(frozen=True, slots=True)
class _MergedChunk:
    """Boxes to write of a chunk.

    Attributes:
        boxes: each with its output.
        receipt: the chunk's first receipt, if that tells of further boxes.
        seconds: time spent on reading and merging sums.
        core: the whole chunk, if it was computed without its neighbours.
    """

    boxes: list[tuple[BoundingBox, AnyArray]]
    receipt: Receipt | None
    seconds: float
    core: ChunkOutput | None = None


class MergeStage:
    """Puts chunks together from the sums of all chunks that touch them, and writes them."""

    def __init__(self, steps: ChunkSteps) -> None:
        self._steps = steps
        self._plan = steps.opened.job.plan
        self._exchange = steps.exchange_plan()
        self._channels = steps.opened.job.config.model.output_channels

    def run(self, indices: Sequence[int]) -> Iterator[Record]:
        """Finish chunks whose contributors are all computed; yield a record for each.

        A chunk with a quarantined contributor is quarantined, too. A chunk whose contributors are
        not computed yet, because the launch was stopped, is left as it is.

        Raises:
            WorkerFault: this process cannot go on; chunks done so far have their receipts.
        """
        return self._steps.journal.log_run(indices, self._run(indices))

    def _run(self, indices: Sequence[int]) -> Iterator[Record]:
        steps = self._steps
        receipts = steps.journal.read_receipts(indices)
        for receipt in receipts.values():
            yield steps.journal.record_of(receipt)
        missing = [index for index in indices if index not in receipts]
        first_receipts = self._read_first_receipts(missing)
        ready = []
        for index in missing:
            if steps.is_masked(index):
                if not steps.should_stop():
                    yield steps.write_blank(index)
            elif uncomputed := self._uncomputed_contributors(index, first_receipts):
                yield from self._quarantine_if_impossible(index, uncomputed)
            else:
                ready.append(index)
        arrays.give_back()  # what the network needed
        yield from run_chunks(
            ready,
            lambda index: self._read(index, first_receipts.get(index)),
            self._merge,
            self._write,
            steps.journal.quarantine,
            steps.should_stop,
        )

    def _read_first_receipts(self, indices: Sequence[int]) -> dict[int, Receipt]:
        """First receipts, by chunk, of chunks and of their contributors."""
        chunks = set(indices)
        for index in indices:
            chunks.update(self._exchange.contributors(index))
        receipts = self._steps.opened.state.read_sums(sorted(chunks))
        return {receipt.chunk: receipt for receipt in receipts}

    def _uncomputed_contributors(self, index: int, computed: Collection[int]) -> list[int]:
        return [chunk for chunk in self._exchange.contributors(index) if chunk not in computed]

    def _quarantine_if_impossible(self, index: int, uncomputed: Sequence[int]) -> Iterator[Record]:
        """Yield a record if one of the contributors that are not computed is quarantined."""
        records = self._steps.opened.state.read_quarantine(uncomputed)
        causes = {record.chunk: record.cause for record in records}
        if index in causes:
            yield Record(index, "quarantined")
        elif causes:
            cause = "; ".join(f"chunk {chunk}: {cause}" for chunk, cause in causes.items())
            fault = ChunkFault(f"it needs patches that could not be done: {cause}", "seams", 1)
            yield self._steps.journal.quarantine(index, fault)

    def _read(self, index: int, receipt: Receipt | None) -> _SeamInput:
        start = time.perf_counter()
        shapes = {
            contributor: [box.shape for box in seam_boxes(self._exchange, contributor, index)]
            for contributor in self._exchange.contributors(index)
        }
        wanted = [(contributor, some) for contributor, some in shapes.items() if some]
        sums = self._steps.opened.seam_files.read(index, wanted, self._channels)
        seconds = time.perf_counter() - start
        return _SeamInput(receipt, [contributor for contributor, _ in wanted], sums, seconds)

    def _merge(self, index: int, seams: _SeamInput) -> _MergedChunk:
        if seams.sums is None:
            return self._infer_alone(index, seams.seconds)
        start = time.perf_counter()
        sums = zip(seams.contributors, seams.sums, strict=True)
        encode = self._steps.opened.postprocessing.encode
        boxes = [
            (box, encode(values, box, box))
            for box, values in merge_sums(self._exchange, index, sums, self._channels)
        ]
        return _MergedChunk(boxes, seams.receipt, seams.seconds + time.perf_counter() - start)

    def _infer_alone(self, index: int, seconds: float) -> _MergedChunk:
        """Compute a chunk without its neighbours, after ``seconds`` spent on its seam files."""
        logger.warning(
            "chunk %d: its seam files are lost; it is computed without its neighbours", index
        )
        read = self._steps.read(index, self._plan.work(index).input_box)
        core = self._steps.infer_core(index, read)
        box = self._plan.chunks.core_box(index)
        return _MergedChunk([(box, core.array)], None, seconds, core)

    def _write(self, index: int, merged: _MergedChunk) -> Record:
        opened = self._steps.opened
        core = merged.core
        receipt = merged.receipt
        start = time.perf_counter()
        parts = list(receipt.parts) if receipt else []
        written_bytes = 0
        for box, values in merged.boxes:
            parts.append(self._steps.write(index, box, values).part)
            written_bytes += values.nbytes
        if core is not None:
            effort = core.effort
        elif receipt is not None:
            effort = Effort.of(receipt)
        else:  # a chunk that owns no patch is made of others' sums alone
            effort = Effort(opened.job.config.inference.patches_per_call)
        effort = effort.with_seconds("merge", merged.seconds)
        effort = effort.with_seconds("write", time.perf_counter() - start)
        opened.state.write_receipt(self._steps.journal.receipt(index, parts, effort))
        opened.seam_files.forget(index)
        return Record(
            index,
            "done",
            0 if core is None else core.read_bytes,
            written_bytes,
            {"merge": merged.seconds, "write": time.perf_counter() - start},
        )
