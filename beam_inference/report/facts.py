"""What the state folder says of a job, as far as a page has room for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
"""At most; of more, so many are drawn by lot."""
RECORDS_READ = 200
"""Quarantine records, at most."""
_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True)
class Facts:
    """A job's receipts, quarantine and launches.

    Attributes:
        chunks: of the job. done: those with a receipt. summed: with ``seams: exchange``, those with
            a first receipt.
        receipts: those that were read, by chunk. sums: first receipts, likewise.
        done_in_cells: how many are done in each cell of the job's :class:`ChunkMap`.
        quarantined: chunks that could not be done, in order. records: what the first of them say.
        damaged: what is wrong with receipts that cannot be understood.
        launches: the first first.
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
    def sampled(self) -> bool:
        """Whether there are receipts that were not read."""
        return self.done > len(self.receipts) + len(self.damaged)


def gather(job: ResolvedJob, state: State, receipts_read: int = RECEIPTS_READ) -> Facts:
    """List all receipts, and read at most so many of them.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    state = state.of(job)
    count = job.plan.chunks.count
    chunk_map = ChunkMap(job.plan.chunks)
    quarantined = dict.fromkeys(state.quarantine_indices(0, count))
    in_cells = np.zeros(chunk_map.shape, np.int64)

    def tallied(indices: Iterator[int]) -> Iterable[int]:
        while some := list(islice(indices, _AT_A_TIME)):
            in_cells.__iadd__(chunk_map.counts(np.array(some)))
            yield from some

    def superseding(indices: Iterable[int]) -> Iterator[int]:
        for index in indices:
            quarantined.pop(index, None)
            yield index

    done, sample = count_and_sample(
        superseding(tallied(state.receipt_indices(0, count))), receipts_read
    )
    records = list(state.scan_receipts(sorted(sample)))
    receipts = [each for each in records if isinstance(each, Receipt)]
    damaged = [each.message for each in records if isinstance(each, DamagedRecord)]
    summed = 0
    sums = list[Receipt]()
    if job.plan.exchange is not None:
        summed, sample = count_and_sample(state.sums_indices(0, count), receipts_read)
        sums = state.read_sums(sorted(sample))
    return Facts(
        chunks=count,
        done=done,
        summed=summed,
        receipts=receipts,
        sums=sums,
        done_in_cells=in_cells,
        quarantined=list(quarantined),
        records=state.read_quarantine(list(islice(quarantined, RECORDS_READ))),
        damaged=damaged,
        launches=state.read_launches(),
    )
