"""The stages of a :class:`~beam_inference.job.stage_job.StageJob`, as Beam transforms."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam
from apache_beam.pvalue import PBegin, PCollection
from apache_beam.utils import shared

from beam_inference.beam.dask_workers import stop_sampling
from beam_inference.errors import TransientReadError, WorkerFault
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.partition import index_ranges
from beam_inference.job.ownership import check_records
from beam_inference.job.runs import default_run_length
from beam_inference.job.stage_job import ChunkStage, StageJob
from beam_inference.job.state import StopRequest
from beam_inference.volumes.backoff import retry_with_backoff
from beam_inference.volumes.volume import TransientWriteError

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts at a chunk inside a worker, after errors that may be transient."""


class StageWorker:
    """Stores and functions that one process needs to do chunks of a stage."""

    def __init__(self, job: StageJob, stage: ChunkStage) -> None:
        self._job = job
        self._stage = stage
        self._done = job.done_entries(stage)
        self._failed = job.failed_entries(stage)
        self._should_stop = StopRequest(job.state(), job.launch)
        self._do = stage.make_worker()

    def do(self, indices: Sequence[int]) -> int:
        """Do chunks, and record each once it is durable.

        Returns:
            number of the chunks that failed, or were not begun.

        Raises:
            WorkerFault: this process cannot go on.
        """
        unfinished = 0
        # an earlier attempt at a bundle may have done some
        done = self._job.done_chunks(self._stage, indices)
        remaining = [index for index in indices if index not in done]
        for position, index in enumerate(remaining):
            if self._should_stop():
                return unfinished + len(remaining) - position
            check_records(self._job)
            start = time.perf_counter()
            try:
                retry_with_backoff(_is_transient, attempts=ATTEMPTS)(self._do, index)
            except WorkerFault:
                raise
            except Exception as error:
                cause = describe_error(error, with_type=False)
                logger.warning("%s: chunk %d cannot be done: %s", self._stage.name, index, cause)
                self._failed.write(index, self._record(index, cause=cause))
                unfinished += 1
            else:
                seconds = time.perf_counter() - start
                self._done.write(index, self._record(index, seconds=seconds))
        return unfinished

    def _record(self, index: int, **more: object) -> str:
        """A record of a chunk, which says of which stage of which job."""
        return json.dumps({**self._job.names_of(self._stage), "chunk": index, **more})


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, (TransientReadError, TransientWriteError))


class DoStages(beam.PTransform):
    """The stages of a job, applied to a pipeline; the output is one number, 0 if all is done.

    The number counts the chunks of the last stage begun that are not done. Between two stages
    stands a sum over all of the first one, which no runner has before that stage is through. A
    stage after an unfinished one does nothing. Applied to a PCollection of one such number, the
    first stage does nothing unless that is 0.

    Args:
        job: the stages and their records.
        workers: estimated number of workers.
    """

    def __init__(self, job: StageJob, workers: int = 1) -> None:
        super().__init__()
        self._job = job
        self._workers = workers

    def expand(self, begin: PBegin | PCollection[int]) -> PCollection[int]:
        """Chain the stages."""
        unfinished = (
            begin if isinstance(begin, PCollection) else begin | "Begin" >> beam.Create([0])
        )
        for number, stage in enumerate(self._job.stages):
            ranges = index_ranges(stage.count, self._workers)
            length = default_run_length(stage.count, self._workers)
            name = f"{number} {stage.name}"
            unfinished = (
                unfinished
                | f"Ranges {name}"
                >> beam.FlatMap(_ranges_if_complete, ranges).with_output_types(tuple[int, int])
                | f"Spread ranges {name}" >> beam.Reshuffle()
                | f"Missing {name}" >> beam.FlatMap(_missing_runs, self._job, number, length)
                | f"Spread runs {name}" >> beam.Reshuffle()
                | f"Do {name}" >> beam.ParDo(_DoRun(self._job, number))
                | f"Unfinished {name}" >> beam.CombineGlobally(sum)
            )
        return unfinished


_UNFINISHED = -1
"""First item of an element that carries, through all later stages, how many chunks are not done."""


def _ranges_if_complete(
    unfinished: int, ranges: list[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    return [(_UNFINISHED, unfinished)] if unfinished else ranges


def _missing_runs(
    index_range: tuple[int, int], job: StageJob, number: int, length: int
) -> Iterator[tuple[int, ...]]:
    if index_range[0] == _UNFINISHED:
        return iter([index_range])
    return job.missing_runs(job.stages[number], index_range, length)


class _DoRun(beam.DoFn):
    """Plain method: :meth:`StageWorker.do`."""

    def __init__(self, job: StageJob, number: int) -> None:
        self._job = job
        self._number = number
        self._shared = shared.Shared()

    def setup(self) -> None:
        """Set this process, once."""
        stop_sampling()

    def process(self, run: tuple[int, ...]) -> Iterator[int]:
        """Do the chunks of a run; the first run of a process opens what the stage needs."""
        yield run[1] if run[0] == _UNFINISHED else self._worker().do(run)

    def _worker(self) -> StageWorker:
        job = self._job
        stage = self._job.stages[self._number]
        worker: StageWorker = self._shared.acquire(
            lambda: StageWorker(job, stage), tag=f"{job.launch} {stage.name}"
        )
        return worker
