"""Files that are converted: of this machine, named by their paths, or in object stores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeAlias

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.volumes.remote_files import BUFFER_BYTES, RemoteFile, find_remote_file

FILES_AT_A_TIME = 8
"""Files of a series or a stack whose headers are read at a time."""

StoredFile: TypeAlias = str | RemoteFile
"""The path of a file of this machine, or a file in an object store; as text, the name of either."""


def open_stream(file: StoredFile, buffer_bytes: int = BUFFER_BYTES) -> BinaryIO:
    """Open a file for reading at any position.

    Args:
        file: the file.
        buffer_bytes: bytes that are read from an object store at least.
    """
    if isinstance(file, RemoteFile):
        return file.open(buffer_bytes)
    return Path(file).open("rb")


def count_bytes(file: StoredFile) -> int:
    """Bytes of a file."""
    return file.size if isinstance(file, RemoteFile) else Path(file).stat().st_size


def file_identity(file: StoredFile) -> Json:
    """JSON values that change when a file does: of paths, size and time."""
    if isinstance(file, RemoteFile):
        return file.identity
    status = Path(file).stat()
    return {
        "path": str(Path(file).absolute()),
        "bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
    }


_FILES_A_PART = 16 * FILES_AT_A_TIME


def find_files(paths: Sequence[str], storage: Storage) -> list[StoredFile]:
    """The files at paths, or at URLs, where each is looked for.

    Args:
        paths: either, but not both.
        storage: how object stores are reached.

    Raises:
        VolumeError: there is none at a URL.
        WorkerFault, TransientReadError, PermanentReadError: it cannot be read.
    """
    if not paths or not is_url(paths[0]):
        return list(paths)
    found: list[StoredFile] = []
    with ThreadPoolExecutor(FILES_AT_A_TIME) as executor:
        # In parts: of all at once, the first that is absent would be told only after the last.
        for begin in range(0, len(paths), _FILES_A_PART):
            part = paths[begin : begin + _FILES_A_PART]
            found += executor.map(lambda url: find_remote_file(url, storage), part)
    return found


def hash_contents(files: Iterable[StoredFile]) -> str:
    """A hash of files' names and of what changes with their contents, in order."""
    return hashlib.sha256("\n".join(map(_content_line, files)).encode()).hexdigest()


MARK_BYTES = 8
"""Bytes of a mark: enough to notice a change, few enough for a million of files."""


def mark_content(file: StoredFile) -> bytes:
    """A hash of what changes with a file's content, :data:`MARK_BYTES` long."""
    return hashlib.sha256(_content_line(file).encode()).digest()[:MARK_BYTES]


def _content_line(file: StoredFile) -> str:
    """What of a file changes with its content, as a line of text."""
    if isinstance(file, RemoteFile):
        return f"{file.url} {file.generation}"
    status = Path(file).stat()
    return f"{file} {status.st_size} {status.st_mtime_ns}"


def suffix_of(file: StoredFile) -> str:
    """The last suffix of a file's name, in lower case."""
    return os.path.splitext(str(file))[1].lower()


def is_url(path: str) -> bool:
    """Whether a path is the URL of a file that is not on this machine."""
    return "://" in path and not path.startswith("file://")
