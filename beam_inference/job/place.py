"""Where a job's workers will run, as far as the launcher knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is going to run, as far as checks depend on it.

    Attributes:
        is_this_machine: workers run here, so the network can be tried at launch and ``device:
            auto`` be resolved.
        shares_files: workers see this machine's files.
        processes_per_host: worker processes that share a machine.
        threads_per_process: harness threads that share a process.
    """

    is_this_machine: bool = True
    shares_files: bool = True
    processes_per_host: int = 1
    threads_per_process: int = 2


THIS_PROCESS = Place()
"""Two threads of this process, as the local runner has by default."""
