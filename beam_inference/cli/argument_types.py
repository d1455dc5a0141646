"""Types of command-line arguments: each turns a word into a value, or says what was expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Literal, TypeVar

from beam_inference.job.shards import Shard

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}

Number = TypeVar("Number", int, float)


def number_type(
    parse: Callable[[str], Number], is_valid: Callable[[Number], bool], description: str
) -> Callable[[str], Number]:
    """The type of an argument that is one number.

    Args:
        parse: turns the word into a number, or raises ValueError.
        is_valid: whether such a number is accepted.
        description: what is expected, for the message about any other word.
    """

    def parse_number(text: str) -> Number:
        try:
            value = parse(text)
        except ValueError:
            pass
        else:
            if is_valid(value):
                return value
        raise argparse.ArgumentTypeError(f"{text} is not {description}")

    return parse_number


def triple_type(
    parse_number: Callable[[str], Number],
) -> Callable[[str], tuple[Number, Number, Number]]:
    """The type of an argument that is three numbers (z, y, x), separated by commas or x."""

    def parse_triple(text: str) -> tuple[Number, Number, Number]:
        parts = re.split("[,x]", text)
        if len(parts) != 3:
            raise argparse.ArgumentTypeError(
                f"{text} is not three numbers, of z, y and x, such as 40,4,4 or 1x2x2"
            )
        z, y, x = map(parse_number, parts)
        return (z, y, x)

    return parse_triple


def some_text(text: str) -> str:
    """The type of an argument that is not empty, as where a script's variable is."""
    if not text.strip():
        raise argparse.ArgumentTypeError("nothing is given: is a variable empty?")
    return text


def duration(text: str) -> float:
    """The type of an argument that is a time, such as 3h50m; in seconds."""
    match = re.fullmatch(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", text)
    numbers = [] if match is None else [int(number or 0) for number in match.groups()]
    seconds = sum(number * unit for number, unit in zip(numbers, _UNITS.values(), strict=False))
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a time such as 3h50m, 45m or 90s")
    return float(seconds)


def shard(text: str) -> Shard | Literal["auto"]:
    """The type of an argument that is a shard, such as 3/7, or auto."""
    if text == "auto":
        return "auto"
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(
            f"{text} is not a shard I/N, with I from 0 to N - 1, such as 0/7, nor auto"
        )
    return Shard(int(match[1]), int(match[2]))


def _is_positive(value: float) -> bool:
    return 0 < value < math.inf


def _parse_exactly(text: str) -> float:
    """A whole number as it is, which a float could not hold beyond 2^53; others as floats."""
    try:
        return int(text)
    except ValueError:
        return float(text)


number = number_type(float, math.isfinite, "a number")
exact_number = number_type(_parse_exactly, lambda _: True, "a number")
natural = number_type(int, lambda value: value >= 0, "a whole number from 0 on")
positive = number_type(int, lambda value: value >= 1, "a whole number above 0")
port = number_type(int, lambda value: 0 <= value < 2**16, "a port, 0 to 65535")
gib = number_type(float, lambda value: 0 < value < 2**30, "a number of GiB below 2^30")
price = number_type(float, lambda value: 0 <= value < math.inf, "a price")
seed = number_type(int, lambda value: 0 <= value < 2**64, "a whole number from 0 to 2^64 - 1")
share = number_type(float, lambda value: 0 < value <= 1, "a share above 0 and at most 1")
shape = triple_type(positive)
voxel_size = triple_type(number_type(float, _is_positive, "a size in nm"))
offset = triple_type(number_type(int, lambda n: abs(n) < 2**62, "a whole number below 2^62"))
channels = triple_type(natural)
