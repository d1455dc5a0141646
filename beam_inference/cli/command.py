"""How a command is declared: its parser, its options as a dataclass, and the function that acts."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NoReturn, Self, TypeAlias, TypeVar

from beam_inference.foreign_text import clean_text, shorten_text

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EXIT_CODES = """\
exit codes: 0 complete, 1 failed, 2 bad input,
3 finished with quarantined chunks within job.max_failed_chunks,
75 stopped as --shard or --stop_after asks: run it again, 130 interrupted
"""

BEAM_FLAGS = {
    "here": "--direct_running_mode=multi_processing --direct_num_workers=4",
    "Dataflow": "--runner=DataflowRunner --project=… --region=… --sdk_container_image=…",
    "Dask": "--runner=DaskRunner --dask_client_address=tcp://scheduler:8786",
    "Flink": (
        "--runner=FlinkRunner --flink_master=jobmanager:8081 "
        "--environment_type=EXTERNAL --environment_config=localhost:50000"
    ),
    "Spark": (
        "--runner=SparkRunner --spark_master_url=spark://master:7077 "
        "--environment_type=EXTERNAL --environment_config=localhost:50000"
    ),
    "Prism": "--runner=PrismRunner",
}
"""Flags of Apache Beam that a command may be given, by where its work is done."""


@dataclass(frozen=True)
class Options:
    """Options of a command. Each command has a subclass; its fields are named as its arguments."""

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """The options of this class, taken from parsed arguments of the same names."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class PipelineOptions(Options):
    """Options of every command that runs a Beam pipeline.

    Attributes:
        beam_flags: the arguments that the command does not know itself: flags of Apache Beam.
        command_line: the whole command as it was given, program name included.
    """

    beam_flags: Sequence[str]
    command_line: Sequence[str]

    @property
    def command_text(self) -> str:
        """The command as it can be typed into a shell."""
        return shlex.join(self.command_line)

    @property
    def command_to_continue(self) -> str:
        """The command that does what is missing, as it can be typed into a shell."""
        anew = ("--overwrite", "--redo")
        return shlex.join(word for word in self.command_line if word not in anew)


AnyOptions = TypeVar("AnyOptions", bound=Options)


_NO_VALUE = re.compile(r"argument (--[^/:\s]+).*: expected one argument")
"""argparse's message also for values that it takes for flags, such as -1,2."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are clean, and name the command or choice that may have been meant."""

    def error(self, message: str) -> NoReturn:
        """Print usage and a message, and exit with 2."""
        flag = _NO_VALUE.fullmatch(message)
        if flag is not None:
            message += f"; one that begins with a minus sign needs an equals sign: {flag[1]}=-1"
        super().error(clean_text(message))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops the dashes of --set=--, and hands on an empty list for a word
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected a value, found --")
        return super()._get_values(action, arg_strings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        if close and str(value) not in choices:
            raise argparse.ArgumentError(
                action,
                f"'{shorten_text(str(value))}' is none of {', '.join(choices)}; did you mean "
                f"'{close[0]}'?",
            )
        super()._check_value(action, value)


def add_command(
    subparsers: Subparsers, name: str, help: str, *examples: str, description: str | None = None
) -> argparse.ArgumentParser:
    """Add the parser of a command.

    Args:
        subparsers: where commands are added.
        name: the command.
        help: one line for the list of commands.
        examples: what may be typed after ``beam-inference NAME``.
        description: what its own help says first; ``help`` if not given.
    """
    lines = "".join(f"\n  beam-inference {name} {words}".rstrip() for words in examples)
    return subparsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", 100),
        epilog=f"{'examples' if len(examples) > 1 else 'example'}:{lines}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def set_action(
    parser: argparse.ArgumentParser,
    options: type[AnyOptions],
    action: Callable[[AnyOptions], int],
    *,
    takes_beam_flags: bool = False,
) -> None:
    """Say what a command does.

    Args:
        parser: the parser of the command.
        options: the class of its options.
        action: called with the options; returns an exit code.
        takes_beam_flags: whether flags of Apache Beam may follow.
    """
    if takes_beam_flags:
        parser.epilog = f"{_list_beam_flags()}\n{parser.epilog}"
    parser.set_defaults(
        options=options,
        action=lambda arguments: action(options.from_arguments(arguments)),
        takes_beam_flags=takes_beam_flags,
    )


@cache
def _list_beam_flags() -> str:
    lines = [
        textwrap.fill(
            f"  {place:10}{flags}",
            100,
            subsequent_indent=12 * " ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        for place, flags in BEAM_FLAGS.items()
    ]
    return "\n".join(["flags of Apache Beam, by where the work is done:", *lines, ""])


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument that has the outcome of a command printed for programs."""
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def add_logging(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how a command logs."""
    parser.add_argument(
        "--log_format",
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="log lines for people (text), or one JSON object per line (json)",
    )
    add_debug(parser)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Add the argument that turns on all messages."""
    parser.add_argument(
        "--debug", action="store_true", help="show all log messages, Beam's too, and stack traces"
    )
