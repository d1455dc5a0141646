"""What the commands on jobs share: the job file, its overrides, and the job that was launched."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from beam_inference.cli.command import Options, add_logging
from beam_inference.models.trust import Trust

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.job import JobConfig
    from beam_inference.config.steps import Steps
    from beam_inference.launch.launched_job import LaunchedJob


@dataclass(frozen=True)
class TrustOptions(Options):
    """Options of every command that loads a network.

    Attributes:
        allow_pickle: whether code in pickled files may run.
        trust_model: whether all code that the network's files carry may run.
    """

    allow_pickle: bool
    trust_model: bool

    @property
    def trust(self) -> Trust:
        """Which code that the network's files carry may run."""
        return Trust.of_flags(allow_pickle=self.allow_pickle, trust_model=self.trust_model)


def add_trust(parser: argparse.ArgumentParser, rest: str = "") -> None:
    """Add the flags that let code of a network's files run; ``rest`` ends their help."""
    parser.add_argument(
        "--allow_pickle",
        "--allow-pickle",
        action="store_true",
        help=f"load model files that can execute code they carry{rest}",
    )
    parser.add_argument(
        "--trust_model",
        "--trust-model",
        action="store_true",
        help=f"the same, and run Python source in packages of networks{rest}",
    )


@dataclass(frozen=True)
class OverrideOptions(Options):
    """Options of every command that reads a job file.

    Attributes:
        overrides: ``key.key=value`` each; they replace what the job file says.
        volume: the volume, of a job file with several; None for the only one, or for all.
        step: the step, of a job file with several; None for all.
    """

    overrides: Sequence[str]
    volume: str | None
    step: str | None

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The options of this class, taken from parsed arguments; see :func:`overrides_of`."""
        return super().from_arguments(
            argparse.Namespace(**vars(arguments), overrides=overrides_of(arguments))
        )


@dataclass(frozen=True)
class JobOptions(OverrideOptions):
    """Options of every command on one job.

    Attributes:
        job: path or URL of the job file.
    """

    job: str

    def load(self) -> JobConfig:
        """Read the job file and apply the overrides."""
        from beam_inference.launch.job_files import load_job

        return load_job(self.job, self.overrides, self.volume, self.step)

    def load_all(self) -> JobConfig | Cohort:
        """Read the job file and apply the overrides; of several volumes all, if none is named."""
        from beam_inference.launch.job_files import load_jobs

        return self.choose_volume(load_jobs(self.job, self.overrides, self.step))

    def load_file(self) -> JobConfig | Cohort | Steps:
        """Read the job file and apply the overrides; of several steps all, even if one is named."""
        from beam_inference.config.steps import Steps
        from beam_inference.launch.job_files import load_job_file

        loaded = load_job_file(self.job, self.overrides, self.step)
        return loaded if isinstance(loaded, Steps) else self.choose_volume(loaded)

    def load_chosen(self) -> JobConfig | Cohort | Steps:
        """Read the job file and apply the overrides; of several steps the job that is named.

        Returns:
            All steps if none is named, or one that is a command.
        """
        from beam_inference.config.steps import Steps

        loaded = self.load_file()
        if isinstance(loaded, Steps) and loaded.is_job(self.step):
            return self.choose_volume(loaded.job(self.step))
        return loaded

    def choose_volume(self, jobs: JobConfig | Cohort) -> JobConfig | Cohort:
        """The volume that is named, of several; all if none is."""
        from beam_inference.launch.job_files import job_of_volume

        return jobs if self.volume is None else job_of_volume(jobs, self.volume, self.job)

    @property
    def words_of_job(self) -> list[str]:
        """The arguments that name this job to another command."""
        named = {"step": self.step, "volume": self.volume}
        return [
            self.job,
            *(f"--{flag}={name}" for flag, name in named.items() if name is not None),
            *(f"--set={override}" for override in self.overrides),
        ]


def load_launched_job(options: JobOptions, consequence: str) -> LaunchedJob:
    """Read the job file, and find the job that was launched with it.

    Args:
        options: the job file and its overrides.
        consequence: what it means if there is none, such as "nothing to verify".

    Raises:
        StateError: the state folder holds no job.
    """
    from beam_inference.launch.launched_job import find_launched_job

    return find_launched_job(options.load(), consequence)


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command on one job: the job file, its overrides, and logging."""
    parser.add_argument("job", metavar="JOB.YAML", help="the job file, a path or URL")
    add_overrides(parser)
    add_logging(parser)


class _Override(NamedTuple):
    """A key of the job file that has a flag of its own. Without a metavar it is true or false."""

    key: str
    metavar: str | None
    help: str


_OVERRIDES = {
    "input": _Override("input.path", "URL", "the volume to read"),
    "output": _Override("output.path", "URL", "the volume to write"),
    "model": _Override("model.path", "URL", "the network"),
    "weights": _Override("model.weights", "URL", "the network's weights, if model is a factory"),
    "resume": _Override("job.resume", None, "skip chunks that have a receipt"),
    "max_failed_chunks": _Override(
        "job.max_failed_chunks", "N", "fail if more chunks than this are quarantined"
    ),
}


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each key that often changes between runs, and ``--set`` for any other key."""
    group = parser.add_argument_group("instead of what the job file says")
    for name, override in _OVERRIDES.items():
        group.add_argument(
            f"--{name}",
            metavar=override.metavar,
            choices=("true", "false") if override.metavar is None else None,
            help=f"{override.help} ({override.key})",
        )
    group.add_argument(
        "--roi",
        type=_roi,
        metavar="START:STOP",
        help="the box to produce, such as 0x0x0:64x512x512 (z, y, x)",
    )
    group.add_argument(
        "--volume",
        metavar="NAME",
        help="only this volume, of a job file with several",
    )
    group.add_argument("--step", metavar="NAME", help="only this step, of a job file with several")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.KEY=VALUE",
        help="any key of the job file; repeatable",
    )


def _roi(text: str) -> str:
    corner = r"-?\d+x-?\d+x-?\d+"
    if not re.fullmatch(f"{corner}:{corner}", text):
        raise argparse.ArgumentTypeError(
            f"expected START:STOP such as 0x0x0:64x512x512, in z, y, x; found {text}"
        )
    return text


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """List the overrides among parsed arguments as ``key.key=value``, those of ``--set`` last."""
    overrides = []
    for name, override in _OVERRIDES.items():
        value = getattr(arguments, name)
        if value is not None:
            text = json.dumps(value) if override.metavar == "URL" else value
            overrides.append(f"{override.key}={text}")
    if arguments.roi is not None:
        start, _, stop = arguments.roi.partition(":")
        overrides += [f"roi.start={start}", f"roi.stop={stop}"]
    return [*overrides, *arguments.set]
