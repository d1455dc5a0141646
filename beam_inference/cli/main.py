"""The command line, from its words to an exit code.

Exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within the bound,
    130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from beam_inference.cli import commands
from beam_inference.cli.arguments import as_given, command_parser, flags_parser, overrides
from beam_inference.cli.logs import configure
from beam_inference.environment import use_one_heap
from beam_inference.errors import BAD_INPUT, FAILED, INTERRUPTED, BeamInferenceError, UserError

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Errors of ours become one message on standard error."""
    parser = command_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    known, beam_flags = parser.parse_known_args(words)
    if beam_flags and not known.takes_beam_flags:
        parser.error(f"unrecognized arguments: {' '.join(beam_flags)}")
    known.beam_flags = beam_flags
    known.words = ["beam-inference", *words]
    known.main = main  # the demo gives commands itself
    return guarded(known)


def run_with_flags(arguments: Sequence[str] | None = None) -> int:
    """``run``, for launchers that pass flags only: ``--job=job.yaml`` and the flags of ``run``.

    Launchers with forms pass every field: ``--flag=`` is a flag not given, and switches take
        ``=true`` or ``=false``.
    """
    parser = flags_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    known, beam_flags = parser.parse_known_args(as_given(words, parser))
    known.beam_flags = beam_flags
    known.words = ["python", sys.argv[0], *words]
    known.command = commands.run
    known.json = False
    return guarded(known)


def guarded(known: argparse.Namespace) -> int:
    """Run the parsed command, with errors told as one message."""
    debug = getattr(known, "debug", False)
    structured = getattr(known, "log_format", "text") == "json"
    configure(debug=debug, structured=structured)
    use_one_heap()
    try:
        if hasattr(known, "set"):
            known.overrides = overrides(known)
        with _terminable():
            return int(known.command(known))
    except KeyboardInterrupt:
        _tell("interrupted", structured)
        return INTERRUPTED
    except UserError as error:
        _tell(f"error: {error}", structured)
        return BAD_INPUT
    except BeamInferenceError as error:
        _tell(f"error: {error}", structured)
        return FAILED
    except BrokenPipeError:
        return FAILED
    except Exception as error:
        if debug:
            raise
        reason = " ".join(str(error).split()) or "no message"
        _tell(
            f"error: {type(error).__name__}: {reason[:500]}\nThis was not foreseen, and is a "
            "defect of beam-inference. With --debug the command shows where it happened.",
            structured,
        )
        return FAILED


def _tell(message: str, structured: bool) -> None:
    if structured:
        logger.error(message.removeprefix("error: "))
    else:
        print(message, file=sys.stderr)


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
