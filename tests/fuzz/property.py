"""The property that every parser must have, whatever bytes it is given.

It gives an answer, or one of the package's own errors, in bounded time and memory. It touches no
file but those of its case, and its message is short, has no control characters, and repeats no
secret.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beam_inference.errors import BeamInferenceError

SECRET = "planted-5ecret"
"""Stands in URLs and in a file beside the case; no message and no answer may hold it."""

OUTSIDE_NAME = "outside.raw"
"""Name of a file beside the folder of the case, which no parser may read."""

CPU_SECONDS = 5.0
MEMORY_BYTES = 2**30
LONGEST_MESSAGE = 10_000

Parse = Callable[[bytes, Path], object]
"""Parses a content as a file in an empty folder. What it returns is an answer that it checked."""


@dataclass(frozen=True)
class Parser:
    """A parser, and what it is given first.

    Attributes:
        name: how it is called in tables, and the folder of its cases.
        seeds: makes a few small contents that it reads, or nearly reads.
        parse: reads a content; raises :class:`BeamInferenceError` to refuse it.
        words: texts that are worth putting into a content.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    parse: Parse
    words: tuple[bytes, ...] = ()


class Violation(Exception):
    """A parser does not have the property; the message says in what."""


@dataclass(frozen=True)
class Outcome:
    """What became of a content, and how long it took.

    Attributes:
        kind: "answer", or the name of the error's class.
        seconds: time of the processor.
    """

    kind: str
    seconds: float


class Case:
    """A place in which contents are tried one after the other.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "case"
        self._outside = root / OUTSIDE_NAME
        self._outside.write_bytes(SECRET.encode() * 100)
        self._root = root

    def attempt(self, parser: Parser, content: bytes) -> Outcome:
        """Let a parser read a content.

        Raises:
            Violation: it does not have the property.
        """
        outcome = self._attempt(parser, content)
        if outcome.seconds > CPU_SECONDS:
            # once more: the first time includes what is imported where it is used
            outcome = self._attempt(parser, content)
        if outcome.seconds > CPU_SECONDS:
            raise Violation(f"took {outcome.seconds:.1f} s")
        return outcome

    def _attempt(self, parser: Parser, content: bytes) -> Outcome:
        self._folder.mkdir()
        self._mark_unread()
        touched: list[str] = []
        began = time.process_time()
        try:
            with _watch_files(self._root, touched):
                kind = _parse(parser, content, self._folder)
            seconds = time.process_time() - began
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        if touched:
            raise Violation(f"touched {touched[0]}")
        self._check_outside()
        return Outcome(kind, seconds)

    def _mark_unread(self) -> None:
        # the system notes a read of a file whose last one was before its last change
        status = self._outside.stat()
        if status.st_atime_ns:
            os.utime(self._outside, ns=(0, status.st_mtime_ns))

    def _check_outside(self) -> None:
        if self._outside.stat().st_atime_ns:
            raise Violation(f"read {OUTSIDE_NAME}, which lies outside of the case")
        if {each.name for each in self._root.iterdir()} != {OUTSIDE_NAME}:
            raise Violation("left files outside of the case")


def _parse(parser: Parser, content: bytes, folder: Path) -> str:
    try:
        answer = parser.parse(content, folder)
    except BeamInferenceError as error:
        _check_message(str(error))
        return type(error).__name__
    except Exception as error:
        where = _place(error)
        raise Violation(f"{type(error).__name__} at {where}: {str(error)[:200]}") from error
    if SECRET in repr(answer)[:100_000]:
        raise Violation("the answer holds a secret")
    return "answer"


def _check_message(message: str) -> None:
    if SECRET in message:
        raise Violation(f"the message repeats a secret: {message[:300]}")
    if not message.strip() or len(message) > LONGEST_MESSAGE:
        raise Violation(f"the message has {len(message)} characters")
    if any(character in message for character in "\x00\x1b\x07\x08\r\x9b\u202e"):
        raise Violation(f"the message has control characters: {message[:300]!a}")


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "beam_inference" in Path(frame.filename).parts]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"


# ------------------------------------------------------------------------------------- limits


def limit_memory() -> None:
    """Bound what this process may allocate from now on, beyond what it has."""
    has = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + MEMORY_BYTES, hard))


_WRITING = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.chmod"}
_RUNNING = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect"}
_ALLOWED = tuple(
    str(place)
    for place in (
        *("/proc", "/sys", "/dev/null", "/dev/urandom", "/usr", "/lib", "/etc"),
        *sysconfig.get_paths().values(),
        *(place for place in sys.path if Path(place).name == "site-packages"),
        sys.base_prefix,
        sys.prefix,
        Path(__file__).parents[2],
        tempfile.gettempdir(),
    )
)
"""Where Python, its packages and this one read their own files."""

_OWN_PROGRAMS = ([sys.executable, "-P", "-c"], ["uname", "-p"])
"""How programs begin that are run for any content.

The package's own processes do (``conversion/process_apart.py``), and what Python asks the system.
"""

_watched: list[tuple[str, list[str], frozenset[int | None]]] = []
_is_hooked = False


@contextmanager
def _watch_files(root: Path, touched: list[str]) -> Iterator[None]:
    """Note files that are opened outside of a case, and programs and connections.

    What threads do that were there before is not the parser's: other tests leave some.
    """
    global _is_hooked  # noqa: PLW0603 - a hook cannot be taken off
    if not _is_hooked:
        sys.addaudithook(_note)
        _is_hooked = True
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    _watched.append((str(root / "case"), touched, frozenset(others)))
    try:
        yield
    finally:
        _watched.pop()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    folder, touched, others = _watched[-1]
    if threading.get_ident() in others:
        return
    if event in _RUNNING and arguments[1:2] and arguments[1][:3] in _OWN_PROGRAMS:
        return
    if event in _RUNNING:
        touched.append(event)
    elif event == "open" or event in _WRITING:
        place: str | bytes | int = arguments[0]
        if isinstance(place, int):  # a file that is open
            return
        path = str(Path(os.fsdecode(place)).absolute())
        is_inside = path == folder or path.startswith(f"{folder}/")
        if ".." in path.split("/") or (not is_inside and not path.startswith(_ALLOWED)):
            touched.append(f"{path} ({event})")
