"""The command line: from its words to an exit code.

Exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within the bound,
75 to be tried again, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import traceback
from collections.abc import Sequence

from beam_inference.cli import (
    boxes,
    cache,
    evaluation,
    jobs,
    labels,
    look,
    model,
    other,
    plan,
    provenance,
    run,
    shards,
    tasks,
    training,
    volumes,
)
from beam_inference.cli.command import EXIT_CODES, CommandParser
from beam_inference.cli.logs import configure
from beam_inference.cli.stop_signals import requests_to_stop
from beam_inference.cli.terminal import escape_output
from beam_inference.environment import end_without_collecting, use_one_heap
from beam_inference.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    BeamInferenceError,
    UserError,
)
from beam_inference.foreign_text import clean_text, describe_error

logger = logging.getLogger(__name__)

COMMAND_MODULES = (
    model,
    plan,
    run,
    shards,
    jobs,
    tasks,
    provenance,
    look,
    volumes,
    labels,
    evaluation,
    boxes,
    training,
    cache,
    other,
)
"""Modules that declare commands by a function ``add(subparsers)``, in the order of the help."""


@functools.cache
def command_parser() -> CommandParser:
    """The parser of all commands. Its result has an ``action``, which runs the command."""
    parser = CommandParser(
        prog="beam-inference",
        description="Run a trained 3-D ConvNet over a volume of any size.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in COMMAND_MODULES:
        module.add(subparsers)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Expected errors become one message on stderr.

    Args:
        words: what follows the program's name; ``sys.argv`` if not given.
    """
    parser = command_parser()
    words = list(sys.argv[1:] if words is None else words)
    arguments, beam_flags = parser.parse_known_args(words)
    if beam_flags and not arguments.takes_beam_flags:
        parser.error(f"unrecognized arguments: {' '.join(beam_flags)}")
    arguments.beam_flags = beam_flags
    arguments.command_line = ["beam-inference", *words]
    # for the commands that need the whole command line: demo runs commands, completion lists them
    arguments.run_command = main
    arguments.parser = parser
    return run_guarded(arguments)


def run_with_flags(words: Sequence[str] | None = None) -> int:
    """Run the command ``run`` for launchers that pass flags only: ``--job=job.yaml`` and run's own.

    Launchers with forms pass every field: ``--flag=`` counts as not given, and switches take
    ``=true`` or ``=false``.
    """
    parser = run.flags_parser()
    words = list(sys.argv[1:] if words is None else words)
    arguments, beam_flags = parser.parse_known_args(run.drop_empty_flags(words, parser))
    arguments.beam_flags = beam_flags
    arguments.command_line = ["python", sys.argv[0], *words]
    return run_guarded(arguments)


def run_guarded(arguments: argparse.Namespace) -> int:
    """Run the parsed command and return its exit code; an error becomes one message."""
    debug = getattr(arguments, "debug", False)
    structured = getattr(arguments, "log_format", "text") == "json"
    configure(debug=debug, structured=structured)
    use_one_heap()
    end_without_collecting()
    try:
        with requests_to_stop(), escape_output():
            return int(arguments.action(arguments))
    except KeyboardInterrupt:
        _report("interrupted", structured)
        return INTERRUPTED
    except BeamInferenceError as error:
        _report(f"error: {error}", structured)
        return BAD_INPUT if isinstance(error, UserError) else FAILED
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        _report(_explain_unforeseen(error, debug=debug), structured)
        return FAILED
    except BaseException as error:
        # No command leaves in this way, so code that the job names has: whatever number it gave,
        # the work is not done.
        _report(
            f"error: code that the job loads ended the program ({describe_error(error)}), a "
            "network's factory, a network or an operator. Take sys.exit() and the like out of it.",
            structured,
        )
        return FAILED


def _explain_unforeseen(error: Exception, *, debug: bool) -> str:
    if debug:
        return "".join(traceback.format_exception(error))
    return (
        f"error: {describe_error(error)}\nThis was not foreseen, and is a defect of "
        "beam-inference. With --debug the command shows where it happened."
    )


def _report(message: str, structured: bool) -> None:
    message = clean_text(message)
    if structured:
        logger.error(message.removeprefix("error: "))
    else:
        print(message, file=sys.stderr)
