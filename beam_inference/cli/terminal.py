"""What reaches the terminal: text from volumes, records and users' code cannot steer it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO, cast

from beam_inference.foreign_text import escape_controls

if TYPE_CHECKING:
    from rich.console import Console


class EscapingStream:
    """A text stream that writes control characters out; lines and tabs stay.

    Args:
        stream: the stream behind it, which answers everything else.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without control characters."""
        self._stream.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def escape_output() -> Iterator[None]:
    """Write control characters out wherever something is printed to standard output, or warned of.

    Networks warn in their own words.
    """
    with redirect_stdout(cast(TextIO, EscapingStream(sys.stdout))), warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line)
    (file or sys.stderr).write(escape_controls(text))


@contextmanager
def print_to_stderr() -> Iterator[None]:
    """Print to standard error, without control characters: standard output is for one object."""
    with redirect_stdout(cast(TextIO, EscapingStream(sys.stderr))):
        yield


def table_console(width: int) -> Console:
    """A console for tables on standard output, without colours, which need control characters."""
    from rich.console import Console  # slow to import

    return Console(width=width, highlight=False, color_system=None)
