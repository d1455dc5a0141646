"""The volumes of a job that was launched before: how far each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from beam_inference.config.cohort import Cohort
from beam_inference.config.job import JobConfig
from beam_inference.errors import StateError
from beam_inference.job.records import LaunchNote
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.launched_job import LaunchedJob


@dataclass(frozen=True, slots=True)
class LaunchedVolume:
    """A volume of a job of several.

    Attributes:
        name: of the volume.
        config: its job.
        job: its job as it was launched; None if it was not.
        fault: why the last launch could not open it; None if it could.
    """

    name: str
    config: JobConfig
    job: LaunchedJob | None
    fault: str | None


def find_launched_volumes(cohort: Cohort, consequence: str) -> list[LaunchedVolume]:
    """Find the volumes that were launched with a job file.

    Args:
        cohort: the job file as it is now.
        consequence: what it means if there is none, such as "nothing to verify".

    Raises:
        StateError: none was launched; or a record is damaged.
    """
    found = []
    for name, config in cohort.volumes.items():
        state = State(default_state_url(config), config.storage)
        job = state.load_job()
        launched = None if job is None else LaunchedJob(config, state, job)
        found.append(LaunchedVolume(name, config, launched, state.read_fault()))
    if all(volume.job is None and volume.fault is None for volume in found):
        raise StateError(
            f"{consequence}: {cohort.state_url} holds no volume of this job. Has it been run, and "
            "with this job.state_path?"
        )
    return found


def cancel_volumes(volumes: Sequence[LaunchedVolume]) -> dict[str, LaunchNote]:
    """Tell all launches that have not ended to begin no further chunk; these, by their names.

    Raises:
        WorkerFault: a state folder cannot be read or written.
    """
    launched = [volume.job for volume in volumes if volume.job is not None]
    return {note.launch: note for job in launched for note in job.cancel()}
