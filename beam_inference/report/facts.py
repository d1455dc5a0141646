"""Facts about a job from its state folder, as many as a page has room for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.sampling import count_and_sample
from beam_inference.job.records import DamagedRecord, LaunchNote, QuarantineRecord, Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.report.chunk_map import ChunkMap

RECEIPTS_READ = 4000
"""Receipts read at most; above that, a random sample of this size."""
RECORDS_READ = 200
"""Quarantine records read at most."""
_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job's receipts, quarantine and launches.

    Attributes:
        chunks: number of the job's chunks.
        done: number of chunks with a receipt; without those that were read and cannot be believed.
        summed: number of chunks with a first-stage receipt, with ``strategy: exchange``.
        receipts: the receipts that were read, in the order of chunks.
        sums: the first-stage receipts that were read, in the order of chunks.
        done_in_cells: number of chunks done in each cell of the job's :class:`ChunkMap`.
        quarantined: chunks that could not be done, in order.
        records: quarantine records of the first of them.
        damaged: messages about receipts that cannot be believed.
        launches: the launches, earliest first.
    """

    chunks: int
    done: int
    summed: int
    receipts: list[Receipt]
    sums: list[Receipt]
    done_in_cells: NDArray[np.int64]
    quarantined: list[int]
    records: list[QuarantineRecord]
    damaged: list[str]
    launches: list[LaunchNote]

    @property
    def missing(self) -> int:
        """Chunks with neither receipt nor quarantine record."""
        return self.chunks - self.done - len(self.quarantined)

    @property
    def is_sampled(self) -> bool:
        """Whether there are receipts that were not read."""
        return self.done > len(self.receipts)


def gather_facts(job: ResolvedJob, state: State, receipts_read: int = RECEIPTS_READ) -> JobFacts:
    """List all receipts, and read some of them.

    Args:
        job: the job.
        state: its state folder.
        receipts_read: receipts read at most; above that, a random sample of this size.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    state = state.of(job)
    count = job.plan.chunks.count
    chunk_map = ChunkMap(job.plan.chunks)
    quarantined = dict.fromkeys(state.quarantine_indices(0, count))
    in_cells = np.zeros(chunk_map.shape, np.int64)

    def list_receipts() -> Iterator[int]:
        indices = state.receipt_indices(0, count)
        while some := list(islice(indices, _AT_A_TIME)):
            np.add(in_cells, chunk_map.counts(np.array(some)), out=in_cells)
            for index in some:
                quarantined.pop(index, None)  # a receipt supersedes a quarantine record
            yield from some

    done, sample = count_and_sample(list_receipts(), receipts_read)
    records = list(state.scan_receipts(sorted(sample)))
    receipts = [record for record in records if isinstance(record, Receipt)]
    damaged = [record for record in records if isinstance(record, DamagedRecord)]
    in_cells -= chunk_map.counts(np.array([record.chunk for record in damaged], np.int64))
    summed = 0
    sums = list[Receipt]()
    if job.exchange is not None:
        summed, sample = count_and_sample(state.sums_indices(0, count), receipts_read)
        sums = state.read_sums(sorted(sample))
    return JobFacts(
        chunks=count,
        done=done - len(damaged),
        summed=summed,
        receipts=receipts,
        sums=sums,
        done_in_cells=in_cells,
        quarantined=list(quarantined),
        records=state.read_quarantine(list(islice(quarantined, RECORDS_READ))),
        damaged=[record.message for record in damaged],
        launches=state.read_launches(),
    )
