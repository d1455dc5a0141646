"""What several commands take: their options' types, and how they log."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias, TypeVar

Number = TypeVar("Number", int, float)
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
EXIT_CODES = """\
exit codes: 0 complete, 1 failed, 2 bad input, 3 finished with quarantined chunks within job.max_failed_chunks,
130 interrupted
"""


def number(
    parse: Callable[[str], Number], fits: Callable[[Number], bool], what: str
) -> Callable[[str], Number]:
    """The type of an option that takes a number of which ``fits`` holds."""

    def parsed(text: str) -> Number:
        with suppress(ValueError):
            if fits(number := parse(text)):
                return number
        raise argparse.ArgumentTypeError(f"{text} is not {what}")

    return parsed


def triple(number: Callable[[str], Number]) -> Callable[[str], tuple[Number, Number, Number]]:
    """The type of an option that takes three numbers, of z, y and x, between commas or x."""

    def parsed(text: str) -> tuple[Number, Number, Number]:
        parts = re.split("[,x]", text)
        if len(parts) != 3:
            raise argparse.ArgumentTypeError(
                f"{text} is not three numbers, of z, y and x, such as 40,4,4 or 1x2x2"
            )
        z, y, x = map(number, parts)
        return (z, y, x)

    return parsed


natural = number(int, lambda number: number >= 0, "a whole number from 0 on")
positive = number(int, lambda number: number >= 1, "a whole number above 0")
port = number(int, lambda number: 0 <= number < 2**16, "a port, 0 to 65535")
gib = number(float, lambda number: 0 < number < float("inf"), "a number of GiB")
price = number(float, lambda number: 0 <= number < float("inf"), "a price")
seed = number(int, lambda number: 0 <= number < 2**64, "a whole number from 0 to 2^64 - 1")
share = number(float, lambda share: 0 < share <= 1, "a share above 0 and at most 1")
shape = triple(positive)
sizes = triple(number(float, lambda number: 0 < number < float("inf"), "a size in nm"))
offset = triple(number(int, lambda _: True, "a whole number"))
channels = triple(natural)


def add_command(
    subparsers: Subparsers, name: str, help: str, *examples: str, description: str | None = None
) -> argparse.ArgumentParser:
    """A command's parser; ``examples`` are what may be typed after ``beam-inference``."""
    lines = "".join(f"\n  beam-inference {name} {words}".rstrip() for words in examples)
    return subparsers.add_parser(
        name,
        help=help,
        description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", 100),
        epilog=f"{'examples' if len(examples) > 1 else 'example'}:{lines}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_logging(parser: argparse.ArgumentParser) -> None:
    """How a command logs."""
    parser.add_argument(
        "--log_format",
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="how to log: lines for people, or JSON, an object a line",
    )
    add_debug(parser)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Whether it tells everything."""
    parser.add_argument(
        "--debug", action="store_true", help="show all log messages, Beam's too, and stack traces"
    )
