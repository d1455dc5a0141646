"""A job file of several steps: jobs, and commands on what they make, done one after another.

Each step is what it would be alone, with its own output, state and fingerprint. What one reads of
another is told by their paths.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from beam_inference.config.cohort import VOLUMES, Cohort, merge_values
from beam_inference.config.fields import Json, unknown_key_hint
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import override_value
from beam_inference.config.places import Places, places_of_job
from beam_inference.errors import ConfigError
from beam_inference.foreign_text import shorten_text, shorten_value

STEPS = "steps"
"""The key of the job file that names steps."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_OF_ONE = ("input", "inputs", "output", "outputs", "mask", "model")
"""Sections that an override cannot mean for all of several jobs."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A step that is a command.

    Attributes:
        words: what would be typed after ``beam-inference``.
        folder: a path or a URL; relative paths among the words start from it.
    """

    words: tuple[str, ...]
    folder: str | Path

    @property
    def text(self) -> str:
        """The command as it can be typed into a shell."""
        return shlex.join(self.words)


Step: TypeAlias = JobConfig | Cohort | CommandLine


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a job file, in their order.

    Attributes:
        by_name: the steps.
        source: name of the job file, for messages.
    """

    by_name: Mapping[str, Step]
    source: str

    def of(self, name: str) -> Step:
        """One step.

        Raises:
            ConfigError: there is no such step.
        """
        if name not in self.by_name:
            raise ConfigError(
                f"--step {shorten_text(name)}: {self.source} has no such step; "
                f"{unknown_key_hint(name, list(self.by_name))}"
            )
        return self.by_name[name]

    @property
    def jobs(self) -> dict[str, JobConfig | Cohort]:
        """The steps that are jobs."""
        return {
            name: step for name, step in self.by_name.items() if not isinstance(step, CommandLine)
        }

    def is_job(self, name: str | None) -> bool:
        """Whether a step is a job; one that is not named is none.

        Raises:
            ConfigError: there is no such step.
        """
        return name is not None and not isinstance(self.of(name), CommandLine)

    def job(self, name: str | None) -> JobConfig | Cohort:
        """The job that a step is.

        Args:
            name: of the step; None if none is named, which is refused.

        Raises:
            ConfigError: none is named, there is no such step, or it is a command.
        """
        jobs = list(self.jobs)
        if name is None:
            raise ConfigError(
                f"{self.source} has several steps, and this is for one job: name it with --step, "
                f"one of {', '.join(jobs)}"
            )
        step = self.of(name)
        if isinstance(step, CommandLine):
            raise ConfigError(
                f"--step {name}: this is for jobs, and the step is the command {step.text}. Jobs "
                f"are {', '.join(jobs) or 'none'}"
            )
        return step


def split_steps(
    values: Json, source: str, overrides: Sequence[str] = (), only: str | None = None
) -> dict[str, Json | tuple[str, ...]]:
    """Find out what each step says: the values of a job, or the words of a command.

    Args:
        values: the job file, with the key ``steps``.
        source: its name, for messages.
        overrides: ``key.key=value`` each. Those of ``steps`` are for the file, the others for every
            job.
        only: the step whose job the others are for; None for all.

    Raises:
        ConfigError: ``steps`` or a name is wrong, or an override cannot be for all jobs.
    """
    shared = dict(values)
    if isinstance(values[STEPS], dict):
        # one by one: what aliases of YAML have in common is changed in one step alone
        shared[STEPS] = {name: copy.deepcopy(said) for name, said in values[STEPS].items()}
    others = []
    for override in overrides:
        if override.startswith(f"{STEPS}."):
            override_value(shared, override)
        else:
            others.append(override)
    listed = shared.pop(STEPS)
    _check_names(listed, shared, source)
    steps = {
        name: _step_values(said, shared, f"{source}: {STEPS}.{name}")
        for name, said in listed.items()
    }
    if only is None and sum(isinstance(step, dict) for step in steps.values()) > 1:
        _check_for_all(others)
    for name, step in steps.items():
        if isinstance(step, dict) and only in (None, name):
            for override in others:
                override_value(step, override)
    return steps


def _check_names(listed: Any, shared: Json, source: str) -> None:
    if VOLUMES in shared:
        raise ConfigError(
            f"{source}: {VOLUMES} stands beside {STEPS}: write it into the step whose volumes "
            "these are"
        )
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(
            f"{source}: {STEPS}: expected the steps by names of yours, each a job or a command, "
            "such as objects: components map objects --threshold 128; found "
            f"{shorten_value(listed)}"
        )
    for name in listed:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{source}: {STEPS}: a name has letters, digits, _ . and -, and begins with a "
                f"letter or digit; found {shorten_value(name)}"
            )


def _step_values(said: Any, shared: Json, where: str) -> Json | tuple[str, ...]:
    """What a step says: of a job with all that the jobs share."""
    if isinstance(said, dict):
        single = copy.deepcopy(shared)
        for key, value in said.items():
            merge_values(single, key, value)
        return single
    if not isinstance(said, str):
        raise ConfigError(
            f"{where}: expected a job (its keys) or a command (a line of text, such as segment "
            f"affinities objects --threshold 153 --low 26 --high 253); found {shorten_value(said)}"
        )
    try:
        words = tuple(shlex.split(said))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}: {shorten_text(said)}") from None
    words = words[1:] if words[:1] == ("beam-inference",) else words
    if not words:
        raise ConfigError(f"{where}: expected a job or a command; found no word")
    return words


def _check_for_all(overrides: Iterable[str]) -> None:
    """Refuse overrides that would give several jobs one place or one network."""
    for override in overrides:
        key = override.partition("=")[0]
        if key.split(".")[0] in _OF_ONE or key == "job.state_path":
            raise ConfigError(
                f"{shorten_text(key)} would be the same in every step: name one with --step, or "
                f"write --set {STEPS}.NAME.{shorten_text(key)}=…"
            )


def places_of(job: JobConfig | Cohort) -> Places:
    """The places that a job of one volume, or of several, reads and writes."""
    if isinstance(job, JobConfig):
        return places_of_job(job)
    each = [places_of_job(single) for single in job.volumes.values()]
    return Places(
        tuple(dict.fromkeys(place for places in each for place in places.read)),
        tuple(dict.fromkeys(place for places in each for place in places.written)),
    )


def check_order(places: Mapping[str, Places], source: str) -> None:
    """Refuse steps that read what a later one writes, or of which two write into one place.

    Args:
        places: what each step reads and writes, in their order.
        source: name of the job file, for messages.

    Raises:
        ConfigError: there are such steps.
    """
    names = list(places)
    for position, name in enumerate(names):
        for later in names[position + 1 :]:
            place = places[name].reads_of(places[later])
            if place is not None and not places[later].is_added:
                raise ConfigError(
                    f"{source}: the step {name} reads {place}, which the later step {later} "
                    f"writes: put {later} before {name}"
                )
            place = places[later].writes_of(places[name])
            if place is not None and not (places[later].is_added or places[name].is_added):
                raise ConfigError(
                    f"{source}: the steps {name} and {later} both write {place}: give each an "
                    "output of its own"
                )


def needed_steps(places: Mapping[str, Places], name: str) -> list[str]:
    """The earlier steps whose results a step reads, directly or by others, in their order."""
    names = list(places)
    needed = {name}
    for earlier in reversed(names[: names.index(name)]):
        if any(places[later].reads_of(places[earlier]) is not None for later in needed):
            needed.add(earlier)
    return [each for each in names if each in needed - {name}]
