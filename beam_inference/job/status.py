"""Progress of a job, from its state folder alone: on any machine, for any runner, at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from beam_inference.geometry.sampling import count_and_sample
from beam_inference.job.chunk_records import folders
from beam_inference.job.records import DamagedRecord, Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State

_SAMPLE = 400
"""Receipts that are read to estimate the rate."""

_RECENT = 40
"""Latest receipts among those from which the rate is taken: its error is then about a sixth."""

_LATELY = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Progress of a job.

    Attributes:
        planned: number of the job's chunks.
        done: number of chunks with a receipt. Once each has one, all are read, and only those that
            can be believed count.
        damaged: messages about receipts that cannot be believed, among those that were read.
        quarantined: number of chunks that could not be done.
        summed: with ``strategy: exchange``, number of chunks whose patches are computed; else None.
        owners: with ``strategy: exchange``, number of chunks that own patches; else None.
        in_first_stage: whether the first of the two stages of ``strategy: exchange`` goes on; the
            attributes below then describe that stage.
        rate: chunks per second in the last minutes; None where nothing was done for five minutes,
            or it is too early to tell.
        workers: worker processes that finished a chunk in the last minutes, among the receipts that
            were read.
        left: number of chunks that the present stage has still to do.
        latest: time when the latest of the chunks that were looked at was finished.
        voxels_per_chunk: voxels of a chunk, on average.
    """

    planned: int
    done: int
    damaged: list[str]
    quarantined: int
    summed: int | None
    owners: int | None
    in_first_stage: bool
    rate: float | None
    workers: int
    left: int
    latest: datetime | None
    voxels_per_chunk: float

    @property
    def missing(self) -> int:
        """Chunks with neither receipt nor quarantine record."""
        return self.planned - self.done - self.quarantined

    @property
    def voxels_per_second(self) -> float | None:
        """Voxels per second in the last minutes; None where there is no rate."""
        return None if self.rate is None else self.rate * self.voxels_per_chunk

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the present stage ends, at this rate; None where there is no rate."""
        return max(0, self.left) / self.rate if self.rate else None


def job_status(job: ResolvedJob, state: State, now: datetime) -> JobStatus:
    """Count a job's receipts and quarantine records, and read a few hundred of the receipts.

    Once every chunk has a receipt, all are read: nothing is called done that cannot be believed.

    Args:
        job: the job.
        state: its state folder.
        now: present time, with a time zone.

    Raises:
        WorkerFault: the state folder cannot be read.
    """
    state = state.of(job)
    count = job.plan.chunks.count
    listed, sample = count_and_sample(state.receipt_indices(0, count), _SAMPLE)
    receipts, damaged = _split(state.scan_receipts(sample))
    done = listed - len(damaged)
    if listed == count:
        done = 0
        damaged = []
        for folder in folders(count):
            believed, others = _split(state.scan_receipts(range(*folder)))
            done += len(believed)
            damaged += others
    counted = done
    of_stage = count
    summed = None
    owners = None
    in_first_stage = False
    quarantined = sum(1 for _ in state.read_quarantined(0, count))
    finished = _moments(receipts, now)
    if uses_exchange(job, state):
        summed, sample = count_and_sample(state.sums_indices(0, count), _SAMPLE)
        sums = state.read_sums(sample)
        summed_at = _moments(sums, now)
        owners = job.plan_in("exchange").totals.owners
        # The sums of chunks that were done without their neighbours may never be computed, nor
        # those of the chunks that need them.
        in_first_stage = (
            summed < owners and bool(summed_at) and (not finished or summed_at[-1] > finished[-1])
        )
        if in_first_stage:
            counted = summed
            of_stage = owners
            receipts = sums
            finished = summed_at
    return JobStatus(
        planned=count,
        done=done,
        damaged=damaged,
        quarantined=quarantined,
        summed=summed,
        owners=owners,
        in_first_stage=in_first_stage,
        rate=recent_rate(finished, counted, now),
        workers=len(
            {receipt.worker for receipt in receipts if abs(now - receipt.finished_at) < _LATELY}
        ),
        left=of_stage - counted - quarantined,
        latest=finished[-1] if finished else None,
        voxels_per_chunk=job.plan.chunks.roi.size / of_stage,
    )


def uses_exchange(job: ResolvedJob, state: State) -> bool:
    """Whether chunks exchange sums by the strategy of the first launch, or have by a later one's.

    Args:
        job: the job.
        state: its state folder.
    """
    if job.exchange is None:
        return False
    has_sums = any(True for _ in state.sums_indices(0, job.plan.chunks.count))
    return has_sums or job.plan.exchange is not None


def _moments(receipts: Sequence[Receipt], now: datetime) -> list[datetime]:
    """When chunks were finished, in order; without those of a clock that is far ahead of ours."""
    moments = (receipt.finished_at for receipt in receipts)
    return sorted(moment for moment in moments if moment - now < _LATELY)


def _split(records: Iterable[Receipt | DamagedRecord]) -> tuple[list[Receipt], list[str]]:
    """Part the receipts from the messages about those that cannot be believed."""
    receipts = []
    damaged = []
    for record in records:
        if isinstance(record, DamagedRecord):
            damaged.append(record.message)
        else:
            receipts.append(record)
    return receipts, damaged


def recent_rate(finished: Sequence[datetime], done: int, now: datetime) -> float | None:
    """Chunks per second that were finished lately.

    Args:
        finished: when the chunks of a sample were finished, in ascending order.
        done: number of chunks that the sample was drawn from.
        now: the present time.

    Returns:
        the rate, or None if nothing was finished lately, or too little to tell.
    """
    if len(finished) < 2 or now - finished[-1] > _LATELY:
        return None
    recent = finished[-_RECENT:]
    seconds = (now - recent[0]).total_seconds()
    return (len(recent) - 1) / seconds * done / len(finished) if seconds > 0 else None
