"""The commands on a job that was launched: ``status``, ``cancel``, ``verify`` and ``clean``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from beam_inference.cli.argument_types import seed, share
from beam_inference.cli.command import Subparsers, add_command, set_action
from beam_inference.cli.job_options import (
    JobOptions,
    TrustOptions,
    add_job,
    add_trust,
    load_launched_job,
)
from beam_inference.errors import COMPLETE, FAILED, ConfigError

if TYPE_CHECKING:
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.steps import Steps
    from beam_inference.job.records import LaunchNote

WATCH_SECONDS = 5.0
"""Pause of ``status --watch``, at least."""


@dataclass(frozen=True)
class StatusOptions(JobOptions):
    """Options of ``status``."""

    watch: bool
    json: bool


@dataclass(frozen=True)
class VerifyOptions(JobOptions, TrustOptions):
    """Options of ``verify``."""

    deep: bool
    recompute: float | None
    seed: int | None
    json: bool


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_status(subparsers)
    cancel_parser = add_command(
        subparsers,
        "cancel",
        "tell all who work on a job, wherever they are, to stop",
        "job.yaml",
        description=(
            "Tell all launches of a job, wherever they run, to begin no further chunk. What is "
            "under way is finished; run does what is missing."
        ),
    )
    add_job(cancel_parser)
    set_action(cancel_parser, JobOptions, cancel)
    _add_verify(subparsers)
    clean_parser = add_command(
        subparsers,
        "clean",
        "remove seam files and drafts that a complete job has left behind",
        "job.yaml",
    )
    add_job(clean_parser)
    set_action(clean_parser, JobOptions, clean)


def _add_status(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "status",
        "show the progress of a job, on any runner, from any machine",
        "job.yaml",
        "job.yaml --watch",
    )
    add_job(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--watch",
        action="store_true",
        help="repeat every few seconds until nothing is missing",
    )
    how.add_argument("--json", action="store_true", help="print JSON")
    set_action(parser, StatusOptions, status)


def _add_verify(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "verify",
        "check whether a job is complete; exit code 0 only if it is",
        "job.yaml",
        "job.yaml --deep",
        "job.yaml --recompute 0.001",
    )
    add_job(parser)
    parser.add_argument(
        "--deep", action="store_true", help="read every chunk back and compare its checksum"
    )
    parser.add_argument(
        "--recompute",
        type=share,
        metavar="SHARE",
        help=(
            "compute this share of the chunks again, such as 0.001, drawn at random, and compare "
            "every bit with the output; one chunk at least"
        ),
    )
    parser.add_argument(
        "--seed",
        type=seed,
        metavar="N",
        help="seed of the draw of --recompute, as printed before (default: a new one)",
    )
    add_trust(parser, "; for --recompute only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    set_action(parser, VerifyOptions, verify)


def status(options: StatusOptions, watch_seconds: float = WATCH_SECONDS) -> int:
    """Print how far a job is; with ``watch`` again and again until nothing is missing."""
    while True:
        start = time.monotonic()
        progress = _print_status(options)
        sys.stdout.flush()
        if progress.is_finished or not options.watch:
            return FAILED if progress.is_damaged else COMPLETE
        # the pause grows with the cost of looking
        time.sleep(max(watch_seconds, 10 * (time.monotonic() - start)))


@dataclass(frozen=True)
class _Progress:
    """What the exit code and ``--watch`` depend on.

    Attributes:
        is_finished: whether nothing more is to come of the job.
        is_damaged: whether receipts were read that cannot be believed.
    """

    is_finished: bool
    is_damaged: bool


def _print_status(options: StatusOptions) -> _Progress:
    """Print how far a job is."""
    from beam_inference.cli.status_text import (
        as_json,
        print_crew,
        print_pyramid_status,
        print_status,
        status_values,
    )
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.steps import Steps
    from beam_inference.launch.launched_job import find_launched_job

    jobs = options.load_chosen()
    if isinstance(jobs, Steps):
        return _print_status_of_steps(jobs, options)
    if isinstance(jobs, Cohort):
        return _print_status_of_volumes(jobs, options)
    launched = find_launched_job(jobs, "nothing to tell")
    progress = launched.status()
    pyramid = launched.pyramid_status()
    shards = launched.shard_progress()
    if options.json:
        print(as_json(status_values(progress, pyramid, shards, launched.crew())))
    else:
        print_status(progress)
        if progress.missing:  # of a complete job, signs of killed workers may be left
            print_crew(launched.crew())
        if shards is not None:
            print(f"{shards.ended} of {shards.count} shards have come to their end")
        if pyramid is not None:
            print_pyramid_status(pyramid, waits=progress.done < progress.planned)
    pyramid_to_come = pyramid is not None and not pyramid.complete and not progress.quarantined
    return _Progress(
        is_finished=not (progress.missing or pyramid_to_come), is_damaged=bool(progress.damaged)
    )


def _print_status_of_steps(steps: Steps, options: StatusOptions) -> _Progress:
    """Print how far the steps of a job file are."""
    from beam_inference.cli.steps import print_steps_status

    is_finished = print_steps_status(steps, options.step, as_json=options.json)
    return _Progress(is_finished, is_damaged=False)


def _print_status_of_volumes(cohort: Cohort, options: StatusOptions) -> _Progress:
    """Print how far the volumes of a job are."""
    from beam_inference.cli.cohort_text import cohort_status_values, print_cohort_status
    from beam_inference.cli.status_text import as_json, print_crew
    from beam_inference.launch.launched_cohort import ask_volumes, find_launched_volumes
    from beam_inference.launch.launched_job import LaunchedJob

    volumes = find_launched_volumes(cohort, "nothing to tell")
    told = ask_volumes(volumes, LaunchedJob.status)
    if options.json:
        print(as_json(cohort_status_values(told)))
    else:
        print_cohort_status(told)
        unfinished = [
            each.job for each in volumes if (of := told.answers[each.name]) and of.missing
        ]
        print_crew([sign for job in unfinished if job is not None for sign in job.crew()])
    to_come = told.expected.values()
    damaged = (status is not None and status.damaged for status in told.answers.values())
    return _Progress(
        is_finished=all(status is not None and not status.missing for status in to_come),
        is_damaged=bool(told.troubles) or any(damaged),
    )


def verify(options: VerifyOptions) -> int:
    """Check whether a job is complete, and print what was found."""
    from rich.console import Console

    from beam_inference.cli.status_text import (
        as_json,
        print_pyramid_status,
        print_verification,
        verification_values,
    )
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.steps import Steps
    from beam_inference.launch.launched_job import find_launched_job

    if options.recompute is None and (options.seed is not None or options.trust):
        raise ConfigError(
            "--seed, --allow_pickle and --trust_model belong to --recompute: give it a share, too"
        )
    jobs = options.load_chosen()
    if isinstance(jobs, Steps):
        return _verify_steps(jobs, options)
    if isinstance(jobs, Cohort):
        return _verify_volumes(jobs, options)
    launched = find_launched_job(jobs, "nothing to verify")
    with Console(stderr=True).status("verifying") as line:
        report = launched.verify(
            deep=options.deep,
            recompute=options.recompute,
            seed=options.seed,
            trust=options.trust,
            progress=lambda done: line.update(f"verifying: {done:,} chunks checked"),
        )
    pyramid = launched.pyramid_status()
    values = verification_values(report, pyramid, deep=options.deep)
    # the exit code says what was found, even if nobody reads the report any more
    with suppress(BrokenPipeError):
        if options.json:
            print(as_json(values))
        else:
            print_verification(report, deep=options.deep)
            if pyramid is not None:
                print_pyramid_status(pyramid, waits=report.receipts < report.chunks)
        sys.stdout.flush()
    return COMPLETE if values["complete"] else FAILED


def _verify_steps(steps: Steps, options: VerifyOptions) -> int:
    """Check whether all steps of a job file are complete, and print what was found."""
    from beam_inference.cli.steps import verify_steps

    if options.recompute is not None:
        raise ConfigError(
            "--recompute is for one job, and the job file has several steps: name one with --step"
        )
    return verify_steps(steps, options.step, deep=options.deep, as_json=options.json)


def _verify_volumes(cohort: Cohort, options: VerifyOptions) -> int:
    """Check whether all volumes of a job are complete, and print what was found."""
    from rich.console import Console

    from beam_inference.cli.cohort_text import (
        cohort_verification_values,
        print_cohort_verification,
    )
    from beam_inference.cli.status_text import as_json
    from beam_inference.launch.launched_cohort import ask_volumes, find_launched_volumes

    if options.recompute is not None:
        raise ConfigError(
            "--recompute is for one volume, and the job file has several: name one with --volume"
        )
    volumes = find_launched_volumes(cohort, "nothing to verify")
    with Console(stderr=True).status("verifying"):
        told = ask_volumes(volumes, lambda job: job.verify(deep=options.deep))
    values = cohort_verification_values(told, deep=options.deep)
    with suppress(BrokenPipeError):
        if options.json:
            print(as_json(values))
        else:
            print_cohort_verification(told, deep=options.deep)
        sys.stdout.flush()
    return COMPLETE if values["complete"] else FAILED


def cancel(options: JobOptions) -> int:
    """Tell all launches of a job to stop."""
    from beam_inference.cli.cohort_text import print_troubles
    from beam_inference.config.cohort import Cohort
    from beam_inference.config.steps import Steps
    from beam_inference.launch.launched_cohort import cancel_volumes, find_launched_volumes
    from beam_inference.launch.launched_job import find_launched_job

    jobs = options.load_chosen()
    troubles: Mapping[str, str] = {}
    if isinstance(jobs, Steps):
        stopped = _cancel_steps(jobs)
    elif isinstance(jobs, Cohort):
        notes, troubles = cancel_volumes(find_launched_volumes(jobs, "nothing to cancel"))
        stopped = [*notes.values()]
    else:
        stopped = find_launched_job(jobs, "nothing to cancel").cancel()
    if not stopped:
        print("no launch of this job is under way")
    for note in stopped:
        print(
            f"launch {note.launch} on {note.node}, begun at {note.started:%F %T %Z}: told to stop"
        )
    print_troubles(troubles)
    return FAILED if troubles else COMPLETE


def _cancel_steps(steps: Steps) -> list[LaunchNote]:
    """Tell all launches of the jobs among steps to stop; these launches."""
    from beam_inference.launch.step_progress import find_launched_jobs

    notes = {
        note.launch: note
        for step in steps.jobs.values()
        for job in find_launched_jobs(step)
        if job is not None
        for note in job.cancel()
    }
    if not notes:
        print("a step that is a command is stopped where it runs: by Ctrl-C, or SIGTERM")
    return [*notes.values()]


def clean(options: JobOptions) -> int:
    """Remove what a complete job has no use for.

    There are seam files if a worker that was given up for dead wrote them late, and drafts of files
    if a process was killed while it wrote them.
    """
    launched = load_launched_job(options, "nothing to clean")
    print(f"{launched.remove_seam_files()} seam files removed")
    drafts = launched.remove_drafts()
    if drafts:
        print(f"{drafts} drafts of killed processes removed")
    return COMPLETE
