"""Messages between launcher, workers and Beam: a launch, and the outcome of a chunk."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Literal

import beam_inference
from beam_inference.errors import Stage, WorkerFault
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.shards import Shard
from beam_inference.job.state import State
from beam_inference.models.trust import Trust

Outcome = Literal["done", "skipped", "quarantined", "summed", "left"]


def own_versions() -> str:
    """Versions of this package and of Beam in this process."""
    return f"beam-inference {beam_inference.__version__}, apache-beam {version('apache-beam')}"


def check_versions(versions: str) -> None:
    """Check that a worker has the versions that its launch was made with.

    Args:
        versions: those of the launch.

    Raises:
        WorkerFault: it has others, and may compute something else.
    """
    if versions != (own := own_versions()):
        raise WorkerFault(
            f"the launch was made with {versions}, but this worker on {socket.gethostname()} has "
            f"{own}: install the same versions on all workers"
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a job, as its workers need to know it: small, and picklable.

    Attributes:
        job: the resolved job, as JSON.
        state_url: the state folder.
        id: name of this launch.
        honour_receipts: skip chunks that have a receipt, also in a replayed bundle.
        trust: which code that the network's files carry may run.
        threads_per_process: harness threads that share a worker.
        io_depth: most chunks that a run reads ahead, and most that it is writing.
        contract_checked: whether the launcher has run the network; if not, each worker does first.
        chunk_list: URL of the indices of the chunks to do, in the state folder, where it is not all
            of the range; workers read it themselves.
        shard: the share of the chunks that is done, where it is not all.
        claim_length: chunks that a worker claims at once, so that other launches of the job leave
            them to it; None where it claims none.
        versions: of this package and of Beam, where the launch was made.
    """

    job: str
    state_url: str
    id: str
    honour_receipts: bool
    trust: Trust
    threads_per_process: int
    contract_checked: bool
    chunk_list: str | None = None
    io_depth: int = 1
    shard: Shard | None = None
    claim_length: int | None = None
    versions: str = field(default_factory=own_versions)

    def read_job(self) -> ResolvedJob:
        """Return the job, which each process parses once."""
        return _parse(self.job)

    @property
    def does_all_missing(self) -> bool:
        """Whether all chunks are to be done that have no receipt: neither more nor fewer."""
        return self.honour_receipts and self.chunk_list is None and self.shard is None

    @property
    def chunk_range(self) -> tuple[int, int]:
        """First of the chunks that this launch may have to do, and the one after the last."""
        count = self.read_job().plan.chunks.count
        return (0, count) if self.shard is None else self.shard.chunk_range(count)

    def state(self) -> State:
        """Return the job's state folder, with its receipts and its quarantine."""
        job = self.read_job()
        return State(self.state_url, job.config.storage).of(job)


@lru_cache(maxsize=16)  # jobs of one process, which are few
def _parse(text: str) -> ResolvedJob:
    return ResolvedJob.model_validate_json(text)


@dataclass(frozen=True, slots=True)
class Record:
    """Outcome of a chunk.

    Attributes:
        chunk: its index.
        outcome: "done", "skipped" (it had a receipt) or "quarantined"; in the first stage of
            ``strategy: exchange`` also "summed": its patches are computed, and their sums kept for
            the chunks that share voxels with it; or "left": they cannot be, and the second stage
            does the chunk without its neighbours.
        read_bytes: bytes of decoded input.
        written_bytes: bytes of output before compression.
        seconds: time of each stage, by name.
        uniform_patches: patches whose input was one value, for which the network was not run again.
    """

    chunk: int
    outcome: Outcome
    read_bytes: int = 0
    written_bytes: int = 0
    seconds: Mapping[Stage, float] = field(default_factory=dict)
    uniform_patches: int = 0
