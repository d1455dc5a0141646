"""The two stages of ``seams: exchange``, as a worker does them: every patch once, then the voxels that chunks share.

First a chunk's own patches are computed and added up. Blocks that nobody else touches are written;
what others need is kept as seam files, and a first receipt says so. Once all that touches a chunk
is there, it is put together and written, and has its receipt. A chunk whose seam files are lost is
computed without its neighbours, to the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from beam_inference import arrays
from beam_inference.engines.protocol import AS_COMPUTED
from beam_inference.errors import ChunkFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.seam_sums import Sums, merge_sums, seam_boxes, split_sums
from beam_inference.job.messages import Record
from beam_inference.job.records import Receipt
from beam_inference.worker.chunk_run import run_chunks
from beam_inference.worker.seam_files import SeamFiles
from beam_inference.worker.worker import Core, Cutout, Worker

logger = logging.getLogger(__name__)

STAGE = "seams"
"""Of a chunk's fault: what it shares voxels with could not be done."""


class _Parts(NamedTuple):
    """What a chunk is made of: its own first receipt, if it owns patches, and what each contributor says."""

    own: Receipt | None
    contributors: list[int]
    arrays: list[list[Sums]] | None
    seconds: float


class _Merged(NamedTuple):
    """Boxes to write, and what is known of the chunk otherwise."""

    boxes: list[tuple[BoundingBox, Sums]]
    own: Receipt | None
    seconds: float
    whole: Core | None = None


class SeamExchange:
    """Both stages, on the stores and the network of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._job = worker.job
        exchange = worker.job.plan.exchange
        assert exchange is not None  # a job of another seam mode has a single stage
        self._exchange = exchange
        self._files = SeamFiles(worker.state.url, worker.job.config.storage, worker.job.fingerprint)
        self._channels = worker.job.config.model.output_channels

    def add_up(self, indices: Sequence[int]) -> Iterator[Record]:
        """Compute the patches that these chunks own, as far as a chunk without a receipt needs them.

        Raises:
            WorkerFault: this process cannot go on.
        """
        worker = self._worker
        exchange = self._exchange
        summed = self._summed(indices) if worker.launch.honour_receipts else {}
        needed = {index for index in self.waiting(indices) if not worker.is_masked(index)}
        todo = [
            i for i in indices if i not in summed and needed.intersection(exchange.receivers(i))
        ]
        for index in indices:
            if index not in summed and index not in todo and self._is_needless(index):
                self._write_nothing(index)
        records = run_chunks(
            todo,
            self._read_owned,
            self._infer_owned,
            lambda index, computed: self._write_sums(index, computed, needed),
            worker.quarantine,
            worker.should_stop,
        )
        yield from worker.logged(indices, records)

    def waiting(self, indices: Sequence[int]) -> list[int]:
        """The chunks that the patches of these ones touch, and they themselves, as far as they have no receipt."""
        touched = sorted(
            {
                *indices,
                *(receiver for index in indices for receiver in self._exchange.receivers(index)),
            }
        )
        done = self._worker.receipts(touched)
        return [index for index in touched if index not in done]

    def merge(self, indices: Sequence[int]) -> Iterator[Record]:
        """Finish chunks whose contributors are all computed; one record per chunk.

        A chunk one of whose contributors is quarantined is quarantined, too. One whose contributors
        are not done yet, because the launch was stopped, is left as it is.

        Raises:
            WorkerFault: this process cannot go on.
        """
        yield from self._worker.logged(indices, self._merge(indices))

    def _merge(self, indices: Sequence[int]) -> Iterator[Record]:
        worker = self._worker
        exchange = self._exchange
        receipts = worker.receipts(indices)
        yield from map(worker.done_before, receipts.values())
        ready = []
        missing = [index for index in indices if index not in receipts]
        summed = self._summed(
            sorted({*missing, *(c for index in missing for c in exchange.contributors(index))})
        )
        for index in missing:
            if worker.is_masked(index):
                if not worker.should_stop():
                    yield worker.write_blank(index)
                continue
            absent = [
                contributor
                for contributor in exchange.contributors(index)
                if contributor not in summed
            ]
            if not absent:
                ready.append(index)
                continue
            failed = {record.chunk: record for record in worker.state.read_quarantine(absent)}
            if index in failed:
                yield Record(index, "quarantined")
            elif failed:
                cause = "; ".join(
                    f"chunk {chunk}: {record.cause}" for chunk, record in failed.items()
                )
                yield worker.quarantine(
                    index,
                    ChunkFault(f"it needs patches that could not be done: {cause}", STAGE, 1),
                )
        arrays.give_back()  # what the network needed
        yield from run_chunks(
            ready,
            lambda index: self._read_parts(index, summed.get(index)),
            self._put_together,
            self._write_merged,
            worker.quarantine,
            worker.should_stop,
        )

    def _summed(self, indices: Sequence[int]) -> dict[int, Receipt]:
        return {receipt.chunk: receipt for receipt in self._worker.state.read_sums(indices)}

    def _is_needless(self, index: int) -> bool:
        """Whether a chunk owns patches, and the output is wanted nowhere that they touch."""
        receivers = self._exchange.receivers(index)
        return bool(receivers) and all(map(self._worker.is_masked, receivers))

    def _write_nothing(self, index: int) -> None:
        """A first receipt without sums: that this chunk's patches need not be computed is known, and is progress."""
        batch_size = self._job.config.inference.patches_per_call
        self._worker.state.write_sums(self._worker.receipt(index, [], batch_size, 0, {}, {}))

    def _read_owned(self, index: int) -> Cutout:
        work = self._exchange.owned_work(index)
        assert work is not None  # who owns nothing has no receivers
        return self._worker.read(index, work.input_box)

    def _infer_owned(self, index: int, cutout: Cutout) -> Core:
        work = self._exchange.owned_work(index)
        assert work is not None
        return self._worker.infer(index, cutout, [work], AS_COMPUTED, next)

    def _write_sums(self, index: int, core: Core, needed: Container[int]) -> Record:
        exchange = self._exchange
        start = time.perf_counter()
        work = exchange.owned_work(index)
        private = exchange.private_box(index)
        assert work is not None
        for receiver, pieces in split_sums(exchange, index, core.array):
            if receiver in needed:
                self._files.write(receiver, index, pieces)
        parts = []
        attempts = 1
        written = 0
        if private is not None:  # what nobody else adds to; the next chunk is computed meanwhile
            sums = core.array[(slice(None), *private.slices_in(work.core_box))]
            own = self._worker.finishing.encoded(sums, private, private)
            part, attempts = self._worker.write(index, private, own)
            parts = [part]
            written = own.nbytes
        seconds = core.seconds | {"write": time.perf_counter() - start}
        self._worker.state.write_sums(
            self._worker.receipt(
                index,
                parts,
                core.batch_size,
                core.uniform_patches,
                seconds,
                core.attempts | {"write": attempts},
            )
        )
        return Record(index, "summed", core.read_bytes, written, seconds, core.uniform_patches)

    def _read_parts(self, index: int, own: Receipt | None) -> _Parts:
        exchange = self._exchange
        start = time.perf_counter()
        wanted = [
            (contributor, [box.shape for box in boxes])
            for contributor in exchange.contributors(index)
            if (boxes := seam_boxes(exchange, contributor, index))
        ]
        arrays = self._files.read(index, wanted, self._channels)
        return _Parts(
            own, [contributor for contributor, _ in wanted], arrays, time.perf_counter() - start
        )

    def _put_together(self, index: int, parts: _Parts) -> _Merged:
        plan = self._job.plan
        start = time.perf_counter()
        if parts.arrays is None:
            logger.warning(
                "chunk %d: its seam files are lost; it is computed without its neighbours", index
            )
            cutout = self._worker.read(index, plan.work(index).input_box)
            whole = self._worker.whole_core(index, cutout)
            return _Merged([(plan.chunks.core_box(index), whole.array)], None, parts.seconds, whole)
        boxes = merge_sums(
            self._exchange,
            index,
            zip(parts.contributors, parts.arrays, strict=True),
            self._channels,
        )
        encoded = [(box, self._worker.finishing.encoded(values, box, box)) for box, values in boxes]
        return _Merged(encoded, parts.own, parts.seconds + time.perf_counter() - start)

    def _write_merged(self, index: int, result: _Merged) -> Record:
        worker = self._worker
        start = time.perf_counter()
        own = result.own
        whole = result.whole
        parts = list(own.parts) if own else []
        written = 0
        for box, values in result.boxes:
            part, _ = worker.write(index, box, values)
            parts.append(part)
            written += values.nbytes
        # A chunk that owns no patch is made of what others say alone.
        before = (
            whole
            or own
            or Core(np.empty(0), self._job.config.inference.patches_per_call, 0, 0, {}, {})
        )
        seconds = dict(before.seconds)
        for stage, spent in (("merge", result.seconds), ("write", time.perf_counter() - start)):
            seconds[stage] = seconds.get(stage, 0.0) + spent
        worker.state.write_receipt(
            worker.receipt(
                index,
                parts,
                before.batch_size,
                before.uniform_patches,
                seconds,
                dict(before.attempts),
            )
        )
        self._files.forget(index)
        read_bytes = whole.read_bytes if whole else 0
        return Record(
            index,
            "done",
            read_bytes,
            written,
            {"merge": result.seconds, "write": time.perf_counter() - start},
        )
