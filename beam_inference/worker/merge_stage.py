"""The second stage of ``strategy: exchange``: voxels that chunks share are summed and written.

A chunk of which some sums do not exist is computed without its neighbours, to the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.seam_sums import Sums, merge_sums, seam_boxes
from beam_inference.job.messages import Record
from beam_inference.job.records import Receipt
from beam_inference.worker.chunk_steps import ChunkSteps, CoreOutput
from beam_inference.worker.device_turns import ReadInput
from beam_inference.worker.effort import Effort
from beam_inference.worker.read_infer_write import run_chunks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums that make up a chunk.

    Attributes:
        receipt: the chunk's first receipt, if it owns patches.
        of_contributors: chunks that add to it, each with its arrays.
        seconds: time spent on reading them.
    """

    receipt: Receipt | None
    of_contributors: list[tuple[int, list[Sums]]]
    seconds: float


@dataclass(frozen=True, slots=True)
class _FinishedChunk:
    """Boxes to write of a chunk.

    Attributes:
        boxes: each with what is to be written of every output.
        receipt: the chunk's first receipt, if that tells of further boxes.
        seconds: time spent on reading and merging sums.
        core: the whole chunk, if it was computed without its neighbours.
    """

    boxes: Sequence[tuple[BoundingBox, Sequence[AnyArray]]]
    receipt: Receipt | None
    seconds: float
    core: CoreOutput | None = None


class MergeStage:
    """Puts chunks together from the sums of all chunks that touch them, and writes them."""

    name = "merge"

    def __init__(self, steps: ChunkSteps) -> None:
        self._steps = steps
        self._plan = steps.opened.job.plan
        self._exchange = steps.exchange_plan()
        self._channels = steps.opened.job.config.model.output_channels

    def run(self, indices: Sequence[int]) -> Iterator[Record]:
        """Finish chunks; yield a record for each.

        A chunk whose contributors are not computed yet, because the launch was stopped, is left as
        it is.

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
        first_receipts = self._read_first_receipts(missing)
        ready = []
        for index in missing:
            if not steps.is_masked(index):
                ready.append(index)
            elif not steps.should_stop():
                yield steps.write_blank(index)
        arrays.give_back()  # what the network needed
        yield from run_chunks(
            ready,
            lambda index: self._read(index, first_receipts),
            self._finish,
            self._write,
            steps.journal.quarantine,
            steps.should_stop,
            steps.pace,
        )

    def _read_first_receipts(self, indices: Sequence[int]) -> dict[int, Receipt]:
        """First receipts, by chunk, of chunks and of their contributors."""
        chunks = set(indices)
        for index in indices:
            chunks.update(self._exchange.contributors(index))
        receipts = self._steps.opened.state.read_sums(sorted(chunks))
        return {receipt.chunk: receipt for receipt in receipts}

    def _read(self, index: int, first_receipts: Mapping[int, Receipt]) -> _Sums | ReadInput:
        """Read the sums that make up a chunk; or its input, where some of them do not exist."""
        contributors = self._exchange.contributors(index)
        if first_receipts.keys() >= set(contributors):
            start = time.perf_counter()
            shapes = {
                contributor: [box.shape for box in seam_boxes(self._exchange, contributor, index)]
                for contributor in contributors
            }
            wanted = [(contributor, some) for contributor, some in shapes.items() if some]
            sums = self._steps.opened.seam_files.read(index, wanted, self._channels)
            if sums is not None:
                with_sums = [contributor for contributor, _ in wanted]
                return _Sums(
                    first_receipts.get(index),
                    list(zip(with_sums, sums, strict=True)),
                    time.perf_counter() - start,
                )
        logger.warning(
            "chunk %d: some of the sums that it is made of do not exist; it is computed without "
            "its neighbours",
            index,
        )
        return self._steps.read(index, self._plan.work(index).input_box)

    def _finish(self, index: int, read: _Sums | ReadInput) -> _FinishedChunk:
        if isinstance(read, ReadInput):
            core_box = self._plan.chunks.core_box(index)
            core = self._steps.infer_core(index, read)
            return _FinishedChunk([(core_box, core.arrays)], None, 0.0, core)
        return self._steps.pace.measure("infer", self._merge, index, read)

    def _merge(self, index: int, read: _Sums) -> _FinishedChunk:
        core_box = self._plan.chunks.core_box(index)
        start = time.perf_counter()
        encode = self._steps.opened.postprocessing.encode
        merged = merge_sums(self._exchange, index, read.of_contributors, self._channels)
        boxes = []
        for box, values in merged:  # or all that the chunk is made of, with its halo
            written = core_box if self._exchange.joins_whole_chunks else box
            boxes.append((written, encode(values, box, written)))
        return _FinishedChunk(boxes, read.receipt, read.seconds + time.perf_counter() - start)

    def _write(self, index: int, merged: _FinishedChunk) -> Record:
        opened = self._steps.opened
        core = merged.core
        receipt = merged.receipt
        start = time.perf_counter()
        parts = {} if receipt is None else {k: list(v) for k, v in receipt.parts_by_output.items()}
        written_bytes = 0
        for box, values in merged.boxes:
            for key, part in self._steps.write(index, box, values).parts.items():
                parts.setdefault(key, []).append(part)
            written_bytes += sum(array.nbytes for array in values)
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
