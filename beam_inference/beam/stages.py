"""Work on volumes in stages, chunk by chunk, as Beam transforms: conversion, pyramids and segmentation are made of it.

Inference has chunks that own patches, and receipts that prove what was written. These stages are
plainer: each chunk of a stage reads what earlier stages have made complete, and writes whole
blocks. What is done is known from small records
in the state folder of the target, so a job that was killed goes on where it stood::

    KIND/job.json                                               what is made, from what, and its
    fingerprint KIND/FINGERPRINT/STAGE/done/000000000/000000000012.json     chunk 12 is durably done
    KIND/FINGERPRINT/STAGE/failed/000000000/000000000013.json   why 13 could not be; superseded by a
    done record
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import apache_beam as beam
import tenacity
from apache_beam.pvalue import PBegin, PCollection
from apache_beam.utils import shared

from beam_inference.config.storage import Storage
from beam_inference.errors import TransientReadError, WorkerFault
from beam_inference.geometry.partition import default_run_length, in_runs, index_ranges
from beam_inference.job.chunk_records import ChunkEntries, absent
from beam_inference.job.state import State, StopRequest
from beam_inference.volumes.kvstores import open_kvstore
from beam_inference.volumes.volume import TransientWriteError

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Of a chunk, inside a worker, where its trouble may pass."""

DoChunk = Callable[[int], None]


class ChunkTask(Protocol):
    """One stage: a small picklable value."""

    @property
    def name(self) -> str:
        """Of the stage, unique in its job: a word for logs, and for the folder of its records."""

    @property
    def count(self) -> int:
        """Number of its chunks."""

    def opened(self) -> DoChunk:
        """Open what is needed, once per process; what is returned does one chunk, durably, and from several threads.

        A chunk that is done twice, or by two processes at once, must write the same bytes. What it
        raises is its own fault and recorded, but for :class:`~beam_inference.errors.WorkerFault`:
        then the process cannot go on.
        """


@dataclass(frozen=True)
class TaskJob:
    """Stages, each begun once the one before it is complete.

    Attributes:
        kind: "convert", "pyramid", …: what is made of the target.
        description: what determines the bytes that are written, as JSON values.
        state_url: the state folder of the target.
        storage: how that is reached.
        tasks: the stages.
        launch: this launch's own name.
    """

    kind: str
    description: dict[str, Any]
    state_url: str
    storage: Storage
    tasks: tuple[ChunkTask, ...]
    launch: str

    @property
    def fingerprint(self) -> str:
        """Hash of the description: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Where in the state folder this job's records are."""
        return f"{self.kind}/{self.fingerprint[:16]}"

    @property
    def record(self) -> str:
        """Where in the state folder it says what is made."""
        return f"{self.kind}/job.json"

    def state(self) -> State:
        """The state folder; only its launches are this job's concern."""
        return State(self.state_url, self.storage)

    def done(self, task: ChunkTask) -> ChunkEntries:
        """Records of what is done of a stage."""
        return self._entries(task, "done")

    def failed(self, task: ChunkTask) -> ChunkEntries:
        """Records of what could not be done of a stage."""
        return self._entries(task, "failed")

    def _entries(self, task: ChunkTask, which: str) -> ChunkEntries:
        store = open_kvstore(self.state_url, self.storage)
        return ChunkEntries(store, self.state_url, f"{self.folder}/{task.name}/{which}")

    def missing_runs(
        self, task: ChunkTask, index_range: tuple[int, int], length: int
    ) -> Iterator[tuple[int, ...]]:
        """Runs of the chunks of a range that are not done; lists on the way, in bounded memory."""
        yield from in_runs(absent(*index_range, self.done(task).indices), length)


class StageWorker:
    """What one process holds to do chunks of a stage."""

    def __init__(self, job: TaskJob, task: ChunkTask) -> None:
        self._task = task
        self._done = job.done(task)
        self._failed = job.failed(task)
        self._should_stop = StopRequest(job.state(), job.launch)
        self._do = task.opened()

    def do(self, indices: Sequence[int]) -> int:
        """Do chunks, each recorded once it is durable; how many could not be done, or were not begun.

        Raises:
            WorkerFault: this process cannot go on.
        """
        unfinished = 0
        # by a bundle's earlier attempt
        done = {json.loads(text)["chunk"] for _, text in self._done.read(indices)}
        todo = [index for index in indices if index not in done]
        for position, index in enumerate(todo):
            if self._should_stop():
                return unfinished + len(todo) - position
            start = time.perf_counter()
            try:
                _retrying()(self._do, index)
            except WorkerFault:
                raise
            except Exception as error:
                cause = " ".join(str(error).split()) or type(error).__name__
                logger.warning("%s: chunk %d cannot be done: %s", self._task.name, index, cause)
                self._failed.write(index, json.dumps({"chunk": index, "cause": cause[:500]}))
                unfinished += 1
            else:
                self._done.write(
                    index, json.dumps({"chunk": index, "seconds": time.perf_counter() - start})
                )
        return unfinished


def _retrying() -> tenacity.Retrying:
    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(initial=0.1, max=20, jitter=0.2),
        retry=tenacity.retry_if_exception_type((TransientReadError, TransientWriteError)),
        reraise=True,
    )


class DoStages(beam.PTransform):
    """From the pipeline's begin to one number: how many chunks of the last stage begun are not done, 0 if all is done.

    Between two stages stands a sum over the whole of the first, which no runner has before all of
    it is through. A stage after an unfinished one does nothing. What other transforms make before
    the stages is told in the same way: by one number instead of the pipeline's begin, how much of
    it is not done.

    Args:
        job: what is to be done.
        workers: how many work at a time, as far as known.
    """

    def __init__(self, job: TaskJob, workers: int = 1) -> None:
        super().__init__()
        self._job = job
        self._workers = workers

    def expand(self, begin: PBegin | PCollection[int]) -> PCollection[int]:
        """Chain the stages."""
        unfinished = (
            begin if isinstance(begin, PCollection) else begin | "Begin" >> beam.Create([0])
        )
        for number, task in enumerate(self._job.tasks):
            ranges = index_ranges(task.count, self._workers)
            length = default_run_length(task.count, self._workers)
            name = f"{number} {task.name}"
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
"""Instead of a first chunk: what follows is how many chunks an earlier stage left. It passes through all later ones."""


def _ranges_if_complete(
    unfinished: int, ranges: list[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    return [(_UNFINISHED, unfinished)] if unfinished else ranges


def _missing_runs(
    index_range: tuple[int, int], job: TaskJob, number: int, length: int
) -> Iterator[tuple[int, ...]]:
    if index_range[0] == _UNFINISHED:
        return iter([index_range])
    return job.missing_runs(job.tasks[number], index_range, length)


class _DoRun(beam.DoFn):
    """Plain method: :meth:`StageWorker.do`."""

    def __init__(self, job: TaskJob, number: int) -> None:
        self._job = job
        self._number = number
        self._shared = shared.Shared()

    def process(self, run: tuple[int, ...]) -> Iterator[int]:
        """Do the chunks of a run; what the stage needs is opened once per process, and not before there is a chunk."""
        yield run[1] if run[0] == _UNFINISHED else self._worker().do(run)

    def _worker(self) -> StageWorker:
        job = self._job
        task = self._job.tasks[self._number]
        worker: StageWorker = self._shared.acquire(
            lambda: StageWorker(job, task), tag=f"{job.launch} {task.name}"
        )
        return worker
