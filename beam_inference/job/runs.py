"""Chunks that are to be done, as runs: those without a receipt, or those that a launch lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from math import ceil

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError, WorkerFault
from beam_inference.foreign_text import clean_text
from beam_inference.geometry.partition import in_runs
from beam_inference.job.chunk_records import list_absent
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.volumes.kvstores import LOCAL, read_file


def missing_runs(
    index_range: tuple[int, int],
    state: State | None,
    length: int,
    *,
    claiming_launch: str | None = None,
) -> Iterator[tuple[int, ...]]:
    """Yield runs of the chunks of an index range that are still to be done.

    The receipts of the range are read: one that cannot be believed does not count. Nor does one of
    a launch that claims, which may do chunks before it comes to list them: their records are due.

    Args:
        index_range: first chunk, and the one after the last.
        state: the job's state folder; None to do all chunks, whatever their receipts say.
        length: chunks of a run, at most.
        claiming_launch: id of the launch that is to do them, if its workers claim stretches of
            ``length`` chunks: runs then lie within these.
    """
    missing = _missing(index_range, state, claiming_launch)
    if claiming_launch is None:
        yield from in_runs(missing, length)
        return
    for _, run in groupby(missing, lambda chunk: chunk // length):
        yield tuple(run)


def runs_of_list(
    url: str, count: int, length: int, storage: Storage = LOCAL
) -> Iterator[tuple[int, ...]]:
    """Yield runs of the chunks that a launch's list names; see :func:`read_chunk_list`."""
    yield from in_runs(read_chunk_list(url, count, storage), length)


def read_chunk_list(url: str, count: int, storage: Storage = LOCAL) -> list[int]:
    """Read the chunks that a launch does, from the list that it wrote into the state folder.

    Args:
        url: URL of the list: indices in ascending order, one a line.
        count: number of the job's chunks.
        storage: settings of the object stores.

    Raises:
        WorkerFault: the list is gone, or not as it was written.
    """
    try:
        chunks = [int(line) for line in read_file(url, storage).split()]
    except (VolumeError, ValueError) as error:
        raise WorkerFault(
            f"cannot read the chunks that this launch is to do: {clean_text(str(error))}"
        ) from None
    if not chunks or not 0 <= chunks[0] <= chunks[-1] < count:
        raise WorkerFault(f"{url} is no list of this job's {count} chunks: run it again")
    return chunks


def _missing(
    index_range: tuple[int, int], state: State | None, own_launch: str | None
) -> Iterator[int]:
    if state is None:
        yield from range(*index_range)
        return

    def list_done(start: int, stop: int) -> Iterable[int]:
        listed = state.receipt_indices(start, stop)
        receipts = state.read_receipts(listed)
        return [receipt.chunk for receipt in receipts if receipt.launch != own_launch]

    yield from list_absent(*index_range, list_done)


SHORT_RUN_SECONDS = 30.0
"""Computing time that a run is to have at least, so that it is no waiting for its first input."""


def default_run_length(chunks: int, workers: int, chunk_seconds: float = 0.0) -> int:
    """Choose the number of chunks per Beam element.

    Enough to overlap reading and computing, few enough to balance the load at the end.

    Args:
        chunks: number of chunks to do.
        workers: workers that run at a time; on this machine each thread is one.
        chunk_seconds: that the network takes for a chunk; 0 where it is not known.
    """
    balanced = min(8, chunks // (16 * workers))
    if chunk_seconds <= 0:
        return max(1, balanced)
    long_enough = ceil(SHORT_RUN_SECONDS / chunk_seconds)
    return max(1, balanced, min(long_enough, chunks // workers))


def run_length_of(job: ResolvedJob, chunks: int, workers: int) -> int:
    """Return the number of chunks in a run: the one that the job states, or a suitable one.

    Args:
        job: the job.
        chunks: number of its chunks that are to be done.
        workers: workers that run at a time.
    """
    seconds = chunk_seconds_of(job)
    return job.config.job.run_length or default_run_length(chunks, workers, seconds)


def chunk_seconds_of(job: ResolvedJob) -> float:
    """Return the seconds that the network takes for a chunk; 0 where it was not tried."""
    plan = job.plan
    return job.patch_seconds * plan.totals.patch_count / plan.chunks.count


LEAST_CLAIMS = 64
"""Stretches that a job is divided into at least, if it has as many chunks: nobody knows how many
will join, and at the end they wait for each other."""

SHORT_CLAIM_SECONDS = 1.0
"""Computing time that a stretch is to have at least, even if they are fewer: a claim takes some
requests, and to wait so long at the end is no loss."""


def claim_length_of(job: ResolvedJob, workers: int) -> int:
    """Return the number of chunks that workers claim at once."""
    count = job.plan.chunks.count
    length = run_length_of(job, count, workers)
    if job.config.job.run_length:
        return length
    seconds = chunk_seconds_of(job)
    worth_it = ceil(SHORT_CLAIM_SECONDS / seconds) if seconds > 0 else 1
    return min(length, max(1, count // LEAST_CLAIMS, worth_it))
