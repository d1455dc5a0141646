"""The folder that a training writes into: one launch at a time, and files that appear whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, TypeAlias

from beam_inference.errors import ConfigError, StateError, WorkerFault
from beam_inference.volumes.conditional_writes import sync_folder
from beam_inference.volumes.file_locks import hold_lock

LOCK = "training.lock"
"""Name of the file that a launch holds a lock on."""

_PATIENCE_SECONDS = 1.0
"""How long the lock of a launch is waited for, which may just be ending."""


class Draft:
    """A file that is being written. It remembers why a write failed, which PyTorch hides.

    Args:
        file: open for writing.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, content: bytes) -> int:
        """Write some bytes; returns their number."""
        try:
            return self._file.write(content)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Write nothing more: the file is flushed at its end."""


Write: TypeAlias = Callable[[Draft], object]
"""Writes the content of a file."""


def draft_of(path: Path) -> Path:
    """Where a file is written before it takes its place."""
    return path.with_suffix(".unfinished")


def refuse_odd_names(folder: Path, files: Sequence[str], folders: Sequence[str]) -> None:
    """Refuse what is not as expected at names that a training writes, or reads.

    Through a link somebody's files would be changed, a pipe would be waited for without end.

    Args:
        folder: the training's.
        files: names of files, and their drafts'.
        folders: names of folders.

    Raises:
        StateError: there is a link, a pipe, a device, a folder for a file or a file for a folder.
    """
    drafts = [draft_of(folder / name).name for name in files]
    for name in (*files, *drafts, *folders):
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue  # there is nothing, or nothing can be written there, which is told later
        if stat.S_ISLNK(mode):
            raise StateError(
                f"{path} is a link, and what it leads to would be changed: remove the link, or "
                "choose another output"
            )
        wanted = "folder" if name in folders else "file"
        if not (stat.S_ISDIR(mode) if name in folders else stat.S_ISREG(mode)):
            raise StateError(
                f"{path} is {_kind_of(mode)}; expected a {wanted} of a training, or none: remove "
                "it, or choose another output"
            )


def _kind_of(mode: int) -> str:
    kinds = [(stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe")]
    return next((kind for is_it, kind in kinds if is_it(mode)), "a device or a socket")


@contextmanager
def hold_folder(folder: Path, token: str) -> Iterator[None]:
    """Make a training's folder, and keep other launches from it.

    Args:
        folder: the training's.
        token: the content of the lock's file, by which other ranks see that they share the folder.

    Raises:
        ConfigError: it cannot be made.
        StateError: another launch holds it, or it cannot be written into.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder} (output): {error}") from None
    path = folder / LOCK
    with ExitStack() as held:
        try:
            held.enter_context(hold_lock(path, _PATIENCE_SECONDS))
            path.write_text(token)
        except TimeoutError:
            raise StateError(
                f"another launch trains into {folder}, and holds {path}: wait until it has ended, "
                "end it, or choose another output"
            ) from None
        except OSError as error:
            raise StateError(
                f"cannot write {path}: {error.strerror}. Remove it, or choose another output, "
                "where this user may write."
            ) from None
        yield


def has_token(folder: Path, token: str) -> bool:
    """Whether a folder is the one that :func:`hold_folder` holds with a token."""
    path = folder / LOCK
    try:
        return path.is_file() and path.read_text() == token
    except (OSError, ValueError):
        return False


def replace_files(folder: Path, files: Mapping[str, Write]) -> None:
    """Write files, and when all are written put them in their places, one after the other.

    Args:
        folder: where they lie.
        files: what writes each, by name, in the order in which they take their places.

    Raises:
        WorkerFault: one cannot be written. All files are then as they were; no draft is left. Or
            one cannot take its place: those before it have done so.
    """
    paths = [folder / name for name in files]
    try:
        for path, write in zip(paths, files.values(), strict=True):
            _write_draft(path, write)
        for path in paths:
            draft_of(path).replace(path)
            sync_folder(folder)
    except OSError as error:
        raise WorkerFault(
            f"cannot write the files of the training in {folder}: {error.strerror}. Make room, or "
            "let this user write there, and give the command again."
        ) from None
    finally:
        for path in paths:
            draft_of(path).unlink(missing_ok=True)


def _write_draft(path: Path, write: Write) -> None:
    draft_of(path).unlink(missing_ok=True)
    draft = None
    try:
        with draft_of(path).open("xb") as file:
            draft = Draft(file)
            write(draft)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        cause = error if draft is None or draft.error is None else draft.error
        if not isinstance(cause, OSError):
            raise
        raise WorkerFault(
            f"cannot write {path}: {cause.strerror}. What was there before stays as it is, and the "
            "unfinished file is removed. Make room, or let this user write there, and give the "
            "command again: it goes on from the last checkpoint."
        ) from None
