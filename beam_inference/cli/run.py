"""The command ``run``, and its flags for launchers that know no commands."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from beam_inference.beam.dataflow_gpus import (
    GpuOptions,
    add_gpu_flags,
    check_device,
    dataflow_flags,
    gpu_options,
)
from beam_inference.cli.argument_types import duration, seed, shard, share, some_text
from beam_inference.cli.command import (
    EXIT_CODES,
    PipelineOptions,
    Subparsers,
    add_command,
    add_logging,
    set_action,
)
from beam_inference.cli.job_options import JobOptions, TrustOptions, add_overrides, add_trust
from beam_inference.cli.terminal import print_to_stderr
from beam_inference.errors import TRY_AGAIN, AskedToStop, ConfigError
from beam_inference.job.shards import Shard
from beam_inference.launch.schedulers import shard_of_scheduler

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.job import JobConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions(JobOptions, PipelineOptions, TrustOptions):
    """Options of ``run``."""

    chunks: tuple[str, ...]
    redo: bool
    sample: float | None
    seed: int
    shard: Shard | Literal["auto"] | None
    stop_after: float | None
    no_claims: bool
    overwrite: bool
    gpus: GpuOptions | None
    log_format: str
    json: bool

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The options of this class, taken from parsed arguments.

        Raises:
            ConfigError: the options on GPUs contradict each other.
        """
        return super().from_arguments(
            argparse.Namespace(**vars(arguments), gpus=gpu_options(arguments))
        )


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = add_command(
        subparsers,
        "run",
        "run a job, or the part of it that is missing",
        "job.yaml",
        "job.yaml --sample 0.001",
        "job.yaml --chunks quarantine.jsonl",
        "job.yaml --chunks 0:64,512:1024,0:256 --redo",
        "job.yaml --shard 3/7 --stop_after 3h50m",
        "gs://bucket/job.yaml --runner=DataflowRunner --project=… --region=… "
        "--sdk_container_image=…",
        description=(
            "Run a job, or the part of it that is missing. Any flag of Apache Beam may follow, "
            "such as --runner=…"
        ),
    )
    parser.add_argument("job", metavar="JOB.YAML", help="the job file, a path or URL")
    _add_run_flags(parser)
    parser.add_argument(
        "--shard",
        type=shard,
        metavar="I/N",
        help=(
            "do only shard I of N, I from 0 to N - 1, of a job that prepare has divided; auto: as "
            "Slurm, AWS Batch or Google Batch says"
        ),
    )
    parser.add_argument(
        "--stop_after",
        "--stop-after",
        type=duration,
        metavar="TIME",
        help=(
            "begin no chunk after this time, such as 3h50m, and exit with 75 if some are left: run "
            "it again"
        ),
    )
    parser.add_argument(
        "--no_claims",
        "--no-claims",
        action="store_true",
        help=(
            "claim no chunks: this launch is alone. Otherwise several launches of a job share its "
            "chunks"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    set_action(parser, RunOptions, run, takes_beam_flags=True)


def flags_parser() -> argparse.ArgumentParser:
    """The parser for launchers that know no commands: the flags of ``run``, and ``--job``."""
    parser = argparse.ArgumentParser(
        description="Run a beam-inference job.", epilog=EXIT_CODES, allow_abbrev=False
    )
    parser.add_argument(
        "--job", required=True, metavar="JOB.YAML", help="the job file, a path or URL"
    )
    _add_run_flags(parser)
    set_action(parser, RunOptions, run, takes_beam_flags=True)
    parser.set_defaults(json=False, shard=None, stop_after=None, no_claims=False)
    return parser


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    parser.add_argument(
        "--chunks",
        type=some_text,
        metavar="WHICH",
        action="append",
        default=[],
        help=(
            "do only these chunks: indices (3,5,10-20), those that a box touches "
            "(z0:z1,y0:y1,x0:x1), or a file of them: a quarantine file, lines, CSV, or a state of "
            "Neuroglancer with boxes"
        ),
    )
    parser.add_argument(
        "--redo",
        action="store_true",
        help="do the chunks that --chunks names again, also those that are done",
    )
    parser.add_argument(
        "--sample",
        type=share,
        metavar="SHARE",
        help="do only this share of the chunks, such as 0.001, as a pilot",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="seed of the sample: another seed chooses other chunks (default: 0)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete an earlier launch's state, and do every chunk again",
    )
    add_trust(parser)
    add_gpu_flags(parser)
    add_logging(parser)


def drop_empty_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Drop the flags that a user would not type, from a form that passes every field.

    Args:
        words: the fields: empty ones as ``--flag=``, switches as ``--switch=true`` or ``=false``.
        parser: the parser that defines them.

    Returns:
        The words without empty flags, and with switches given or left out.
    """
    switches = {
        option
        for action in parser._actions
        if action.nargs == 0
        for option in action.option_strings
    }
    kept = []
    for word in words:
        name, separator, value = word.partition("=")
        if separator and name in switches:
            if value not in ("true", "false", ""):
                parser.error(f"{name} takes true or false; found {value}")
            if value == "true":
                kept.append(name)
        elif value or not separator or name not in parser._option_string_actions:
            kept.append(word)
    return kept


def run(options: RunOptions) -> int:
    """Run a job, or the part of it that is missing, and print the outcome."""
    check_job_comes_first(options.job, options.beam_flags)
    try:
        return _run(options)
    except AskedToStop:  # before or after the pipeline, which handles signals itself
        if options.shard is None and options.stop_after is None:
            raise
        logger.warning("asked to stop; what is missing is done by the next run")
        return TRY_AGAIN


def _run(options: RunOptions) -> int:
    from beam_inference.config.steps import Steps

    config = options.load_file()
    if isinstance(config, Steps):
        from beam_inference.cli.steps import run_steps

        return run_steps(options, config, _run_job)
    return _run_job(options, config)


def _run_job(options: RunOptions, config: JobConfig | Cohort) -> int:
    """Run a job of one volume, or of several."""
    from beam_inference.config.cohort import Cohort

    return (
        _run_volumes(options, config)
        if isinstance(config, Cohort)
        else _run_volume(options, config)
    )


def _run_volume(options: RunOptions, config: JobConfig) -> int:
    """Run a job of one volume, and print the outcome."""
    from beam_inference.cli.status_text import as_json, outcome_values, print_outcome

    chosen = shard_of_scheduler(os.environ) if options.shard == "auto" else options.shard
    from beam_inference.launch.run_job import run_job  # slow: a mistake in the job is told before

    flags = _flags_with_gpus(options)
    check_device(config.inference.device, options.gpus, flags)
    # with --json, standard output is for the object alone: a network may print, too
    with print_to_stderr() if options.json else nullcontext():
        outcome = run_job(
            config,
            flags,
            chunks=options.chunks,
            redo=options.redo,
            sample=None if options.sample is None else (options.sample, options.seed),
            shard=chosen,
            stop_after=options.stop_after,
            overwrite=options.overwrite,
            trust=options.trust,
            claims=not options.no_claims,
        )
    # the exit code says how the job went, even if nobody reads the summary any more
    with suppress(BrokenPipeError):
        if options.json:
            print(as_json(outcome_values(outcome, config)))
        else:
            print_outcome(
                outcome,
                config,
                options.command_line,
                ["beam-inference", "view", *options.words_of_job],
            )
        sys.stdout.flush()
    return outcome.exit_code


def _run_volumes(options: RunOptions, cohort: Cohort) -> int:
    """Run all volumes of a job file, and print the outcome."""
    from beam_inference.cli.cohort_text import cohort_outcome_values, print_cohort_outcome
    from beam_inference.cli.status_text import as_json

    if options.chunks or options.redo or options.sample is not None or options.shard is not None:
        raise ConfigError(
            "--chunks, --redo, --sample and --shard are for one volume, and the job file has "
            "several: name one with --volume"
        )
    from beam_inference.launch.cohort import run_cohort

    flags = _flags_with_gpus(options)
    check_device(next(iter(cohort.volumes.values())).inference.device, options.gpus, flags)
    with print_to_stderr() if options.json else nullcontext():
        outcome = run_cohort(
            cohort,
            flags,
            stop_after=options.stop_after,
            overwrite=options.overwrite,
            trust=options.trust,
            claims=not options.no_claims,
        )
    with suppress(BrokenPipeError):
        if options.json:
            print(as_json(cohort_outcome_values(outcome, cohort)))
        else:
            print_cohort_outcome(outcome, options.command_to_continue)
        sys.stdout.flush()
    return outcome.exit_code


def check_job_comes_first(job: str, beam_flags: Sequence[str]) -> None:
    """Refuse ``run --runner DirectRunner job.yaml``: argparse takes DirectRunner for the job."""
    if "://" in job or Path(job).exists():
        return
    if any(not flag.startswith("-") for flag in beam_flags):
        raise ConfigError(
            f"there is no job file {job}. Put the job file first, or write flags with =: "
            "--runner=DirectRunner"
        )


def _flags_with_gpus(options: RunOptions) -> list[str]:
    """Beam's flags, with those that the GPU options stand for, which are shown to the user."""
    if options.gpus is None:
        return list(options.beam_flags)
    added = dataflow_flags(options.gpus, options.beam_flags)
    message = f"--gpu={options.gpus.gpu} asks for: {' '.join(added)}"
    if options.log_format == "json":
        logger.info(message)
    else:
        print(message, file=sys.stderr)
    return [*options.beam_flags, *added]
