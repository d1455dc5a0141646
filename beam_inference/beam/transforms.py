"""Beam transforms for inference.

Each has a plain function or method that does the same without Beam. Elements are runs, which are
tuples of a few chunk indices: arrays never enter a PCollection.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal
from zlib import crc32

import apache_beam as beam
from apache_beam.coders import Coder
from apache_beam.coders.typecoders import registry
from apache_beam.metrics.metric import Metrics
from apache_beam.pvalue import PBegin, PCollection
from apache_beam.transforms.combiners import Count
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils import shared

from beam_inference.beam.dask_workers import stop_sampling
from beam_inference.environment import use_one_heap
from beam_inference.errors import Stage, WorkerFault
from beam_inference.geometry.partition import in_runs, index_ranges
from beam_inference.geometry.zyx import ceil_div
from beam_inference.job.messages import Launch, Record, check_versions
from beam_inference.job.runs import missing_runs, run_length_of, runs_of_list
from beam_inference.worker.worker import Worker

Run = tuple[int, ...]
InputKind = Literal["signal", "chunks"]


class RecordCoder(Coder):
    """Encodes a :class:`~beam_inference.job.messages.Record` as JSON, without pickle."""

    def encode(self, value: Record) -> bytes:
        """Encode one record."""
        return json.dumps(dataclasses.asdict(value), sort_keys=True).encode()

    def decode(self, encoded: bytes) -> Record:
        """Decode one record."""
        return Record(**json.loads(encoded))

    def is_deterministic(self) -> bool:
        """Return True: equal records have equal bytes."""
        return True

    def to_type_hint(self) -> type[Record]:
        """Return the type of the elements."""
        return Record


registry.register_coder(Record, RecordCoder)


def run_length(launch: Launch, workers: int) -> int:
    """Return the number of chunks in a run of a launch.

    Args:
        launch: the launch.
        workers: see :class:`GenerateRuns`.
    """
    if launch.claim_length is not None:
        return launch.claim_length
    start, stop = launch.chunk_range
    return run_length_of(launch.read_job(), stop - start, workers)


def launch_ranges(launch: Launch, workers: int) -> list[tuple[int, int]]:
    """Return the ranges of chunks that a launch begins with: of its shard, or of the whole job.

    Args:
        launch: the launch.
        workers: see :class:`GenerateRuns`.
    """
    length = launch.claim_length
    if length is not None:
        return _claimed_ranges(launch, workers, length)
    start, stop = launch.chunk_range
    ranges = index_ranges(stop - start, workers, run_length(launch, workers))
    return [(start + first, start + last) for first, last in ranges]


def _claimed_ranges(launch: Launch, workers: int, length: int) -> list[tuple[int, int]]:
    """Ranges of whole stretches that workers claim; launches begin with different ones."""
    count = launch.read_job().plan.chunks.count
    ranges = index_ranges(ceil_div(count, length), workers)
    first = crc32(launch.id.encode()) % len(ranges)
    return [
        (start * length, min(count, stop * length))
        for start, stop in ranges[first:] + ranges[:first]
    ]


class GenerateRuns(beam.PTransform):
    """Runs of the chunks to be done, spread over the workers.

    The graph holds a few hundred index ranges at most, whatever the number of chunks. The workers
    expand them: each lists the receipts in its range and emits the chunks that have none.

    Plain functions: :func:`beam_inference.job.runs.missing_runs`,
    :func:`beam_inference.job.runs.runs_of_list`.

    Args:
        launch: the launch.
        workers: estimated number of workers; the more, the shorter the runs.
        input_kind: meaning of a PCollection to which this is applied, see :class:`InferVolume`.
    """

    def __init__(
        self, launch: Launch, workers: int = 1, *, input_kind: InputKind = "signal"
    ) -> None:
        super().__init__()
        self._launch = launch
        self._workers = workers
        self._input_kind = input_kind

    def expand(self, source: PBegin | PCollection[object]) -> PCollection[Run]:
        """Turn the pipeline's begin, a signal or chunk indices into runs."""
        if self._input_kind == "chunks":
            return self._runs_of_indices(source)
        job = self._launch.read_job()
        count = job.plan.chunks.count
        length = run_length(self._launch, self._workers)
        if self._launch.chunk_list is None:
            ranges = launch_ranges(self._launch, self._workers)
            runs = (
                source
                | "IndexRanges" >> _CreateAfter(ranges)
                | "MissingRuns"
                >> beam.FlatMap(runs_of_range, self._launch, length).with_output_types(Run)
            )
        else:
            runs = (
                source
                | "ChunkList" >> _CreateAfter([self._launch.chunk_list])
                | "RunsOfList"
                >> beam.FlatMap(runs_of_list, count, length, job.config.storage).with_output_types(
                    Run
                )
            )
        return runs | beam.Reshuffle()

    def _runs_of_indices(self, indices: PBegin | PCollection[object]) -> PCollection[Run]:
        if not isinstance(indices, PCollection):
            raise TypeError('input_kind="chunks" needs a PCollection of chunk indices')
        count = self._launch.read_job().plan.chunks.count
        length = run_length(self._launch, self._workers)
        return (
            indices
            | "Global" >> beam.WindowInto(GlobalWindows())
            | "RunNumber"
            >> beam.Map(_with_run_number, count, length).with_output_types(tuple[int, int])
            | "GroupRuns" >> beam.GroupByKey()
            | "Runs" >> beam.FlatMap(_distinct_run, length).with_output_types(Run)
        )


class _CreateAfter(beam.PTransform):
    """Creates values, after every element of a PCollection is there if it is applied to one."""

    def __init__(self, values: Sequence[object]) -> None:
        super().__init__()
        self._values = values

    def expand(self, source: PBegin | PCollection[object]) -> PCollection[object]:
        if not isinstance(source, PCollection):
            return source | beam.Create(self._values)
        # A runner has the count of a whole PCollection only when all of it is there.
        return (
            source
            | "Global" >> beam.WindowInto(GlobalWindows())
            | "Wait" >> Count.Globally()
            | "Then" >> beam.FlatMap(_instead, self._values)
            | "Spread" >> beam.Reshuffle()
        )


def _instead(_: int, values: Sequence[object]) -> Sequence[object]:
    return values


def _with_run_number(index: int, count: int, length: int) -> tuple[int, int]:
    if not 0 <= index < count:
        raise WorkerFault(f"there is no chunk {index}, only 0 … {count - 1}")
    return index // length, index


def _distinct_run(run: tuple[int, Iterable[int]], length: int) -> Iterator[Run]:
    return in_runs(sorted(set(run[1])), length)


def runs_of_range(index_range: tuple[int, int], launch: Launch, length: int) -> Iterator[Run]:
    """Yield the runs of a launch's chunks of a range that are to be done."""
    state = launch.state() if launch.honour_receipts else None
    claiming = None if launch.claim_length is None else launch.id
    return missing_runs(index_range, state, length, claiming_launch=claiming)


class _WorkerDoFn(beam.DoFn):
    """Base of the DoFns that use their process's worker; only its WorkerFaults reach the runner."""

    def __init__(self, launch: Launch, handle: shared.Shared | None = None) -> None:
        self._launch = launch
        # Shared keeps a single object alive per process. With one handle in several DoFns, they
        # have one worker: one network, one set of stores and one lock.
        self._shared = handle or shared.Shared()

    def setup(self) -> None:
        """Open stores and network, once per process."""
        use_one_heap()
        stop_sampling()
        check_versions(self._launch.versions)
        self._worker: Worker = self._shared.acquire(
            lambda: Worker(self._launch), tag=self._launch.id
        )


class InferChunks(_WorkerDoFn):
    """Processes runs: the element is a run, the output one record per chunk.

    Plain method: :meth:`beam_inference.worker.worker.Worker.infer_chunks`.
    """

    def process(self, run: Run) -> Iterator[Record]:
        """Process the chunks of a run; a record is emitted once its chunk is durable."""
        for record in self._worker.infer_chunks(run):
            count_record(record)
            yield record


class SumChunks(_WorkerDoFn):
    """First stage of ``strategy: exchange``: from a run to its chunks, keyed by run.

    Plain method: :meth:`beam_inference.worker.worker.Worker.sum_chunks`.

    Args:
        launch: the launch.
        length: chunks of a run of the second stage.
        handle: holds the worker of the process; None for one of its own.
    """

    def __init__(self, launch: Launch, length: int, handle: shared.Shared | None = None) -> None:
        super().__init__(launch, handle)
        self._length = length

    def process(self, run: Run) -> Iterator[tuple[int, int]]:
        """Compute the patches that a run's chunks own, then emit those without a receipt."""
        for record in self._worker.sum_chunks(run):
            if record.outcome == "summed":  # the second stage reports all other outcomes
                count_record(record)
        for chunk in self._worker.waiting_chunks(run):
            yield chunk // self._length, chunk


class SumShard(_WorkerDoFn):
    """First stage of ``strategy: exchange``, where other launches do the second: only records.

    Plain method: :meth:`beam_inference.worker.worker.Worker.sum_chunks`.
    """

    def process(self, run: Run) -> Iterator[Record]:
        """Compute the patches that a run's chunks own."""
        for record in self._worker.sum_chunks(run):
            count_record(record)
            yield record


class MergeSeams(_WorkerDoFn):
    """Second stage: from a key and its chunks, which may repeat, to one record per chunk.

    Plain method: :meth:`beam_inference.worker.worker.Worker.merge_seams`.
    """

    def process(self, run: tuple[int, Iterable[int]]) -> Iterator[Record]:
        """Finish chunks; a record is emitted once its chunk is durable."""
        for record in self._worker.merge_seams(sorted(set(run[1]))):
            count_record(record)
            yield record


def count_record(record: Record) -> None:
    """Update Beam's metrics, which a runner may not keep: only receipts prove what is done."""
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
    """A whole job: one :class:`~beam_inference.job.messages.Record` per chunk that is to be done.

    It is applied to a pipeline, or to a PCollection:

    - with ``input_kind="signal"`` the job begins once every element of the PCollection is there;
      the elements themselves do not matter. So one job can read what another one has written;
    - with ``input_kind="chunks"`` the elements are indices of the chunks to do, in any order and
      possibly repeated. As with a file of chunks, each is computed without its neighbours, and
      those that have a receipt are skipped.

    Args:
        launch: from :func:`beam_inference.prepare`.
        workers: see :class:`GenerateRuns`.
        input_kind: meaning of a PCollection to which this is applied.
    """

    def __init__(
        self, launch: Launch, workers: int = 1, *, input_kind: InputKind = "signal"
    ) -> None:
        super().__init__()
        self._launch = launch
        self._workers = workers
        self._input_kind = input_kind

    def expand(self, source: PBegin | PCollection[object]) -> PCollection[Record]:
        """Turn the pipeline's begin, a signal or chunk indices into records."""
        launch = self._launch
        runs = source | GenerateRuns(launch, self._workers, input_kind=self._input_kind)
        # Chunks that are done alone are computed without their neighbours, which may never be done.
        is_alone = launch.chunk_list is not None or self._input_kind == "chunks"
        if launch.read_job().plan.exchange is None or is_alone:
            return runs | "InferChunks" >> beam.ParDo(InferChunks(launch)).with_output_types(Record)
        if launch.shard is not None:
            return runs | "SumShard" >> beam.ParDo(SumShard(launch)).with_output_types(Record)
        length = run_length(launch, self._workers)
        handle = shared.Shared()
        return (
            runs
            | "SumChunks"
            >> beam.ParDo(SumChunks(launch, length, handle)).with_output_types(tuple[int, int])
            | "Neighbours" >> beam.GroupByKey()
            | "MergeSeams" >> beam.ParDo(MergeSeams(launch, handle)).with_output_types(Record)
        )
