"""How far a step of a job file is: a job of one volume or of several, or a command in stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beam_inference.config.cohort import Cohort
from beam_inference.config.job import JobConfig
from beam_inference.config.storage import Storage
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.launched_job import LaunchedJob


@dataclass(frozen=True, slots=True)
class StepProgress:
    """How far a step is.

    Attributes:
        is_complete: whether all that it makes is there.
        chunks: number of its chunks; None if it has none, or they are not known yet.
        done: number of these that are done.
        quarantined: number of these in quarantine.
    """

    is_complete: bool
    chunks: int | None = None
    done: int = 0
    quarantined: int = 0

    @property
    def is_stuck(self) -> bool:
        """Whether nothing is left to do but what is in quarantine."""
        return self.quarantined > 0 and self.done + self.quarantined == self.chunks


NOT_BEGUN = StepProgress(is_complete=False)


def find_launched_jobs(step: JobConfig | Cohort) -> list[LaunchedJob | None]:
    """The jobs of a step as they were launched, one for each volume; None of those that were not.

    Raises:
        WorkerFault: a state folder cannot be read.
    """
    configs = step.volumes.values() if isinstance(step, Cohort) else [step]
    launched: list[LaunchedJob | None] = []
    for config in configs:
        state = _state_of(config)
        job = state.load_job()
        launched.append(None if job is None else LaunchedJob(config, state, job))
    return launched


def _state_of(config: JobConfig) -> State:
    """Return the state folder of a job of one volume."""
    return State(default_state_url(config), config.storage)


def job_progress(step: JobConfig | Cohort) -> StepProgress:
    """How far a job is, by its receipts.

    Raises:
        UserError: the output of a launched job is gone.
        WorkerFault: a state folder cannot be read.
    """
    found = find_launched_jobs(step)
    launched = [job for job in found if job is not None]
    if not launched:
        return NOT_BEGUN
    statuses = [job.status() for job in launched]
    # a volume that was put aside counts as one chunk
    volumes = step.volumes.values() if isinstance(step, Cohort) else []
    aside = sum(_state_of(config).read_fault() is not None for config in volumes)
    chunks = sum(status.planned for status in statuses) + aside
    done = sum(status.done for status in statuses)
    is_complete = len(launched) == len(found) and done == chunks
    if is_complete:
        pyramids = [job.pyramid_status() for job in launched]
        is_complete = all(pyramid is None or pyramid.complete for pyramid in pyramids)
    quarantined = sum(status.quarantined for status in statuses) + aside
    return StepProgress(is_complete, chunks, done, quarantined)


def stages_progress(jobs: Sequence[StageJob]) -> StepProgress:
    """How far the stages of a command are, by their records.

    Raises:
        WorkerFault: a state folder cannot be read.
    """
    chunks = sum(stage.count for job in jobs for stage in job.stages)
    done = sum(StageRecords(job).count_done() for job in jobs)
    return StepProgress(done == chunks, chunks, done)


def stages_have_begun(kind: str, target: str, storage: Storage) -> bool:
    """Whether a command has begun to make something of a volume.

    Args:
        kind: of its records.
        target: URL of the volume.
        storage: how it is reached.

    Raises:
        StateError: the state folder cannot be read.
    """
    return StageRecords(stage_job(kind, {}, target, storage, ())).earlier_job() is not None
