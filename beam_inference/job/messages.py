"""Messages between launcher, workers and Beam: a launch, and the outcome of a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from beam_inference.errors import Stage
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a job, as its workers need to know it: small, and picklable.

    Attributes:
        job: the resolved job, as JSON.
        state_url: the state folder.
        id: of this launch.
        honour_receipts: skip chunks that have a receipt, also in a replayed bundle.
        allow_pickle: load models that can execute code.
        threads_per_process: harness threads that share a worker.
        contract_checked: whether the launcher has run the network; if not, each worker does first.
        chunks_file: URL of a quarantine file or of chunk indices, to do these only; workers read it
            themselves.
    """

    job: str
    state_url: str
    id: str
    honour_receipts: bool
    allow_pickle: bool
    threads_per_process: int
    contract_checked: bool
    chunks_file: str | None = None

    def resolved(self) -> ResolvedJob:
        """The job."""
        return ResolvedJob.model_validate_json(self.job)

    def state(self) -> State:
        """The job's state folder, with its receipts and its quarantine."""
        job = self.resolved()
        return State(self.state_url, job.config.storage).of(job)


class Record(NamedTuple):
    """What became of a chunk.

    ``outcome`` is "done", "skipped" (it had a receipt) or "quarantined"; with ``seams: exchange``
    also "summed": its patches are computed, and their sums kept for the chunks that share voxels
    with it.
    """

    chunk: int
    outcome: str
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: dict[Stage, float] = {}  # noqa: RUF012  # by stage; never changed
    uniform_patches: int = 0
