"""The steps of a job file as things that can be run: jobs, commands in stages, and reports."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from beam_inference.cli import labels, look, volumes
from beam_inference.cli.command import CommandParser
from beam_inference.config.cohort import Cohort
from beam_inference.config.fields import meant_hint
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import absolute_path
from beam_inference.config.places import Places
from beam_inference.config.steps import CommandLine, Steps, check_order, places_of
from beam_inference.errors import ConfigError
from beam_inference.volumes.holes import holes_url
from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of

if TYPE_CHECKING:
    from beam_inference.cli.run import RunOptions
    from beam_inference.job.stage_job import StageJob
    from beam_inference.launch.step_progress import StepProgress


@dataclass(frozen=True)
class JobAction:
    """A step that is a job.

    Attributes:
        job: the job, of one volume or of several.
    """

    job: JobConfig | Cohort

    @property
    def description(self) -> str:
        """What the step does, in a few words."""
        if isinstance(self.job, Cohort):
            return f"a job of {len(self.job.volumes)} volumes"
        return f"a job, to {self.job.output.path}"

    @property
    def places(self) -> Places:
        """The places that it reads and writes."""
        return places_of(self.job)

    def has_begun(self) -> bool:
        """Return whether it was launched."""
        from beam_inference.launch.step_progress import find_launched_jobs

        return any(job is not None for job in find_launched_jobs(self.job))

    def progress(self) -> StepProgress:
        """Return how far it is."""
        from beam_inference.launch.step_progress import job_progress

        return job_progress(self.job)


@dataclass(frozen=True)
class _Kind:
    """A command that makes something in stages.

    Attributes:
        run: the command.
        read: the options that name what it reads.
        written: the option that names what it writes.
        stages: opens what it reads, and plans its stages.
        records: name of the folder of its records.
        is_added: whether what it writes is added to what it reads.
    """

    run: Callable[[Any], int]
    read: tuple[str, ...]
    written: str
    stages: Callable[[Any], list[StageJob]]
    records: str
    is_added: bool = False


def _levels_stages(options: volumes.LevelsOptions) -> list[StageJob]:
    return [volumes.levels_plan(options).job]


def _pyramid_stages(options: volumes.PyramidOptions) -> list[StageJob]:
    return [volumes.pyramid_plan(options).job()]


def _components_stages(options: labels.ComponentsOptions) -> list[StageJob]:
    from beam_inference.segmentation.make_labels import label_jobs

    return label_jobs(labels.components_plan(options), pyramid=options.pyramid)


def _segment_stages(options: labels.SegmentOptions) -> list[StageJob]:
    from beam_inference.segmentation.make_labels import label_jobs

    return label_jobs(labels.segment_plan(options), pyramid=options.pyramid)


def _convert_stages(options: volumes.ConvertOptions) -> list[StageJob]:
    return [_block_stages(volumes.conversion_plan(options))]


def _resample_stages(options: volumes.ResampleOptions) -> list[StageJob]:
    return [_block_stages(volumes.resampling_plan(options))]


def _block_stages(plan: Any) -> StageJob:
    from beam_inference.conversion.block_conversion import BlockConversion

    assert isinstance(plan, BlockConversion)  # single files are refused before
    return plan.job()


_KINDS = {
    "convert": _Kind(volumes.convert, ("source",), "target", _convert_stages, "convert"),
    "resample": _Kind(volumes.resample, ("source", "like"), "target", _resample_stages, "convert"),
    "levels": _Kind(volumes.levels, ("volume", "mask"), "to", _levels_stages, "levels"),
    "pyramid": _Kind(
        volumes.pyramid, ("volume",), "volume", _pyramid_stages, "pyramid", is_added=True
    ),
    "components": _Kind(labels.components, ("source",), "target", _components_stages, "components"),
    "segment": _Kind(labels.segment, ("source",), "target", _segment_stages, "segment"),
}
_REPORT = "report"


@dataclass(frozen=True)
class CommandAction:
    """A step that is a command in stages.

    Attributes:
        line: the command.
        kind: what it does.
        options: its options, with absolute paths.
    """

    line: CommandLine
    kind: _Kind
    options: Any

    @property
    def description(self) -> str:
        """The command."""
        return self.line.text

    @property
    def places(self) -> Places:
        """The places that it reads and writes."""
        written = [url_of(getattr(self.options, self.kind.written))]
        if self.kind.run is volumes.levels:
            written += [self._records_url, holes_url(written[0])]
        return Places(
            tuple(url_of(path) for name in self.kind.read for path in self._paths(name)),
            tuple(written),
            self.kind.is_added,
        )

    def _paths(self, name: str) -> list[str]:
        value = getattr(self.options, name)
        return [value] if isinstance(value, str) else list(value or ())

    @property
    def _records_url(self) -> str:
        from beam_inference.launch.count_levels import levels_records_url

        target = getattr(self.options, self.kind.written)
        is_file = self.kind.run is volumes.levels
        return levels_records_url(target) if is_file else url_of(target)

    def has_begun(self) -> bool:
        """Return whether there are records of it."""
        from beam_inference.launch.step_progress import stages_have_begun

        storage = storage_of_environment(LOCAL)
        return stages_have_begun(self.kind.records, self._records_url, storage)

    def progress(self) -> StepProgress:
        """Return how far it is; what it reads must be there."""
        from beam_inference.launch.step_progress import stages_progress

        progress = stages_progress(self.kind.stages(self.options))
        if isinstance(self.options, volumes.LevelsOptions):
            is_written = volumes.levels_plan(self.options).is_written()
            return replace(progress, is_complete=progress.is_complete and is_written)
        return progress

    def run(self, options: RunOptions) -> int:
        """Do what is missing of it."""
        given = {
            "beam_flags": options.beam_flags,
            "command_line": options.command_line,
            "overwrite": options.overwrite,
        }
        return self.kind.run(replace(self.options, **given))


@dataclass(frozen=True)
class ReportAction:
    """A step that writes a page about an earlier one; it is written anew by each run.

    Attributes:
        line: the command.
        options: its options, with an absolute path.
        job: the job that the page is about.
    """

    line: CommandLine
    options: look.ReportOptions
    job: JobConfig | Cohort

    @property
    def description(self) -> str:
        """The command."""
        return self.line.text

    @property
    def places(self) -> Places:
        """The output that it reads, and the page."""
        return Places(places_of(self.job).written, (url_of(self.options.to),))

    def has_begun(self) -> bool:
        """Return False: no page holds up another step, as it is written anew."""
        return False

    def progress(self) -> StepProgress:
        """Return whether the page is there."""
        from beam_inference.launch.step_progress import StepProgress

        return StepProgress(is_complete=Path(self.options.to).exists())

    def run(self, options: RunOptions) -> int:
        """Write the page."""
        overrides = [*options.overrides, *self.options.overrides]
        return look.report(replace(self.options, job=options.job, overrides=overrides))


StepAction: TypeAlias = JobAction | CommandAction | ReportAction


def open_steps(steps: Steps) -> dict[str, StepAction]:
    """Read the commands among steps, and check that the order fits.

    Raises:
        ConfigError: a command is wrong, or a step reads what comes after it.
    """
    actions: dict[str, StepAction] = {}
    for name, step in steps.by_name.items():
        if isinstance(step, CommandLine):
            actions[name] = _open_command(step, f"{steps.source}: steps.{name}", steps, actions)
        else:
            actions[name] = JobAction(step)
    check_order({name: action.places for name, action in actions.items()}, steps.source)
    return actions


class _StepParser(CommandParser):
    """A parser whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        """Raise the message.

        Raises:
            ConfigError: in any case.
        """
        raise ConfigError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:  # noqa: ARG002
        """Refuse --help and the like, which end a program.

        Raises:
            ConfigError: in any case.
        """
        raise ConfigError(message or "it would only print its help")


def _open_command(
    line: CommandLine, where: str, steps: Steps, earlier: Mapping[str, StepAction]
) -> StepAction:
    command = line.words[0]
    known = [*_KINDS, _REPORT]
    if command not in known:
        raise ConfigError(
            f"{where}: {command} is no command that a step can be: expected a job, by its keys, or "
            f"one of {', '.join(known)}{meant_hint(command, known)}"
        )
    parser = _StepParser(prog="beam-inference", allow_abbrev=False)
    subparsers = parser.add_subparsers(required=True)
    for module in (volumes, labels, look):
        module.add(subparsers)
    try:
        arguments, unknown = parser.parse_known_args(line.words)
    except ConfigError as error:
        raise ConfigError(f"{where}: {line.text}: {error}") from None
    _check_arguments(arguments, unknown, f"{where}: {line.text}")
    if command == _REPORT:
        return _open_report(line, arguments, where, steps, earlier)
    kind = _KINDS[command]
    arguments.beam_flags = arguments.command_line = ()
    options = arguments.options.from_arguments(arguments)
    changes = {name: _absolute(getattr(options, name), line) for name in {*kind.read, kind.written}}
    options = replace(options, **changes)
    if isinstance(options, volumes.ConvertOptions | volumes.ResampleOptions):
        _check_is_volume(options, where)
    return CommandAction(line, kind, options)


def _absolute(value: Any, line: CommandLine) -> Any:
    """A path, or paths, as seen from the job file's folder."""
    if value is None or isinstance(value, str):
        return value and absolute_path(value, line.folder)
    return [absolute_path(path, line.folder) for path in value]


def _check_arguments(arguments: argparse.Namespace, unknown: list[str], where: str) -> None:
    """Refuse what a step takes from ``run``. Raises ConfigError."""
    given = [
        flag
        for flag in ("overwrite", "json", "dry_run", "debug")
        if getattr(arguments, flag, False) is True
    ]
    if arguments.log_format != "text":
        given.append("log_format")
    if unknown or given:
        flags = [*unknown, *(f"--{flag}" for flag in given)]
        raise ConfigError(
            f"{where}: {' '.join(flags)} cannot be given for a step. Flags of Beam and the like "
            "are given to run, for all steps"
        )


def _check_is_volume(options: volumes.ConvertOptions | volumes.ResampleOptions, where: str) -> None:
    from beam_inference.conversion.convert import is_single_file

    if is_single_file(options.target, options.format):
        raise ConfigError(
            f"{where}: {options.target} is a single file, which no launch goes on with: a step "
            "writes a volume of blocks. Give the command by hand, after the steps"
        )


def _open_report(
    line: CommandLine,
    arguments: argparse.Namespace,
    where: str,
    steps: Steps,
    earlier: Mapping[str, StepAction],
) -> ReportAction:
    """The report of an earlier step, which the command names where it else names a job file."""
    options = look.ReportOptions.from_arguments(arguments)
    jobs = [name for name, action in earlier.items() if isinstance(action, JobAction)]
    if options.job not in jobs:
        raise ConfigError(
            f"{where}: report takes the name of an earlier step that is a job, here one of "
            f"{', '.join(jobs) or 'none'}; found {options.job}"
        )
    if options.step is not None:
        raise ConfigError(f"{where}: report takes the name of a step at its beginning, not --step")
    to = absolute_path(options.to, line.folder)
    if "://" in to:
        raise ConfigError(
            f"{where}: a report is written to this machine's disks only: give the command by hand, "
            "after the steps"
        )
    job = steps.job(options.job)
    return ReportAction(line, replace(options, to=to, step=options.job), job)
