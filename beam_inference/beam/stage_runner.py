"""Run the stages of a :class:`~beam_inference.beam.stages.TaskJob` from start to exit code."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beam_inference.beam.execution import execute, explain
from beam_inference.beam.flags import beam_options, check_options, place_of, workers_of
from beam_inference.beam.progress import Phase, Progress
from beam_inference.beam.stages import ChunkTask, DoStages, TaskJob
from beam_inference.config.storage import Storage
from beam_inference.errors import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    ConfigError,
    StateError,
    WorkerFault,
)
from beam_inference.geometry.partition import index_ranges
from beam_inference.job.state import STATE_FOLDER
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    delete_folder,
    open_kvstore,
    persistently,
)

_NAMED_FAILURES = 10


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What a launch came to.

    Attributes:
        exit_code: 0 complete, 1 failed, 130 interrupted.
        chunks: of all stages. done: how many of them are.
        failures: why chunks could not be done, the first few of each stage.
        seconds: wall time of the pipeline.
        error: what ended the launch early, if anything did.
    """

    exit_code: int
    chunks: int
    done: int
    failures: list[str]
    seconds: float
    error: str | None


def task_job(
    kind: str,
    description: dict[str, Any],
    target: str,
    storage: Storage,
    tasks: Sequence[ChunkTask],
) -> TaskJob:
    """A job whose records are in the state folder of the volume at ``target``, a URL."""
    state_url = f"{target.rstrip('/')}/{STATE_FOLDER}"
    return TaskJob(kind, description, state_url, storage, tuple(tasks), uuid.uuid4().hex[:12])


def check_place(flags: Sequence[str], urls: Sequence[str]) -> None:
    """Refuse what a pipeline with these flags of Beam could not reach where it would run.

    Raises:
        ConfigError: a flag is unknown, its runner cannot be used, or its workers do not see this
            machine's files.
    """
    options = beam_options(flags)
    check_options(options)
    for url in urls:
        if url.startswith("file://") and not place_of(options).shares_files:
            raise ConfigError(
                f"{url} lies on this machine, which remote workers do not see. Use gs:// or s3://."
            )


def begin(job: TaskJob, *, overwrite: bool = False) -> None:
    """Record what is to be made of the target, before anything is: refuses a target of which something else was made.

    ``overwrite`` forgets what was done, of this and any other job of the kind.

    Raises:
        StateError: another job of this kind has begun to write there, or the folder cannot be
            written.
    """
    store = open_kvstore(job.state_url, job.storage)
    try:
        if overwrite:
            delete_folder(store, job.state_url, f"{job.kind}/")
        there = _read(store, job)
        if there.state != "value":
            text = json.dumps(
                {"fingerprint": job.fingerprint, **job.description}, indent=1, sort_keys=True
            )
            generation = there.stamp.generation
            persistently(
                "write",
                f"{job.state_url}/{job.record}",
                lambda: store.write(job.record, text, if_equal=generation).result(
                    timeout=PATIENCE_SECONDS
                ),
            )
        found = _record(_read(store, job))  # a racing launch may have been faster
    except WorkerFault as error:
        raise StateError(f"the state folder of the target cannot be used: {error}") from None
    if found.get("fingerprint") != job.fingerprint:
        description = json.loads(json.dumps(job.description))
        differing = ", ".join(key for key, value in description.items() if found.get(key) != value)
        raise StateError(
            f"{job.state_url}/{job.kind} holds records of another job (what differs: {differing}): "
            "what it has made there would be mixed with this. Use another target, or pass "
            "--overwrite to make everything anew."
        )


def recorded(job: TaskJob) -> TaskJob | None:
    """What was begun before of the same kind and target: this job, or one of another description.

    Raises:
        StateError: its state folder cannot be read.
    """
    found = _looked_up(job)
    if found.state != "value":
        return None
    description = _record(found)
    description.pop("fingerprint", None)
    return replace(job, description=description)


def has_begun(job: TaskJob) -> bool:
    """Whether this very job has begun before.

    Raises:
        StateError: its state folder cannot be read.
    """
    return bool(_record(_looked_up(job)).get("fingerprint") == job.fingerprint)


def _looked_up(job: TaskJob) -> Any:
    try:
        return _read(open_kvstore(job.state_url, job.storage), job)
    except WorkerFault as error:
        raise StateError(f"the state folder of the target cannot be used: {error}") from None


def _read(store: Any, job: TaskJob) -> Any:
    url = f"{job.state_url}/{job.record}"
    return persistently(
        "read", url, lambda: store.read(job.record).result(timeout=PATIENCE_SECONDS)
    )


def _record(found: Any) -> dict[str, Any]:
    """What a record says; nothing if there is none, or it cannot be understood."""
    try:
        record = json.loads(found.value) if found.state == "value" else None
    except ValueError:
        record = None
    return record if isinstance(record, dict) else {}


def run_tasks(job: TaskJob, flags: Sequence[str], voxels_per_chunk: float) -> TaskOutcome:
    """Do what is missing of a job that has begun, if anything is.

    ``flags`` are Beam's, ``voxels_per_chunk`` is for the progress.

    From the main thread, SIGINT and SIGTERM stop it after the chunks under way.
    """
    options = beam_options(flags)
    workers = workers_of(options)
    total = sum(task.count for task in job.tasks)
    ranges = max(len(index_ranges(task.count, workers)) for task in job.tasks)
    done = counting(job)
    start = time.monotonic()
    finished = done()
    interrupted = False
    error = None
    if finished < total:
        interrupted, error = execute(
            options,
            lambda pipeline: pipeline | "Stages" >> DoStages(job, workers),
            ranges,
            Progress(Phase("chunks", total, voxels_per_chunk, done)),
            lambda: job.state().request_stop(job.launch),
        )
        finished = done()
    code = COMPLETE if finished == total else INTERRUPTED if interrupted else FAILED
    return TaskOutcome(
        exit_code=code,
        chunks=total,
        done=finished,
        failures=[] if code == COMPLETE else failures(job),
        seconds=time.monotonic() - start,
        error=None if error is None or code == COMPLETE else explain(error),
    )


def counting(job: TaskJob) -> Callable[[], int]:
    """Tells how many chunks of a job are done by now; what was found complete is not counted again."""
    complete: set[str] = set()

    def done() -> int:
        count = 0
        for task in job.tasks:  # stages behind the one under way have nothing done
            here = task.count if task.name in complete else job.done(task).count(0, task.count)
            count += here
            if here < task.count:
                break
            complete.add(task.name)
        return count

    return done


def failures(job: TaskJob) -> list[str]:
    """Why chunks of a job could not be done, the first few of each stage."""
    told = []
    for task in job.tasks:
        failed = job.failed(task)
        some = failed.few_indices(0, task.count)[: 10 * _NAMED_FAILURES]
        done = {json.loads(text)["chunk"] for _, text in job.done(task).read(some)}
        some = [index for index in some if index not in done][:_NAMED_FAILURES]
        records = [json.loads(text) for _, text in failed.read(some)]
        told += [f"{task.name}, chunk {record['chunk']}: {record['cause']}" for record in records]
    return told


def print_task_outcome(outcome: TaskOutcome, made: str, again: str) -> None:
    """What a launch came to; ``made`` is what is there now if it is complete, ``again`` the command that goes on."""
    if outcome.error:
        print(f"the launch ended early: {outcome.error}")
    print(f"{outcome.done} of {outcome.chunks} chunks done, in {outcome.seconds:.1f} s")
    for line in outcome.failures:
        print(f"failed: {line}")
    print(
        f"complete: {made}" if outcome.exit_code == COMPLETE else f"to do what is missing: {again}"
    )
