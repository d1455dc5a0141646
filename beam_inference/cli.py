"""The command line: ``beam-inference plan | run | verify | demo | schema``.

Exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within the bound, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from beam_inference.errors import (
    BAD_INPUT,
    COMPLETE,
    FAILED,
    INTERRUPTED,
    BeamInferenceError,
    ConfigError,
    StateError,
    UserError,
)

_EPILOG = """\
exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within job.max_failed_chunks,
130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors of ours become one message on standard error."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    known, beam_flags = parser.parse_known_args(words)
    if beam_flags and known.command is not _run:
        parser.error(f"unrecognized arguments: {' '.join(beam_flags)}")
    known.beam_flags = beam_flags
    known.words = ["beam-inference", *words]
    return guarded(known)


def run_with_flags(arguments: Sequence[str] | None = None) -> int:
    """``run``, for launchers that pass flags only: ``--job=job.yaml`` and the flags of ``run``."""
    parser = argparse.ArgumentParser(description="Run a beam-inference job.", epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--job", required=True, metavar="JOB.YAML", help="the job file")
    _add_run_flags(parser)
    words = list(sys.argv[1:] if arguments is None else arguments)
    known, beam_flags = parser.parse_known_args(words)
    known.beam_flags = beam_flags
    known.words = ["python", sys.argv[0], *words]
    known.command = _run
    return guarded(known)


def guarded(known: argparse.Namespace) -> int:
    """Run the parsed command, with errors told as one message."""
    debug = getattr(known, "debug", False)
    level = logging.DEBUG if debug else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s: %(message)s", stream=sys.stderr)
    # Beam logs every exception with its stack, at each level it passes; the message is told once, by us.
    logging.getLogger("apache_beam").setLevel(logging.INFO if debug else logging.CRITICAL)
    try:
        with _terminable():
            return int(known.command(known))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BeamInferenceError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        if debug:
            raise
        reason = " ".join(str(error).split()) or "no message"
        print(
            f"error: {type(error).__name__}: {reason[:500]}\nThis was not foreseen, and is a defect of beam-inference. "
            "With --debug the command shows where it happened.",
            file=sys.stderr,
        )
        return FAILED


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: while a job runs both stop it gently; before and after that, both end the command."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="beam-inference",
        description="Run a trained 3-D ConvNet over a volume of any size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="show what a job comes to; submits nothing", allow_abbrev=False)
    _add_job(plan)
    plan.set_defaults(command=_plan)

    run = commands.add_parser(
        "run",
        help="run a job, or what is missing of it",
        description="Run a job, or what is missing of it. Any flag of Apache Beam may follow, such as --runner=…",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("job", metavar="JOB.YAML", help="the job file")
    _add_run_flags(run)
    run.set_defaults(command=_run)

    verify = commands.add_parser("verify", help="is a job complete? exit 0 only if it is", allow_abbrev=False)
    _add_job(verify)
    verify.add_argument("--deep", action="store_true", help="read every chunk back and compare its checksum")
    verify.set_defaults(command=_verify)

    demo = commands.add_parser("demo", help="segment a brain MRI template, end to end", allow_abbrev=False)
    demo.add_argument("folder", nargs="?", default="demo-output", help="where to put it (default: demo-output)")
    _add_debug(demo)
    demo.set_defaults(command=_demo)

    schema = commands.add_parser("schema", help="print the job file's JSON schema", allow_abbrev=False)
    schema.set_defaults(command=_schema)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB.YAML", help="the job file")
    _add_set(parser)
    _add_debug(parser)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.KEY=VALUE", help="override a key of the job file; repeatable"
    )


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    _add_set(parser)
    parser.add_argument(
        "--chunks", metavar="FILE", help="do only the chunks of a quarantine file, or indices one a line"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="delete an earlier launch's state; do every chunk anew"
    )
    parser.add_argument("--allow_pickle", action="store_true", help="load model files that can execute code they carry")
    _add_debug(parser)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show all log messages, Beam's too, and stack traces")


def _plan(known: argparse.Namespace) -> int:
    from beam_inference.files import load_job
    from beam_inference.report import print_plan
    from beam_inference.survey import survey

    print_plan(survey(load_job(known.job, known.set)))
    return 0


def _run(known: argparse.Namespace) -> int:
    from beam_inference.files import load_job
    from beam_inference.report import print_outcome
    from beam_inference.runner import run_job

    if (
        "://" not in known.job
        and not Path(known.job).exists()
        and any(not flag.startswith("-") for flag in known.beam_flags)
    ):
        raise ConfigError(
            f"there is no job file {known.job}. Put the job file first, or write flags with =: --runner=DirectRunner"
        )
    config = load_job(known.job, known.set)
    outcome = run_job(
        config, known.beam_flags, chunks_file=known.chunks, overwrite=known.overwrite, allow_pickle=known.allow_pickle
    )
    with suppress(BrokenPipeError):  # who reads the summary may have gone; what the job came to is the same
        print_outcome(outcome, config, known.words)
        sys.stdout.flush()
    return outcome.exit_code


def _verify(known: argparse.Namespace) -> int:
    from rich.console import Console

    from beam_inference.files import load_job
    from beam_inference.launch import as_launched
    from beam_inference.outputs import open_output
    from beam_inference.report import print_verification
    from beam_inference.state import State
    from beam_inference.survey import default_state_url
    from beam_inference.verification import verify
    from beam_inference.worker import output_spec

    config = load_job(known.job, known.set)
    state = State(default_state_url(config), config.storage)
    job = state.load_job()
    if job is None:
        raise StateError(f"nothing to verify: {state.url} holds no job. Has it been run, and with this output.path?")
    job = as_launched(config, job, state.url)
    output = open_output(output_spec(job)) if known.deep else None
    if known.deep and output is None:
        raise StateError(f"nothing to verify: the output {job.config.output.path} is gone")
    with Console(stderr=True).status("verifying") as status:
        report = verify(job, state, output, lambda done: status.update(f"verifying: {done:,} chunks looked at"))
    with suppress(BrokenPipeError):  # as in _run
        print_verification(report, deep=known.deep)
        sys.stdout.flush()
    return COMPLETE if report.complete else FAILED


def _demo(known: argparse.Namespace) -> int:
    from beam_inference.demo import run_demo

    return run_demo(Path(known.folder), main)


def _schema(_: argparse.Namespace) -> int:
    from beam_inference.config import JobConfig

    print(json.dumps(JobConfig.model_json_schema(), indent=2))
    return 0
