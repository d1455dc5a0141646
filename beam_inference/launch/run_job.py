"""Run a job from its job file to an exit code.

The outcome of a job is judged from its receipts and quarantine records, never from what a runner
reports. Beam is imported for a pipeline, and to check flags of Beam: where nothing is left to do
and no such flag was given, neither Beam nor PyTorch is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from beam_inference.beam.progress import Phase, Progress
from beam_inference.config.job import JobConfig
from beam_inference.errors import (
    COMPLETE,
    COMPLETE_BUT_QUARANTINED,
    FAILED,
    INTERRUPTED,
    TRY_AGAIN,
    BeamInferenceError,
    WorkerFault,
)
from beam_inference.job.chunk_records import list_absent
from beam_inference.job.leftovers import sweep_job_drafts
from beam_inference.job.messages import Launch
from beam_inference.job.parts import output_spec
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.job.records import LaunchSummary, QuarantineRecord, ReceiptTally
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.runs import read_chunk_list
from beam_inference.job.shards import Shard
from beam_inference.job.stage_records import StageRecords
from beam_inference.job.state import State
from beam_inference.job.verification import written_fault
from beam_inference.launch.checks import check_paths
from beam_inference.launch.network_question import AskWorker, NetworkQuestion, WorkerChoice
from beam_inference.launch.output_pyramid import (
    PyramidStatus,
    begin_all_scales,
    check_scales,
    pyramids_status,
)
from beam_inference.launch.prepare import prepare
from beam_inference.launch.several_devices import with_process_per_device
from beam_inference.models.trust import Trust
from beam_inference.pyramid.pyramid import Pyramid
from beam_inference.volumes.outputs import open_output
from beam_inference.worker.seam_files import SeamFiles

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

    from beam_inference.beam.execution import ExecutionResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Redone:
    """Chunks that were done although they had a receipt.

    Attributes:
        chunks: number of those that are done again.
        changed: those of them that have other values than before.
    """

    chunks: int
    changed: list[int]


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Outcome of a launch.

    Attributes:
        exit_code: 0 complete, with the pyramid if there is one to make; 1 failed; 3 finished with
            quarantined chunks within the bound; 75 stopped, to be tried again; 130 interrupted.
            For a shard, 0 says that it has come to its end.
        chunks: number of chunks to do: all of the job's, or those that were named, or of the shard.
            With ``strategy: exchange``, a shard has those that own patches.
        done: number of these that have a receipt; of a shard with ``strategy: exchange``, whose
            patches are computed.
        missing_of_job: number of chunks of the whole job without a receipt, also of those that were
            not to be done.
        quarantined: records of the chunks that could not be done.
        summary: what this launch's workers did; None if it did not reach its end.
        patches_beyond_bound: patches of the job whose predictions were too large for exact sums.
        seconds: wall time of the pipeline.
        error: text of the error that ended the launch early, if one did.
        pyramid: progress of the outputs' pyramids; None if the job has none to make.
        staged_at: place of the pipeline, where it is staged for another to run
            (``--template_location``, ``--output_executable_path``) instead of being run.
        shard: the shard that was to do; None for the whole job.
        redone: the chunks that were done again, where that was asked for; None elsewhere.
    """

    exit_code: int
    chunks: int
    done: int
    missing_of_job: int
    quarantined: list[QuarantineRecord]
    summary: LaunchSummary | None
    patches_beyond_bound: int
    seconds: float
    error: str | None
    pyramid: PyramidStatus | None = None
    staged_at: str | None = None
    shard: Shard | None = None
    redone: Redone | None = None

    @property
    def missing(self) -> int:
        """Number of chunks with neither receipt nor quarantine record."""
        return self.chunks - self.done - len(self.quarantined)


@dataclass(frozen=True, slots=True)
class ChunksToDo:
    """The chunks that a launch is to do.

    Attributes:
        launch: the launch.
        job: its job.
        state: the job's state folder.
        chunks: the chunks to do; None for all.
    """

    launch: Launch
    job: ResolvedJob
    state: State
    chunks: list[int] | None

    @classmethod
    def of(cls, launch: Launch) -> ChunksToDo:
        """Read the list of chunks of a launch, if it has one."""
        job = launch.read_job()
        count = job.plan.chunks.count
        url = launch.chunk_list
        chunks = None if url is None else read_chunk_list(url, count, job.config.storage)
        return cls(launch, job, launch.state(), chunks)

    @property
    def count_of_job(self) -> int:
        """Number of chunks of the whole job."""
        return self.job.plan.chunks.count

    @property
    def count(self) -> int:
        """Number of chunks to do."""
        if self.chunks is not None:
            return len(self.chunks)
        start, stop = self.launch.chunk_range
        return stop - start

    def count_owners(self) -> int:
        """Count the chunks to do that own patches, in ``strategy: exchange``."""
        exchange = self.job.plan.exchange
        chunks = range(*self.launch.chunk_range)
        return sum(exchange is None or exchange.owned_work(chunk) is not None for chunk in chunks)

    def list_done_of_job(self) -> int:
        """Count the chunks of the whole job that have a receipt, as far as a listing tells."""
        return self.state.count_receipts(0, self.count_of_job)

    def list_done(self) -> int:
        """Count the chunks to do that have a receipt, as far as a listing tells."""
        if self.chunks is None:
            return self.state.count_receipts(*self.launch.chunk_range)
        return len(self.state.read_receipts(self.chunks))

    @property
    def is_done(self) -> bool:
        """Whether every chunk of the whole job has a receipt, as far as a listing tells."""
        return self.list_done_of_job() == self.count_of_job

    def was_stopped(self, execution: ExecutionResult | None) -> bool:
        """Whether the launch was asked to stop, here or by ``cancel``."""
        was_interrupted = execution is not None and execution.interrupted
        return was_interrupted or self.state.has_stop_request(self.launch.id)

    def among_chunks(self, records: list[QuarantineRecord]) -> list[QuarantineRecord]:
        """The records of chunks to do."""
        chunks = range(*self.launch.chunk_range) if self.chunks is None else set(self.chunks)
        return [record for record in records if record.chunk in chunks]


def run_job(
    config: JobConfig,
    flags: Sequence[str] = (),
    *,
    chunks: Sequence[str] = (),
    redo: bool = False,
    sample: tuple[float, int] | None = None,
    shard: Shard | None = None,
    stop_after: float | None = None,
    overwrite: bool = False,
    trust: Trust = Trust.NOTHING,
    claims: bool = True,
) -> JobOutcome:
    """Check a job, run it to its end, and judge it.

    From the main thread, SIGINT, SIGTERM and SIGUSR1 stop the launch after the chunks under way.

    Args:
        config: the job file, see :func:`beam_inference.launch.job_files.load_job`.
        flags: Beam's command-line flags, such as ``--runner=DataflowRunner``.
        chunks: indices, boxes, and paths or URLs of files of them: only these chunks are done. See
            :func:`beam_inference.job.chunk_choice.choose_chunks`.
        redo: do the chunks of ``chunks`` again that have a receipt, and keep the former ones.
        sample: a share of the chunks, 0 to 1, and a seed: only such a sample is done.
        shard: only the chunks of this shard are done, of a job that was prepared for shards.
        stop_after: seconds after which no further chunk is begun.
        overwrite: delete an earlier launch's state first, so that every chunk is done anew.
        trust: which code that the network's files carry may run.
        claims: whether workers claim what they do, so that other launches leave it to them.

    Returns:
        The outcome; ``exit_code`` says whether the job is complete.

    Raises:
        UserError: something is wrong with the job; nothing was created.
        RunnerError: the network could not be tried on a worker; nothing was created.
        KeyboardInterrupt: the launch was asked to stop meanwhile; nothing was created.
    """
    tries_again = shard is not None or stop_after is not None
    ending = Ending(
        deadline=None if stop_after is None else time.monotonic() + stop_after,
        exit_code=TRY_AGAIN if tries_again else INTERRUPTED,
    )
    setting = settle(config, flags)
    check_scales(config, overwrite=overwrite)
    launch = prepare(
        config,
        setting.place,
        overwrite=overwrite,
        trust=trust,
        chunks=chunks,
        redo=redo,
        sample=sample,
        shard=shard,
        workers=setting.workers,
        claims=claims,
        ask_worker=setting.asker(ending.deadline),
    )
    work = ChunksToDo.of(launch)
    if shard is not None:
        return _find_shard_done(work) or _execute(work, [], setting, ending)
    pyramids = begin_all_scales(launch, overwrite=overwrite)
    # A pipeline that is staged for another to run is staged in any case.
    is_staged = setting.options is not None and template_of(setting.options) is not None
    outcome = None if is_staged else judge_finished(work, pyramids)
    return outcome or _execute(work, pyramids, setting, ending)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a launch runs, from Beam's flags.

    Attributes:
        options: of Beam; None without flags.
        place: where the workers run.
        workers: worker processes that run at a time, as far as known.
    """

    options: PipelineOptions | None
    place: Place
    workers: int

    def asker(self, deadline: float | None = None) -> AskWorker | None:
        """What has a worker elsewhere decide; None where none is, or the pipeline is only staged.

        Args:
            deadline: time of :func:`time.monotonic` from which nobody waits for its answer.
        """
        options = self.options
        if options is None or self.place.is_this_machine or template_of(options) is not None:
            return None

        def ask(question: NetworkQuestion) -> WorkerChoice:
            from beam_inference.launch.ask_worker import ask_worker

            return ask_worker(question, options, deadline)

        return ask


@dataclass(frozen=True, slots=True)
class Ending:
    """How a launch ends that is asked to stop.

    Attributes:
        deadline: time of :func:`time.monotonic` from which no chunk is begun; None for never.
        exit_code: if anything but Ctrl-C asks.
    """

    deadline: float | None
    exit_code: int


def settle(config: JobConfig, flags: Sequence[str]) -> Setting:
    """Find out where a launch runs, and check that its runner can be used.

    Args:
        config: the job file.
        flags: Beam's command-line flags.

    Raises:
        UserError: a flag or a path is wrong, or the runner cannot be used.
    """
    flags = with_process_per_device(config, flags)
    if not flags:
        check_paths(config, THIS_PROCESS)
        workers = THIS_PROCESS.processes_per_host * THIS_PROCESS.threads_per_process
        return Setting(None, THIS_PROCESS, workers)
    from beam_inference.beam.engine_checks import settle_engine
    from beam_inference.beam.flags import (
        beam_options,
        check_options,
        place_of,
        warn_of_unused_flags,
        workers_of,
    )

    options = beam_options(flags)
    warn_of_unused_flags(flags, options)
    place = place_of(options)
    # Paths come first, before anything asks services for their buckets.
    check_paths(config, place)
    check_options(options)
    place = settle_engine(options, place)
    return Setting(options, place, workers_of(options))


def judge_finished(work: ChunksToDo, pyramids: Sequence[Pyramid]) -> JobOutcome | None:
    """Judge a launch that has nothing to do, pyramids included; None if there is something."""
    start = time.monotonic()
    count = work.count_of_job
    if work.list_done_of_job() < count:
        return None
    status = pyramids_status(pyramids)
    if status is not None and not status.complete:
        return None
    tally = work.state.tally_receipts(count)
    if tally.chunks < count:
        return None
    summary = LaunchSummary(done=0, skipped=work.count, quarantined=0)
    work.state.write_summary(work.launch.id, summary)
    return judge(work, pyramids, tally, time.monotonic() - start)


def template_of(options: PipelineOptions) -> str | None:
    """Where a pipeline is staged for another to run; None where it is run."""
    from apache_beam.options.pipeline_options import GoogleCloudOptions, PortableOptions

    template = options.view_as(GoogleCloudOptions).template_location
    return template or options.view_as(PortableOptions).output_executable_path or None


def _execute(
    work: ChunksToDo, pyramids: Sequence[Pyramid], setting: Setting, ending: Ending
) -> JobOutcome:
    """Run a launch's pipeline to its end, and judge it."""
    from beam_inference.beam.execution import Stopping, execute
    from beam_inference.beam.flags import beam_options
    from beam_inference.beam.transforms import launch_ranges
    from beam_inference.launch import pipeline as job_pipeline

    launch = work.launch
    scales = [replace(pyramid.job(), launch=launch.id) for pyramid in pyramids]
    start = time.monotonic()
    phases = list_phases(work)
    phases += [
        Phase(
            "chunks of the pyramid",
            pyramid.count,
            pyramid.voxels_per_chunk,
            StageRecords(job).chunk_counter(),
        )
        for pyramid, job in zip(pyramids, scales, strict=True)
    ]

    def request_stop() -> None:
        work.state.request_stop(launch.id)
        for job in scales:
            # Its state lies beside the output, where the job's own may not be.
            job.state().request_stop(launch.id)

    workers = setting.workers
    options = beam_options(()) if setting.options is None else setting.options
    execution = execute(
        options,
        lambda pipeline: job_pipeline.build(pipeline, launch, workers, scales),
        len(launch_ranges(launch, workers)),
        Progress(*phases),
        request_stop,
        f"beam-inference-{launch.id}",
        Stopping(ending.deadline, ending.exit_code),
    )
    if launch.claim_length is not None:
        forget_signs(work)
    if launch.shard is not None:
        outcome = _judge_shard(work, time.monotonic() - start, execution)
    else:
        tally = work.state.tally_receipts(work.count_of_job)
        outcome = judge(work, pyramids, tally, time.monotonic() - start, execution)
        if work.chunks is not None:
            outcome = replace(outcome, redone=_compare_with_former(work, work.chunks))
    if outcome.exit_code == INTERRUPTED and execution.interrupted and not execution.by_person:
        outcome = replace(outcome, exit_code=ending.exit_code)
    staged_at = template_of(options)
    if staged_at and not execution.interrupted and execution.error is None:
        return replace(outcome, exit_code=COMPLETE, staged_at=staged_at)
    return outcome


def _compare_with_former(work: ChunksToDo, chunks: Sequence[int]) -> Redone | None:
    """Compare chunks that this launch has done again with what they were before."""
    former = {each.chunk: each for each in work.state.read_former_receipts(work.launch.id, chunks)}
    if not former:
        return None
    outputs = {key: open_output(output_spec(work.job, key)) for key in work.job.config.written_keys}
    present = {key: output for key, output in outputs.items() if output is not None}
    if len(present) < len(outputs):
        return None  # the launch has told that it is gone
    done = [receipt.chunk for receipt in work.state.read_receipts(former)]
    changed = [chunk for chunk in done if written_fault(former[chunk], present) is not None]
    return Redone(len(done), changed)


def forget_signs(work: ChunksToDo) -> None:
    """Remove the signs of life of workers that have ended, which killed ones leave behind."""
    try:
        work.state.crew().forget_launch(work.launch.id)
    except WorkerFault as error:
        logger.warning("signs of life of this launch are left behind: %s", error)


def list_phases(work: ChunksToDo) -> list[Phase]:
    """List what the progress line counts: the chunks to do, after the first stage if any.

    With ``strategy: exchange`` most of the work is the first stage, in which patches are computed.
    """
    plan = work.job.plan
    voxels = plan.chunks.roi.size
    if work.launch.shard is not None:
        return [_phase_of_shard(work)]
    owners = plan.totals.owners
    done_before = work.list_done()
    chunks = Phase("chunks", work.count, voxels / work.count_of_job, work.list_done)
    if plan.exchange is None or work.chunks is not None or done_before == work.count:
        return [chunks]

    def count_computed() -> int:
        """Count chunks whose patches are computed; all of them, once receipts come.

        Patches that cannot be computed, and those that nobody needs, never are.
        """
        if work.list_done_of_job() > done_before:
            return owners
        return work.state.count_sums(0, work.count_of_job)

    return [Phase("chunks of the first stage", owners, voxels / owners, count_computed), chunks]


def _phase_of_shard(work: ChunksToDo) -> Phase:
    """What the progress line counts of a shard: chunks, or with ``exchange`` their first stage."""
    voxels_per_chunk = work.job.plan.chunks.roi.size / work.count_of_job
    if work.job.plan.exchange is None:
        return Phase("chunks", work.count, voxels_per_chunk, work.list_done)
    return Phase(
        "chunks of the first stage",
        work.count,
        voxels_per_chunk,
        lambda: work.state.count_sums(*work.launch.chunk_range),
    )


def _undone_of_shard(work: ChunksToDo) -> list[int]:
    """The chunks of a shard with work left: without a receipt, or without sums in ``exchange``."""
    exchange = work.job.plan.exchange
    state = work.state

    def list_done(start: int, stop: int) -> set[int]:
        done = {each.chunk for each in state.read_receipts(state.receipt_indices(start, stop))}
        if exchange is not None:
            summed = state.read_sums(state.sums_indices(start, stop))
            done.update(each.chunk for each in summed)
        return done

    absent = list_absent(*work.launch.chunk_range, list_done)
    return [chunk for chunk in absent if exchange is None or exchange.owned_work(chunk) is not None]


def _find_shard_done(work: ChunksToDo) -> JobOutcome | None:
    """Judge a shard that has nothing left to do; None if there is something."""
    start = time.monotonic()
    if _undone_of_shard(work):
        return None
    work.state.write_summary(
        work.launch.id, LaunchSummary(done=0, skipped=work.count, quarantined=0)
    )
    return _judge_shard(work, time.monotonic() - start, None)


def _judge_shard(work: ChunksToDo, seconds: float, execution: ExecutionResult | None) -> JobOutcome:
    """Judge a shard from its chunks' records.

    In the first stage of ``exchange`` some chunks are left to the second one, without a record: so
    the summary counts, which only a pipeline writes that has come to its end.

    Args:
        work: the chunks to do.
        seconds: how long the launch took.
        execution: how its pipeline ended; None if it needed none.
    """
    shard = work.launch.shard
    assert shard is not None
    start, stop = shard.chunk_range(work.count_of_job)
    undone = _undone_of_shard(work)
    records = list(work.state.read_quarantined(start, stop))
    left = set(undone).difference(record.chunk for record in records)
    summary = work.state.read_summary(work.launch.id)
    error = None if execution is None else execution.error
    exit_code = FAILED
    was_stopped = work.was_stopped(execution)
    has_ended = summary is not None and not was_stopped and work.job.plan.exchange is not None
    if error is None and (not left or has_ended):
        exit_code = COMPLETE
        # Its pipeline did not, if it was asked to stop when all was done.
        work.state.write_shard_end(shard, work.launch.id)
    elif was_stopped:
        exit_code = INTERRUPTED
    text = None
    if error is not None:
        from beam_inference.beam.execution import explain

        text = explain(error)
    tally = work.state.tally_receipts(stop, start)
    count = work.count if work.job.plan.exchange is None else work.count_owners()
    return JobOutcome(
        exit_code=exit_code,
        chunks=count,
        done=count - len(undone),
        missing_of_job=work.count_of_job - work.list_done_of_job(),
        quarantined=records,
        summary=summary,
        patches_beyond_bound=tally.patches_beyond_bound,
        seconds=seconds,
        error=text,
        shard=shard,
    )


def judge(
    work: ChunksToDo,
    pyramids: Sequence[Pyramid],
    tally: ReceiptTally,
    seconds: float,
    execution: ExecutionResult | None = None,
) -> JobOutcome:
    """Judge a launch from the records of its job, and tidy up after it.

    Args:
        work: the chunks to do.
        pyramids: those to make.
        tally: of the receipts of the whole job.
        seconds: how long the launch took.
        execution: how its pipeline ended; None if it needed none.
    """
    error = None if execution is None else execution.error
    records = list(work.state.read_quarantined(0, work.count_of_job))
    try:
        work.state.write_quarantine_file(records)
    except BeamInferenceError as failure:
        error = error or failure  # the error that ended the launch comes first
    done_of_job = tally.chunks
    is_job_done = done_of_job == work.count_of_job
    if work.job.exchange is not None and is_job_done:
        # Chunks that were done without their neighbours may have left seam files.
        files = SeamFiles(work.state.url, work.job.config.storage, work.job.records_key)
        files.forget_all()
    if is_job_done:
        work.state.crew().forget_all()
        sweep_job_drafts(work.job.config, work.state.url)
    outcome = JobOutcome(
        exit_code=FAILED,
        chunks=work.count,
        done=done_of_job if work.chunks is None else work.list_done(),
        missing_of_job=work.count_of_job - done_of_job,
        quarantined=work.among_chunks(records),
        summary=work.state.read_summary(work.launch.id),
        patches_beyond_bound=tally.patches_beyond_bound,
        seconds=seconds,
        error=None,
        pyramid=pyramids_status(pyramids),
    )
    exit_code = _exit_code(
        outcome,
        work.job.config.job.max_failed_chunks,
        is_job_done=is_job_done,
        was_interrupted=work.was_stopped(execution),
        has_failed=error is not None,
    )
    if error is None or exit_code == COMPLETE:
        return replace(outcome, exit_code=exit_code)
    from beam_inference.beam.execution import explain

    return replace(outcome, exit_code=exit_code, error=explain(error))


def _exit_code(
    outcome: JobOutcome,
    most_quarantined: int | None,
    *,
    is_job_done: bool,
    was_interrupted: bool,
    has_failed: bool,
) -> int:
    """Exit code of an outcome; its pyramid counts once every chunk of the job is done."""
    is_pyramid_due = outcome.pyramid is not None and is_job_done
    is_pyramid_complete = outcome.pyramid is None or outcome.pyramid.complete
    if outcome.done == outcome.chunks and (is_pyramid_complete or not is_pyramid_due):
        return COMPLETE
    if was_interrupted:
        return INTERRUPTED
    is_beyond_bound = most_quarantined is not None and len(outcome.quarantined) > most_quarantined
    if is_pyramid_due or has_failed or outcome.missing > 0 or is_beyond_bound:
        return FAILED
    return COMPLETE_BUT_QUARANTINED
