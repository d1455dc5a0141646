"""The commands of docs/flink-spark.md, to be run as they stand there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import reduce
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "flink-spark.md"
_INDENT = "    "


def commands_of(section: str) -> list[list[str]]:
    """The commands of a section of the page, in their order, as words.

    Args:
        section: its heading.

    Raises:
        KeyError: the page has no such section.
    """
    text = _PAGE.read_text().replace("\\\n", " ")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")}
    lines = sections[section].splitlines()
    return [shlex.split(line) for line in lines if line.startswith(_INDENT)]


def with_names(command: list[str], names: Mapping[str, str]) -> list[str]:
    """A command with the names of the page replaced by those of a cluster.

    Args:
        command: its words.
        names: what stands for each name; the longest come first.
    """
    longest_first = sorted(names, key=len, reverse=True)
    return [
        reduce(lambda text, name: text.replace(name, names[name]), longest_first, word)
        for word in command
    ]
