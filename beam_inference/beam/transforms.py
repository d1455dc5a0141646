"""The Beam transforms: wiring only. Each has a plain function or method, without Beam, that does the same.

Elements are runs, tuples of a few chunk indices: arrays never enter a PCollection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apache_beam as beam
from apache_beam.metrics.metric import Metrics
from apache_beam.pvalue import PBegin, PCollection
from apache_beam.utils import shared

from beam_inference.environment import use_one_heap
from beam_inference.errors import Stage
from beam_inference.geometry.partition import default_run_length, index_ranges
from beam_inference.job.messages import Launch, Record
from beam_inference.job.runs import missing_runs, runs_of_file
from beam_inference.worker.worker import Worker

Run = tuple[int, ...]


def _run_length(launch: Launch, workers: int) -> int:
    job = launch.resolved()
    return job.config.job.run_length or default_run_length(job.plan.chunks.count, workers)


class GenerateRuns(beam.PTransform):
    """Runs of the chunks that are to be done, spread over the workers.

    The graph holds a few hundred index ranges at most, whatever the number of chunks: they are
        expanded on the workers, which list their own range's receipts and emit what is missing.

    Plain functions: :func:`beam_inference.job.runs.missing_runs`,
        :func:`beam_inference.job.runs.runs_of_file`.

    Args:
        launch: the launch.
        workers: how many work at a time, as far as known; the more, the shorter the runs.
    """

    def __init__(self, launch: Launch, workers: int = 1) -> None:
        super().__init__()
        self._launch = launch
        self._workers = workers

    def expand(self, begin: PBegin) -> PCollection[Run]:
        """From the pipeline's begin to runs."""
        job = self._launch.resolved()
        count = job.plan.chunks.count
        length = _run_length(self._launch, self._workers)
        if self._launch.chunks_file is None:
            runs = (
                begin
                | "IndexRanges" >> beam.Create(index_ranges(count, self._workers))
                | "MissingRuns"
                >> beam.FlatMap(_missing_runs, self._launch, length).with_output_types(Run)
            )
        else:
            runs = (
                begin
                | "ChunksFile" >> beam.Create([self._launch.chunks_file])
                | "RunsOfFile"
                >> beam.FlatMap(
                    runs_of_file, job.fingerprint, count, length, job.config.storage
                ).with_output_types(Run)
            )
        return runs | beam.Reshuffle()


def _missing_runs(index_range: tuple[int, int], launch: Launch, length: int) -> Iterator[Run]:
    exchange = launch.resolved().plan.exchange
    receivers = None if exchange is None else exchange.receivers
    return missing_runs(
        index_range, launch.state() if launch.honour_receipts else None, length, receivers
    )


class _OnWorker(beam.DoFn):
    """What needs the process's worker. Only a sick one raises to the runner."""

    def __init__(self, launch: Launch, handle: shared.Shared | None = None) -> None:
        self._launch = launch
        # One handle holds model, stores and lock together: Shared keeps a single object alive per
        # process.
        self._shared = handle or shared.Shared()

    def setup(self) -> None:
        """Open stores and network, once per process."""
        use_one_heap()
        self._worker: Worker = self._shared.acquire(
            lambda: Worker(self._launch), tag=self._launch.id
        )


class InferChunks(_OnWorker):
    """Do runs: element a run, output one :class:`~beam_inference.job.messages.Record` per chunk.

    Plain method: :meth:`beam_inference.worker.worker.Worker.infer_chunks`.
    """

    def process(self, run: Run) -> Iterator[Record]:
        """Do a run's chunks; a record is emitted once its chunk is durable."""
        for record in self._worker.infer_chunks(run):
            _count(record)
            yield record


class SumChunks(_OnWorker):
    """First stage of ``seams: exchange``: element a run; output, keyed by their runs, the chunks that wait for it.

    Plain method: :meth:`beam_inference.worker.worker.Worker.sum_chunks`.

    Args:
        length: chunks of a run of the second stage.
    """

    def __init__(self, launch: Launch, length: int, handle: shared.Shared | None = None) -> None:
        super().__init__(launch, handle)
        self._length = length

    def process(self, run: Run) -> Iterator[tuple[int, int]]:
        """Compute the patches that a run's chunks own; what is emitted waits for no more of this run."""
        for record in self._worker.sum_chunks(run):
            if record.outcome == "summed":  # of others the second stage tells
                _count(record)
        for chunk in self._worker.waiting_chunks(run):
            yield chunk // self._length, chunk


class MergeSeams(_OnWorker):
    """Second stage: element a key and chunks, repeated maybe; output one record per chunk.

    Plain method: :meth:`beam_inference.worker.worker.Worker.merge_seams`.
    """

    def process(self, run: tuple[int, Iterable[int]]) -> Iterator[Record]:
        """Finish chunks; a record is emitted once its chunk is durable."""
        for record in self._worker.merge_seams(sorted(set(run[1]))):
            _count(record)
            yield record


def _count(record: Record) -> None:
    """Beam's metrics: a view, which a runner may not keep. The truth is in the receipts."""
    Metrics.counter("beam_inference", f"chunks_{record.outcome}").inc()
    Metrics.counter("beam_inference", "read_bytes").inc(record.read_bytes)
    Metrics.counter("beam_inference", "written_bytes").inc(record.written_bytes)
    Metrics.counter("beam_inference", "uniform_patches").inc(record.uniform_patches)
    stages: tuple[Stage, ...] = ("read", "infer", "write")
    for stage in stages:
        Metrics.distribution("beam_inference", f"{stage}_msec").update(
            round(1000 * record.seconds.get(stage, 0))
        )


class InferVolume(beam.PTransform):
    """A whole job: from the pipeline's begin to one :class:`~beam_inference.job.messages.Record` per chunk.

    Args:
        launch: from :func:`beam_inference.prepare`.
        workers: see :class:`GenerateRuns`.
    """

    def __init__(self, launch: Launch, workers: int = 1) -> None:
        super().__init__()
        self._launch = launch
        self._workers = workers

    def expand(self, begin: PBegin) -> PCollection[Record]:
        """From the pipeline's begin to records."""
        launch = self._launch
        runs = begin | GenerateRuns(self._launch, self._workers)
        # Some chunks alone are computed without their neighbours, which may never be done.
        if launch.resolved().plan.exchange is None or launch.chunks_file is not None:
            return runs | "InferChunks" >> beam.ParDo(InferChunks(launch))
        length = _run_length(launch, self._workers)
        handle = shared.Shared()
        return (
            runs
            | "SumChunks"
            >> beam.ParDo(SumChunks(launch, length, handle)).with_output_types(tuple[int, int])
            | "Neighbours" >> beam.GroupByKey()
            | "MergeSeams" >> beam.ParDo(MergeSeams(launch, handle))
        )
