"""Runs the stages of a :class:`~beam_inference.job.stage_job.StageJob`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from beam_inference.beam.engine_checks import ask_engine, settle_engine
from beam_inference.beam.execution import execute, explain
from beam_inference.beam.flags import beam_options, check_options, place_of, workers_of
from beam_inference.beam.progress import Phase, Progress
from beam_inference.beam.stages import DoStages
from beam_inference.errors import COMPLETE, FAILED, INTERRUPTED, ConfigError
from beam_inference.geometry.partition import index_ranges
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords
from beam_inference.job.state import STATE_FOLDER
from beam_inference.volumes.drafts import sweep_drafts


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """Outcome of a launch.

    Attributes:
        exit_code: 0 complete, 1 failed, 130 interrupted.
        chunks: number of chunks of all stages.
        done: number of chunks that are done.
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

    @property
    def is_complete(self) -> bool:
        """Whether all chunks are done."""
        return self.exit_code == COMPLETE

    def summary(self, product: str, command: str) -> str:
        """Return lines that tell a user the outcome.

        Args:
            product: what exists now if the job is complete.
            command: the command that does what is missing.
        """
        lines = [] if self.error is None else [f"the launch ended early: {self.error}"]
        lines.append(f"{self.done} of {self.chunks} chunks done, in {self.seconds:.1f} s")
        lines += [f"failed: {failure}" for failure in self.failures]
        lines.append(
            f"complete: {product}" if self.is_complete else f"to do what is missing: {command}"
        )
        return "\n".join(lines)


def check_place(flags: Sequence[str], urls: Sequence[str]) -> None:
    """Refuse URLs that the workers of a pipeline with these flags could not reach.

    Args:
        flags: of Beam.
        urls: places that workers read and write.

    Raises:
        ConfigError: a flag is unknown, its runner cannot be used, or its workers do not see this
            machine's files.
    """
    options = beam_options(flags)
    check_options(options)
    ask_engine(options)
    place = place_of(options)
    for url in urls:
        if url.startswith("file://") and not place.shares_files:
            raise ConfigError(
                f"{url} is on this machine, which remote workers cannot reach. Use gs:// or s3://."
            )


def run_stages(job: StageJob, flags: Sequence[str], voxels_per_chunk: float) -> StageOutcome:
    """Do the missing chunks of a job that has begun; starts no pipeline if there are none.

    From the main thread, SIGINT and SIGTERM stop it after the chunks under way.

    Args:
        job: the stages and their records; see :meth:`StageRecords.begin`.
        flags: of Beam.
        voxels_per_chunk: for the progress.
    """
    options = beam_options(flags)
    settle_engine(options, place_of(options))
    workers = workers_of(options)
    total = sum(stage.count for stage in job.stages)
    ranges = max(len(index_ranges(stage.count, workers)) for stage in job.stages)
    records = StageRecords(job)
    count_done = records.chunk_counter()
    start = time.monotonic()
    done = job.count_done()
    interrupted = False
    error = None
    if done < total:
        execution = execute(
            options,
            lambda pipeline: pipeline | "Stages" >> DoStages(job, workers),
            ranges,
            Progress(Phase("chunks", total, voxels_per_chunk, count_done)),
            lambda: job.state().request_stop(job.launch),
            f"beam-inference-{job.launch}",
        )
        interrupted = execution.interrupted
        error = execution.error
        done = records.count_done()
    if done == total:
        sweep_drafts(job.state_url.removesuffix(f"/{STATE_FOLDER}"))
        return StageOutcome(COMPLETE, total, done, [], time.monotonic() - start, None)
    return StageOutcome(
        exit_code=INTERRUPTED if interrupted else FAILED,
        chunks=total,
        done=done,
        failures=records.failures(),
        seconds=time.monotonic() - start,
        error=None if error is None else explain(error),
    )
