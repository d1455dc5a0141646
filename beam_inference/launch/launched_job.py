"""A job that was launched before, found by its job file: its progress, and whether it is complete.

What is slow to import is imported where it is used: most questions need neither Beam nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from beam_inference.config.job import OUTPUT, JobConfig
from beam_inference.errors import StateError
from beam_inference.job import verification
from beam_inference.job.crew_records import SignOfLife
from beam_inference.job.leftovers import sweep_job_drafts
from beam_inference.job.ownership import check_claims
from beam_inference.job.records import LaunchNote
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.shards import ShardProgress
from beam_inference.job.state import State, default_state_url
from beam_inference.job.status import JobStatus, job_status
from beam_inference.job.verification import VerifyReport
from beam_inference.models.trust import Trust

if TYPE_CHECKING:
    from beam_inference.launch.output_pyramid import PyramidStatus
    from beam_inference.pyramid.pyramid import Pyramid
    from beam_inference.volumes.volume import Volume


@dataclass(frozen=True)
class LaunchedJob:
    """A job that was launched before.

    Attributes:
        config: the job file as it is now.
        state: the state folder of the job.
        job: the job as it was launched.
    """

    config: JobConfig
    state: State
    job: ResolvedJob

    def status(self) -> JobStatus:
        """The progress of the job by now.

        Raises:
            StateError: an output was removed, or taken over by others.
            WorkerFault: the state folder or an output cannot be read.
        """
        status = job_status(self.job, self.state, datetime.now(UTC))
        if status.done:
            self._check_claims()
        return status

    def _check_claims(self) -> None:
        outputs = [single.output.path for single in self.config.by_output.values()]
        check_claims(self.job, self.state, outputs, self.config.storage)

    def crew(self) -> list[SignOfLife]:
        """What the workers that have claims tell of themselves, killed ones too."""
        return list(self.state.of(self.job).crew().read_signs().values())

    def cancel(self) -> list[LaunchNote]:
        """Tell all launches that have not ended to begin no further chunk; return these.

        A launch that was killed counts among them, as nobody can know.

        Raises:
            WorkerFault: the state folder cannot be read or written.
        """
        notes = [note for note in self.state.read_launches() if note.summary is None]
        for note in notes:
            self.state.request_stop(note.launch)
            for pyramid in self._pyramids():
                replace(pyramid.job(), launch=note.launch).state().request_stop(note.launch)
        return notes

    def _pyramids(self) -> list[Pyramid]:
        outputs = [single.output for single in self.config.by_output.values()]
        if all(output.pyramid is None for output in outputs):
            return []
        from beam_inference.launch.output_pyramid import output_pyramids

        return output_pyramids(self.config)

    def shard_progress(self) -> ShardProgress | None:
        """The progress of the job's shards; None if it is not divided.

        Raises:
            StateError: the record of their number is damaged.
        """
        count = self.state.read_shard_count()
        if count is None:
            return None
        return ShardProgress(count, len(self.state.of(self.job).ended_shards(count)))

    def pyramid_status(self) -> PyramidStatus | None:
        """The progress of the pyramids of all outputs; None if the job has none to make."""
        pyramids = self._pyramids()
        if not pyramids:
            return None
        from beam_inference.launch.output_pyramid import pyramids_status

        return pyramids_status(pyramids)

    def verify(
        self,
        *,
        deep: bool = False,
        recompute: float | None = None,
        seed: int | None = None,
        trust: Trust = Trust.NOTHING,
        progress: Callable[[int], None] | None = None,
    ) -> VerifyReport:
        """Compare the job's receipts with its plan.

        Args:
            deep: whether to read every chunk back and compare it with its receipt.
            recompute: share of the chunks that are computed again from the input, drawn at random,
                and compared with the output; None for none.
            seed: seed of the draw; None for a new one.
            trust: which code that the network's files carry may run, to compute chunks again.
            progress: is called with the number of chunks looked at so far.

        Raises:
            UserError: the job file describes another job, or an output is gone or was taken over
                by others; or chunks cannot be computed again here.
        """
        recomputation = None
        if recompute is not None:
            from beam_inference.launch.prepare import resolve_again
            from beam_inference.launch.recomputation import recompute_chunks

            recomputation = recompute_chunks(
                resolve_again(self.config, self.relocated_job, self.state.url),
                self.state,
                recompute,
                seed=seed,
                trust=trust,
                progress=progress,
            )
        outputs = None
        if deep:
            keys = self.relocated_job.config.written_keys
            outputs = {key: self.open_output("nothing to verify", key) for key in keys}
        report = verification.verify(self.relocated_job, self.state, outputs, progress)
        if report.receipts:
            self._check_claims()
        report.recomputation = recomputation
        return report

    @cached_property
    def relocated_job(self) -> ResolvedJob:
        """The job as it was launched, with the output where the job file has it now.

        Raises:
            StateError: the job file describes another job.
        """
        from beam_inference.launch.resume import relocate_job

        return relocate_job(self.config, self.job, self.state.url)

    def open_output(self, consequence: str, key: str = OUTPUT) -> Volume:
        """Open an output.

        Args:
            consequence: what it means if there is none, such as "nothing to draw".
            key: its key in the job file.

        Raises:
            StateError: there is none.
        """
        from beam_inference.job.parts import output_spec
        from beam_inference.volumes.outputs import open_output

        spec = output_spec(self.relocated_job, key)
        output = open_output(spec)
        if output is None:
            raise StateError(f"{consequence}: the output {spec.url} is gone")
        return output

    def remove_seam_files(self) -> int:
        """Remove seam files that workers wrote late, when they had been given up; how many.

        Raises:
            StateError: the job is not complete, and may still need them.
        """
        from beam_inference.worker.seam_files import SeamFiles

        count = self.job.plan.chunks.count
        unfinished = count - self.state.of(self.job).tally_receipts(count).chunks
        if unfinished:
            raise StateError(
                f"{unfinished} of {count} chunks have no receipt, and may still need their seam "
                "files: run them first"
            )
        return SeamFiles(self.state.url, self.config.storage, self.job.records_key).forget_all()

    def remove_drafts(self) -> int:
        """Remove drafts that killed writers left in the output and its state; how many."""
        return sweep_job_drafts(self.config, self.state.url)


def find_launched_job(config: JobConfig, consequence: str = "nothing to tell") -> LaunchedJob:
    """Find the job that was launched with a job file.

    Args:
        config: the job file as it is now.
        consequence: what it means if there is none, such as "nothing to verify".

    Raises:
        StateError: the state folder holds no job.
    """
    state = State(default_state_url(config), config.storage)
    job = state.load_job()
    if job is None:
        raise StateError(
            f"{consequence}: {state.url} holds no job. Has it been run, and with this output.path?"
        )
    return LaunchedJob(config, state, job)


def status(config: JobConfig) -> JobStatus:
    """The progress of the job that was launched with a job file.

    Raises:
        StateError: the state folder holds no job.
    """
    return find_launched_job(config).status()


def verify(
    config: JobConfig,
    *,
    deep: bool = False,
    recompute: float | None = None,
    seed: int | None = None,
    trust: Trust = Trust.NOTHING,
    progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Check whether the job that was launched with a job file is complete, without its pyramid.

    Args:
        config: the job file as it is now.
        deep: whether to read every chunk back and compare it with its receipt.
        recompute: share of the chunks that are computed again from the input, drawn at random, and
            compared with the output bit by bit; None for none.
        seed: seed of the draw; None for a new one, which the report has.
        trust: which code that the network's files carry may run, to compute chunks again.
        progress: is called with the number of chunks looked at so far.

    Raises:
        StateError: the state folder holds no job or another one, or the output is gone.
        UserError: chunks cannot be computed again here.
    """
    launched = find_launched_job(config, "nothing to verify")
    return launched.verify(
        deep=deep, recompute=recompute, seed=seed, trust=trust, progress=progress
    )
