"""Run a job from start to exit code: pipeline options, progress, signals, and the judgement at the end.

What a job came to is judged from its receipts and quarantine records, never from what a runner
says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from apache_beam.options.pipeline_options import GoogleCloudOptions

from beam_inference.beam.execution import execute, explain
from beam_inference.beam.flags import beam_options, check_options, place_of, workers_of
from beam_inference.beam.progress import Phase, Progress
from beam_inference.beam.stage_runner import StageRecords
from beam_inference.config.job import JobConfig
from beam_inference.errors import (
    COMPLETE,
    COMPLETE_BUT_QUARANTINED,
    FAILED,
    INTERRUPTED,
    BeamInferenceError,
)
from beam_inference.geometry.partition import index_ranges
from beam_inference.job.messages import Launch
from beam_inference.job.records import LaunchSummary, QuarantineRecord
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.runs import chunks_of_file
from beam_inference.job.state import State
from beam_inference.launch import pipeline as job_pipeline
from beam_inference.launch.checks import check_paths
from beam_inference.launch.output_pyramid import (
    PyramidStatus,
    begin_levels,
    check_levels,
    status_of,
)
from beam_inference.launch.prepare import prepare
from beam_inference.pyramid.pyramid import Pyramid
from beam_inference.worker.seam_files import SeamFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What a launch came to.

    Attributes:
        exit_code: 0 complete, also the pyramid if there is one to make; 1 failed, 3 finished with
            quarantined chunks within the bound, 130 interrupted.
        chunks: how many were to be done: all of the job's, or those of the chunks file.
        done: how many of them have a receipt.
        missing_of_job: chunks of the whole job without a receipt, also those that were not to be
            done.
        quarantined: those that could not be done.
        summary: what this launch's workers did; None if it did not reach its end.
        seconds: wall time of the pipeline.
        error: what ended the launch early, if anything did.
        pyramid: how far the output's pyramid is; None if the job has none to make.
        staged_at: where the pipeline was put for another to run (``--template_location``), instead
            of running it.
    """

    exit_code: int
    chunks: int
    done: int
    missing_of_job: int
    quarantined: list[QuarantineRecord]
    summary: LaunchSummary | None
    seconds: float
    error: str | None
    pyramid: PyramidStatus | None = None
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

    ``flags`` are Beam's command-line flags; ``chunks_file`` is a path or URL of a quarantine file
    or of chunk indices, one a line, to do these only; ``sample`` is a share of the chunks and a
    seed, likewise; ``overwrite`` deletes an earlier launch's state first.

    From the main thread, SIGINT and SIGTERM stop the launch after the chunks under way.

    Raises:
        UserError: something is wrong with the job; nothing was created.
    """
    options = beam_options(flags)
    # before what follows asks services for their buckets
    check_paths(config, place_of(options), chunks_file)
    check_options(options)
    workers = workers_of(options)
    check_levels(config, overwrite=overwrite)
    launch = prepare(
        config,
        place_of(options),
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        chunks_file=chunks_file,
        sample=sample,
        workers=workers,
    )
    job = launch.resolved()
    state = launch.state()
    file = launch.chunks_file
    chosen = (
        chunks_of_file(file, job.fingerprint, job.plan.chunks.count, config.storage)
        if file
        else None
    )
    pyramid = begin_levels(launch, overwrite=overwrite)
    levels = replace(pyramid.job(), launch=launch.id) if pyramid else None
    start = time.monotonic()
    phases = _phases(state, job, chosen)
    if pyramid and levels:
        phases.append(
            Phase(
                "chunks of the pyramid",
                pyramid.count,
                pyramid.voxels_per_chunk,
                StageRecords(levels).chunk_counter(),
            )
        )

    def request_stop() -> None:
        state.request_stop(launch.id)
        if levels:
            # beside the output, where the job's state may not be
            levels.state().request_stop(launch.id)

    execution = execute(
        options,
        lambda pipeline: job_pipeline.build(pipeline, launch, workers, levels),
        len(index_ranges(job.plan.chunks.count, workers)),
        Progress(*phases),
        request_stop,
    )
    outcome = _judge(
        job,
        state,
        launch,
        chosen,
        pyramid,
        execution.interrupted,
        execution.error,
        time.monotonic() - start,
    )
    staged_at = options.view_as(GoogleCloudOptions).template_location
    if staged_at and not execution.interrupted and execution.error is None:
        return replace(outcome, exit_code=COMPLETE, staged_at=staged_at)
    return outcome


def _phases(state: State, job: ResolvedJob, chosen: list[int] | None) -> list[Phase]:
    """The chunks to do; with ``seams: exchange`` first those whose patches are computed, which is most of the work."""
    plan = job.plan
    voxels = job.plan.chunks.roi.size
    count = plan.chunks.count
    owners = plan.totals.owners
    before = _done(state, job, chosen)
    total = count if chosen is None else len(chosen)
    chunks = Phase("chunks", total, voxels / count, lambda: _done(state, job, chosen))
    if plan.exchange is None or chosen is not None or before == count:
        return [chunks]

    def computed() -> int:
        """All, once receipts come: of quarantined chunks, and where nobody needs them, the patches stay uncomputed."""
        return owners if _done(state, job, None) > before else state.count_sums(0, count)

    return [Phase("chunks of the first stage", owners, voxels / owners, computed), chunks]


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
    pyramid: Pyramid | None,
    interrupted: bool,
    error: BaseException | None,
    seconds: float,
) -> JobOutcome:
    everywhere = list(state.read_quarantined(0, job.plan.chunks.count))
    try:
        state.write_quarantine_file(everywhere)
    except BeamInferenceError as failure:
        error = error or failure  # what ended the launch is what is told
    done_of_job = _done(state, job, None)
    if job.plan.exchange is not None and done_of_job == job.plan.chunks.count:
        # of chunks done without them, if any
        SeamFiles(state.url, job.config.storage, job.fingerprint).forget_all()
    quarantined = (
        everywhere if chosen is None else [r for r in everywhere if r.chunk in set(chosen)]
    )
    chunks = job.plan.chunks.count if chosen is None else len(chosen)
    done = done_of_job if chosen is None else _done(state, job, chosen)
    bound = job.config.job.max_failed_chunks
    levels = status_of(pyramid) if pyramid else None
    due = levels is not None and done_of_job == job.plan.chunks.count
    if done == chunks and (levels is None or not due or levels.complete):
        code = COMPLETE
    elif interrupted:
        code = INTERRUPTED
    elif (
        due
        or error
        or done + len(quarantined) < chunks
        or (bound is not None and len(quarantined) > bound)
    ):
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
        pyramid=levels,
    )
