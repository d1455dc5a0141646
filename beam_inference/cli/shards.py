"""The commands before and after the shards of a job: ``prepare`` and ``finish``."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass

from beam_inference.cli.argument_types import positive
from beam_inference.cli.command import PipelineOptions, Subparsers, add_command, set_action
from beam_inference.cli.job_options import JobOptions, TrustOptions, add_job, add_trust
from beam_inference.cli.run import check_job_comes_first
from beam_inference.cli.terminal import print_to_stderr
from beam_inference.errors import COMPLETE, COMPLETE_BUT_QUARANTINED, FAILED


@dataclass(frozen=True)
class PrepareOptions(JobOptions, PipelineOptions, TrustOptions):
    """Options of ``prepare``."""

    shards: int
    resplit: bool
    overwrite: bool


@dataclass(frozen=True)
class FinishOptions(JobOptions, PipelineOptions, TrustOptions):
    """Options of ``finish``."""

    deep: bool
    json: bool


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    parser = add_command(
        subparsers,
        "prepare",
        "divide a job into shards, for run --shard",
        "job.yaml --shards 7",
        description=(
            "Check a job, create its output, and divide its chunks into shards, which run --shard "
            "does in any order, on any machines. Flags of Apache Beam may follow, as for run."
        ),
    )
    add_job(parser)
    parser.add_argument(
        "--shards", type=positive, required=True, metavar="N", help="number of shards"
    )
    parser.add_argument(
        "--resplit",
        action="store_true",
        help="divide a job anew that was divided into another number of shards",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="delete an earlier launch's state, and do every chunk again",
    )
    add_trust(parser)
    set_action(parser, PrepareOptions, prepare, takes_beam_flags=True)
    _add_finish(subparsers)


def _add_finish(subparsers: Subparsers) -> None:
    parser: argparse.ArgumentParser = add_command(
        subparsers,
        "finish",
        "finish a job whose shards have come to their end, and verify it",
        "job.yaml",
        description=(
            "Finish a job once all its shards have come to their end: put together what they "
            "exchange, make its pyramid, and verify it. Any flag of Apache Beam may follow."
        ),
    )
    add_job(parser)
    parser.add_argument(
        "--deep", action="store_true", help="read every chunk back and compare its checksum"
    )
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    set_action(parser, FinishOptions, finish, takes_beam_flags=True)


def prepare(options: PrepareOptions) -> int:
    """Divide a job into shards."""
    check_job_comes_first(options.job, options.beam_flags)
    config = options.load()
    from beam_inference.launch.shards import prepare_shards

    launch = prepare_shards(
        config,
        options.shards,
        options.beam_flags,
        resplit=options.resplit,
        overwrite=options.overwrite,
        trust=options.trust,
    )
    chunks = launch.read_job().plan.chunks.count
    print(
        f"{chunks} chunks are divided into {options.shards} shards: run each with --shard I/"
        f"{options.shards}, I from 0 to {options.shards - 1}, in any order; then finish"
    )
    return COMPLETE


def finish(options: FinishOptions) -> int:
    """Finish a job that was done in shards, verify it, and print the outcome."""
    from beam_inference.cli.status_text import (
        as_json,
        outcome_values,
        print_outcome,
        print_verification,
        verification_values,
    )

    check_job_comes_first(options.job, options.beam_flags)
    config = options.load()
    from beam_inference.launch.launched_job import find_launched_job
    from beam_inference.launch.shards import finish_job

    with print_to_stderr() if options.json else nullcontext():
        outcome = finish_job(config, options.beam_flags, trust=options.trust)
    is_finished = outcome.exit_code in (COMPLETE, COMPLETE_BUT_QUARANTINED)
    report = None
    if is_finished and not outcome.staged_at:
        report = find_launched_job(config, "nothing to verify").verify(deep=options.deep)
    verified = None
    if report is not None:
        verified = verification_values(report, outcome.pyramid, deep=options.deep)
    if options.json:
        print(as_json({**outcome_values(outcome, config), "verification": verified}))
    else:
        view = ["beam-inference", "view", *options.words_of_job]
        print_outcome(outcome, config, options.command_line, view)
        if report is not None:
            print_verification(report, deep=options.deep)
    if report is not None and (report.wrong or (not outcome.exit_code and not report.complete)):
        return FAILED
    return outcome.exit_code
