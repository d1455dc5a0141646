"""Run a job from start to exit code: pipeline options, progress, signals, and the judgement at the end.

What a job came to is judged from its receipts and quarantine records, never from what a runner says.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from types import FrameType

import apache_beam as beam
from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions
from apache_beam.runners.runner import PipelineResult

from beam_inference import pipeline as job_pipeline
from beam_inference.beam_flags import beam_options, check_options, has_no_workers, place_of, with_partitions, workers_of
from beam_inference.config import JobConfig
from beam_inference.elements import Launch
from beam_inference.errors import (
    COMPLETE,
    COMPLETE_BUT_QUARANTINED,
    FAILED,
    INTERRUPTED,
    BeamInferenceError,
    WorkerFault,
)
from beam_inference.launch import prepare
from beam_inference.plan import index_ranges
from beam_inference.progress import Progress
from beam_inference.resolved_job import ResolvedJob
from beam_inference.runs import chunks_of_file
from beam_inference.seam_files import SeamFiles
from beam_inference.state import LaunchSummary, QuarantineRecord, State
from beam_inference.survey import check_paths

logger = logging.getLogger(__name__)

_LAST_CHUNKS_SECONDS = 10


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What a launch came to.

    Attributes:
        exit_code: 0 complete, 1 failed, 3 finished with quarantined chunks within the bound, 130 interrupted.
        chunks: how many were to be done: all of the job's, or those of the chunks file.
        done: how many of them have a receipt.
        missing_of_job: chunks of the whole job without a receipt, also those that were not to be done.
        quarantined: those that could not be done.
        summary: what this launch's workers did; None if it did not reach its end.
        seconds: wall time of the pipeline.
        error: what ended the launch early, if anything did.
        staged_at: where the pipeline was put for another to run (``--template_location``), instead of running it.
    """

    exit_code: int
    chunks: int
    done: int
    missing_of_job: int
    quarantined: list[QuarantineRecord]
    summary: LaunchSummary | None
    seconds: float
    error: str | None
    staged_at: str | None = None

    @property
    def missing(self) -> int:
        """Chunks with neither receipt nor quarantine record."""
        return self.chunks - self.done - len(self.quarantined)


def run_job(
    config: JobConfig,
    flags: Sequence[str] = (),
    *,
    chunks_file: str | None = None,
    sample: tuple[float, int] | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
) -> JobOutcome:
    """Check a job, run it to its end, and judge it.

    ``flags`` are Beam's command-line flags; ``chunks_file`` is a path or URL of a quarantine file or of chunk indices,
    one a line, to do these only; ``sample`` is a share of the chunks and a seed, likewise; ``overwrite`` deletes an
    earlier launch's state first.

    From the main thread, SIGINT and SIGTERM stop the launch after the chunks under way.

    Raises:
        UserError: something is wrong with the job; nothing was created.
    """
    options = beam_options(flags)
    check_paths(config, place_of(options), chunks_file)  # before what follows asks services for their buckets
    check_options(options)
    workers = workers_of(options)
    launch = prepare(
        config,
        place_of(options),
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        chunks_file=chunks_file,
        sample=sample,
        workers=workers,
    )
    job, state = launch.resolved(), launch.state()
    file = launch.chunks_file
    chosen = chunks_of_file(file, job.fingerprint, job.plan.chunks.count, config.storage) if file else None
    start = time.monotonic()
    interrupted, error = _execute(options, workers, launch, job, state, chosen)
    outcome = _judge(job, state, launch, chosen, interrupted, error, time.monotonic() - start)
    staged_at = options.view_as(GoogleCloudOptions).template_location
    if staged_at and not interrupted and error is None:
        return replace(outcome, exit_code=COMPLETE, staged_at=staged_at)
    return outcome


def _execute(
    options: PipelineOptions,
    workers: int,
    launch: Launch,
    job: ResolvedJob,
    state: State,
    chosen: list[int] | None,
) -> tuple[bool, BaseException | None]:
    """Run the pipeline on a thread of its own, while this one shows progress and listens for signals."""
    failures: list[BaseException] = []
    results: list[PipelineResult] = []

    def run() -> None:
        try:
            ranges = index_ranges(job.plan.chunks.count, workers)
            pipeline = beam.Pipeline(options=with_partitions(options, len(ranges)))
            job_pipeline.build(pipeline, launch, workers)
            result = pipeline.run()
            results.append(result)
            try:
                result.wait_until_finish()
                if any(future.status != "finished" for future in getattr(result, "futures", [])):
                    raise WorkerFault("the Dask cluster was lost, or did not finish the work")
            finally:
                if hasattr(result, "client"):  # of a Dask cluster: it would look for its scheduler for ever
                    result.client.close()
        except BaseException as failure:  # whatever it is, it is told of in the main thread
            failures.append(failure)

    thread = threading.Thread(target=run, name="pipeline", daemon=True)
    stop = threading.Event()
    asked, asked_at = False, 0.0
    with (
        _signals(stop),
        Progress(job, lambda: _computed(state, job, chosen), len(chosen) if chosen else None) as progress,
        redirect_stderr(_ToLog()),
    ):
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if stop.is_set() and not asked:
                asked = True
                progress.say(
                    "stopping: no further chunk is started, writes under way are finished (once more: end at once)"
                )
                _ask_to_stop(state, launch)
                asked_at = time.monotonic()
            if asked and time.monotonic() > asked_at + _LAST_CHUNKS_SECONDS and any(map(has_no_workers, results)):
                results.pop().cancel()  # a terminal's Ctrl-C reaches workers that it has started, too
            progress.update()
    return asked, failures[0] if failures else None


def _ask_to_stop(state: State, launch: Launch) -> None:
    try:
        state.request_stop(launch.id)
    except BeamInferenceError as error:
        logger.warning("cannot ask the workers to stop, they go on to their end: %s", error)


class _ToLog(io.TextIOBase):
    """Beam's local runner prints the stack of every exception to standard error; we tell of it once, as a message."""

    _within = threading.local()

    def write(self, text: str) -> int:
        """To the log, where --debug shows it; but not what the log itself says when it cannot be written."""
        if text.strip() and not getattr(self._within, "log", False):
            self._within.log = True
            try:
                logger.debug("%s", text.rstrip())
            finally:
                self._within.log = False
        return len(text)


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set ``stop``; a second one ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(INTERRUPTED)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _computed(state: State, job: ResolvedJob, chosen: list[int] | None) -> int:
    """How many of the chunks to do have their patches computed, which with ``seams: exchange`` is most of the work."""
    done = _done(state, job, chosen)
    if chosen is not None or job.plan.seams != "exchange" or done == job.plan.chunks.count:
        return done
    count = job.plan.chunks.count
    return max(done, min(count - 1, state.count_sums(0, count) * count // job.plan.owners))


def _done(state: State, job: ResolvedJob, chosen: list[int] | None) -> int:
    """How many of the chunks to do have a receipt."""
    if chosen is not None:
        return len(state.read_receipts(chosen))
    return state.count_receipts(0, job.plan.chunks.count)


def _judge(
    job: ResolvedJob,
    state: State,
    launch: Launch,
    chosen: list[int] | None,
    interrupted: bool,
    error: BaseException | None,
    seconds: float,
) -> JobOutcome:
    everywhere = list(state.quarantined(0, job.plan.chunks.count))
    try:
        state.write_quarantine_file(everywhere)
    except BeamInferenceError as failure:
        error = error or failure  # what ended the launch is what is told
    if job.plan.seams == "exchange" and state.count_receipts(0, job.plan.chunks.count) == job.plan.chunks.count:
        SeamFiles(state.url, job.config.storage, job.fingerprint).forget_all()  # of chunks done without them, if any
    quarantined = everywhere if chosen is None else [r for r in everywhere if r.chunk in set(chosen)]
    chunks = job.plan.chunks.count if chosen is None else len(chosen)
    done_of_job = _done(state, job, None)
    done = done_of_job if chosen is None else _done(state, job, chosen)
    bound = job.config.job.max_failed_chunks
    if done == chunks:
        code = COMPLETE
    elif interrupted:
        code = INTERRUPTED
    elif error is not None or done + len(quarantined) < chunks or (bound is not None and len(quarantined) > bound):
        code = FAILED
    else:
        code = COMPLETE_BUT_QUARANTINED
    told = None if error is None or code == COMPLETE else explain(error)
    return JobOutcome(
        exit_code=code,
        chunks=chunks,
        done=done,
        missing_of_job=job.plan.chunks.count - done_of_job,
        quarantined=quarantined,
        summary=state.read_summary(launch.id),
        seconds=seconds,
        error=told,
    )


def explain(error: BaseException) -> str:
    """The message of our own error inside what a runner made of it; else the last line of that."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BeamInferenceError):
            break
        seen = seen.__cause__ or seen.__context__
    text = str(seen if seen is not None else error).strip()
    if "Channel closed prematurely" in text:
        return "a worker process died (killed, or out of memory); its runner does not start another"
    own = re.findall(r"beam_inference\.\w+\.\w+: (.+)", text)
    text = text.removesuffix("Error:\nNone").strip()  # Dataflow's, where the job's log says nothing
    lines = (own[-1:] or text.splitlines() or [type(error).__name__])[-1:]
    return re.sub(r"\s*\[?while running '[^']*'\]?", "", lines[0] if own else text if seen is not None else lines[0])
