"""Beam transforms for jobs of several volumes: one pipeline deals the runs of all.

An element is the name of a volume with a run of its chunks. Volumes are done in one of two chains,
by their strategies; both share the workers of a process, and so its network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from zlib import crc32

import apache_beam as beam
from apache_beam.pvalue import PBegin, PCollection
from apache_beam.utils import shared

from beam_inference.beam.dask_workers import stop_sampling
from beam_inference.beam.transforms import (
    Run,
    count_record,
    launch_ranges,
    run_length,
    runs_of_range,
)
from beam_inference.environment import use_one_heap
from beam_inference.job.cohort import CohortLaunch
from beam_inference.job.messages import check_versions
from beam_inference.worker.volume_workers import VolumeWorkers

VolumeRun = tuple[str, Run]
VolumeOutcome = tuple[str, str]
VolumeKey = tuple[str, int]


def volume_runs(name: str, launch: CohortLaunch, workers: int) -> Iterator[VolumeRun]:
    """Yield the runs of a volume's chunks that are to be done, as the first step deals them.

    Args:
        name: of the volume.
        launch: the launch.
        workers: worker processes that run at a time, as far as known.
    """
    single = launch.of_volume(name)
    length = run_length(single, workers)
    for index_range in launch_ranges(single, workers):
        for run in runs_of_range(index_range, single, length):
            yield name, run


def in_order_of(launch: str, names: Sequence[str]) -> list[str]:
    """Return the volumes as a launch begins them: launches of one job begin with different ones."""
    first = crc32(launch.encode()) % max(1, len(names))
    return [*names[first:], *names[:first]]


class _VolumesDoFn(beam.DoFn):
    """Base of the DoFns that use their process's workers."""

    def __init__(self, launch: CohortLaunch, handle: shared.Shared) -> None:
        self._launch = launch
        # With one handle in all DoFns, they have one network and one lock.
        self._shared = handle

    def setup(self) -> None:
        """Prepare for volumes, once per process."""
        use_one_heap()
        stop_sampling()
        check_versions(self._launch.versions)
        self._workers: VolumeWorkers = self._shared.acquire(
            lambda: VolumeWorkers(self._launch), tag=self._launch.id
        )


class InferVolumeChunks(_VolumesDoFn):
    """Processes runs: the output is one outcome per chunk.

    Plain method: :meth:`beam_inference.worker.worker.Worker.infer_chunks`.
    """

    def process(self, element: VolumeRun) -> Iterator[VolumeOutcome]:
        """Process the chunks of a run; an outcome is emitted once its chunk is durable."""
        name, run = element
        worker = self._workers.find_worker(name)
        for record in () if worker is None else worker.infer_chunks(run):
            count_record(record)
            yield name, record.outcome


class SumVolumeChunks(_VolumesDoFn):
    """First stage of ``strategy: exchange``: from a run to its chunks, keyed by volume and run.

    Plain method: :meth:`beam_inference.worker.worker.Worker.sum_chunks`.
    """

    def __init__(self, launch: CohortLaunch, handle: shared.Shared, workers: int) -> None:
        super().__init__(launch, handle)
        self._number = workers

    def process(self, element: VolumeRun) -> Iterator[tuple[VolumeKey, int]]:
        """Compute the patches that a run's chunks own, then emit those without a receipt."""
        name, run = element
        worker = self._workers.find_worker(name)
        if worker is None:
            return
        for record in worker.sum_chunks(run):
            if record.outcome == "summed":  # the second stage reports all other outcomes
                count_record(record)
        length = run_length(self._launch.of_volume(name), self._number)
        for chunk in worker.waiting_chunks(run):
            yield (name, chunk // length), chunk


class MergeVolumeSeams(_VolumesDoFn):
    """Second stage: from a key and its chunks, which may repeat, to one outcome per chunk.

    Plain method: :meth:`beam_inference.worker.worker.Worker.merge_seams`.
    """

    def process(self, element: tuple[VolumeKey, Iterable[int]]) -> Iterator[VolumeOutcome]:
        """Finish chunks; an outcome is emitted once its chunk is durable."""
        (name, _), chunks = element
        worker = self._workers.find_worker(name)
        for record in () if worker is None else worker.merge_seams(sorted(set(chunks))):
            count_record(record)
            yield name, record.outcome


class InferVolumes(beam.PTransform):
    """A job of several volumes: a volume's name and an outcome for each chunk that is to be done.

    Args:
        launch: the launch.
        exchanging: the volumes that are to be done, by name, and whether by ``strategy: exchange``.
        workers: worker processes that run at a time, as far as known.
    """

    def __init__(
        self, launch: CohortLaunch, exchanging: Mapping[str, bool], workers: int = 1
    ) -> None:
        super().__init__()
        self._launch = launch
        self._exchanging = exchanging
        self._workers = workers

    def expand(self, begin: PBegin) -> PCollection[VolumeOutcome]:
        """Turn the pipeline's begin into outcomes."""
        launch = self._launch
        handle = shared.Shared()
        alone = [name for name, exchanges in self._exchanging.items() if not exchanges]
        exchanging = [name for name, exchanges in self._exchanging.items() if exchanges]
        chains = []
        if alone:
            chains.append(
                self._deal_runs(begin, "Runs", alone)
                | "InferChunks"
                >> beam.ParDo(InferVolumeChunks(launch, handle)).with_output_types(VolumeOutcome)
            )
        if exchanging:
            chains.append(
                self._deal_runs(begin, "RunsThatExchange", exchanging)
                | "SumChunks"
                >> beam.ParDo(SumVolumeChunks(launch, handle, self._workers)).with_output_types(
                    tuple[VolumeKey, int]
                )
                | "Neighbours" >> beam.GroupByKey()
                | "MergeSeams"
                >> beam.ParDo(MergeVolumeSeams(launch, handle)).with_output_types(VolumeOutcome)
            )
        return chains[0] if len(chains) == 1 else chains | beam.Flatten()

    def _deal_runs(self, begin: PBegin, label: str, names: Sequence[str]) -> PCollection[VolumeRun]:
        return (
            begin
            | f"{label}.Volumes" >> beam.Create(in_order_of(self._launch.id, names))
            | f"{label}.SpreadVolumes" >> beam.Reshuffle()
            | f"{label}.Missing"
            >> beam.FlatMap(volume_runs, self._launch, self._workers).with_output_types(VolumeRun)
            | f"{label}.Spread" >> beam.Reshuffle()
        )
