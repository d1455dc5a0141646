"""The volumes of a job that was launched before: how far each of them is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from beam_inference.config.cohort import Cohort
from beam_inference.config.job import JobConfig
from beam_inference.errors import BeamInferenceError, StateError
from beam_inference.job.records import LaunchNote
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.launched_job import LaunchedJob

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class LaunchedVolume:
    """A volume of a job of several.

    Attributes:
        name: of the volume.
        config: its job.
        job: its job as it was launched; None if it was not.
        fault: why the last launch could not open it; None if it could.
        trouble: why its records cannot be read; None if they can.
    """

    name: str
    config: JobConfig
    job: LaunchedJob | None
    fault: str | None = None
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class VolumesAnswers(Generic[Answer]):
    """What the volumes of a job answer to a question, by their names.

    Attributes:
        answers: of each volume; None of one that was not launched, or that cannot answer.
        faults: why the last launch could not open volumes, which may answer of an earlier one.
        troubles: why volumes cannot answer.
    """

    answers: Mapping[str, Answer | None]
    faults: Mapping[str, str]
    troubles: Mapping[str, str]

    @property
    def expected(self) -> dict[str, Answer | None]:
        """The answers of the volumes of which neither is known."""
        return {
            name: answer
            for name, answer in self.answers.items()
            if name not in self.faults and name not in self.troubles
        }


def read_volumes(cohort: Cohort) -> list[LaunchedVolume]:
    """Read what is recorded of the volumes of a job file, launched or not."""
    return [_read_volume(name, config) for name, config in cohort.volumes.items()]


def _read_volume(name: str, config: JobConfig) -> LaunchedVolume:
    state = State(default_state_url(config), config.storage)
    try:
        job = state.load_job()
        launched = None if job is None else LaunchedJob(config, state, job)
        return LaunchedVolume(name, config, launched, fault=state.read_fault())
    except BeamInferenceError as error:  # of one volume, which says nothing of the others
        return LaunchedVolume(name, config, None, trouble=str(error))


def find_launched_volumes(cohort: Cohort, consequence: str) -> list[LaunchedVolume]:
    """Find the volumes that were launched with a job file.

    Args:
        cohort: the job file as it is now.
        consequence: what it means if there is none, such as "nothing to verify".

    Raises:
        StateError: none was launched.
    """
    found = read_volumes(cohort)
    if not any(volume.job or volume.fault or volume.trouble for volume in found):
        raise StateError(
            f"{consequence}: {cohort.state_url} holds no volume of this job. Has it been run, and "
            "with this job.state_path?"
        )
    return found


def ask_volumes(
    volumes: Sequence[LaunchedVolume], ask: Callable[[LaunchedJob], Answer]
) -> VolumesAnswers[Answer]:
    """Ask each volume the same; one that cannot answer says nothing of the others.

    Args:
        volumes: that are asked.
        ask: what is asked of the job of each that was launched.
    """
    answers: dict[str, Answer | None] = {}
    troubles: dict[str, str] = {}
    for volume in volumes:
        answers[volume.name] = None
        if volume.trouble is not None:
            troubles[volume.name] = volume.trouble
        elif volume.job is not None:
            try:
                answers[volume.name] = ask(volume.job)
            except BeamInferenceError as error:
                troubles[volume.name] = str(error)
    faults = {each.name: each.fault for each in volumes if each.fault is not None}
    return VolumesAnswers(answers, faults, troubles)


def cancel_volumes(
    volumes: Sequence[LaunchedVolume],
) -> tuple[Mapping[str, LaunchNote], Mapping[str, str]]:
    """Tell all launches that have not ended to begin no further chunk.

    Returns:
        These launches by their names; and why launches of a volume could not be told, by its name.
    """
    told = ask_volumes(volumes, LaunchedJob.cancel)
    launches = {note.launch: note for notes in told.answers.values() for note in notes or ()}
    return launches, told.troubles
