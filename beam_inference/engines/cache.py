"""What was found out or made of networks, kept from one process to the next.

There is one folder of this user's, ``beam-inference`` in ``XDG_CACHE_HOME`` (or ``~/.cache``). An
entry is a file: a line of JSON with its key and the hash of its content, and then the content. It
serves only for the very same key; one that is damaged, or that somebody else may have written, is
as if it were not there. Whatever cannot be read or written here only costs time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json

logger = logging.getLogger(__name__)

Kind = Literal["trial", "conversion"]
"""What an entry holds: what a trial found, or a network in an engine's own form."""

MOST_BYTES = 2 * 2**30
"""Bytes of all entries: those used longest ago are removed beyond it."""
LARGEST_ENTRY = 2**30
"""Bytes of an entry: larger ones are not kept."""
_LONGEST_HEADER = 2**20
_DRAFT = ".draft-"
_OLD_DRAFT_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Contents:
    """What a cache holds.

    Attributes:
        entries: number of its files.
        bytes: size of these.
    """

    entries: int
    bytes: int


def cache_place() -> Path | None:
    """The folder that this user's environment means, which need not be there; None if none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification says that others are ignored
        return Path(base) / "beam-inference"
    try:
        return Path.home() / ".cache" / "beam-inference"
    except RuntimeError:
        return None


class Cache:
    """The entries in a folder.

    Args:
        folder: of this user alone; any other is left alone. None for a cache that keeps nothing.
        most_bytes: size of all entries.
    """

    def __init__(self, folder: Path | None, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def read(self, kind: Kind, key: Json) -> bytes | None:
        """Read the content that was kept under a key; None if there is none to be believed."""
        folder = self._own_folder()
        if folder is None:
            return None
        path = folder / _file_name(kind, key)
        try:
            content = _read_entry(path, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.debug("%s is ignored: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the time of its last use
        return content

    def write(self, kind: Kind, key: Json, content: bytes) -> None:
        """Keep a content under a key, unless it is large, or the folder cannot be used."""
        header = {"key": key, "sha256": hashlib.sha256(content).hexdigest()}
        line = json.dumps(header, sort_keys=True).encode() + b"\n"
        folder = self._own_folder(create=True)
        largest = min(LARGEST_ENTRY, self._most_bytes)
        if folder is None or len(line) > _LONGEST_HEADER or len(line) + len(content) > largest:
            return
        try:
            _write_whole(folder, _file_name(kind, key), line + content)
            self._trim(folder)
        except OSError as error:
            logger.debug("nothing is kept in %s: %s", folder, error)

    def contents(self) -> Contents:
        """Counts the files of this user, drafts of other processes included, and their bytes."""
        folder = self._own_folder()
        sizes = [] if folder is None else [status.st_size for _, status in _files(folder)]
        return Contents(len(sizes), sum(sizes))

    def clear(self) -> Contents:
        """Remove every entry, and return what there was."""
        folder = self._own_folder()
        entries = 0
        size = 0
        for path, status in [] if folder is None else _files(folder):
            with suppress(OSError):
                path.unlink()
                entries += 1
                size += status.st_size
        return Contents(entries, size)

    def _own_folder(self, *, create: bool = False) -> Path | None:
        """The folder, if it is one of this user's that nobody else may use."""
        folder = self._folder
        if folder is None:
            return None
        try:
            if create:
                folder.parent.mkdir(parents=True, exist_ok=True)
                folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            logger.debug("there is no cache in %s: %s", folder, error)
            return None
        if not stat.S_ISDIR(status.st_mode) or not _is_private(status):
            logger.info(
                "%s is not used: it is no folder of this user's that nobody else may use (chmod "
                "700), so others might have written what lies there",
                folder,
            )
            return None
        return folder

    def _trim(self, folder: Path) -> None:
        """Remove what was used longest ago, beyond the bound, and what killed processes left."""
        total = 0
        now = time.time()
        latest_first = sorted(_files(folder), key=lambda file: file[1].st_mtime, reverse=True)
        for path, status in latest_first:
            is_draft = path.name.startswith(_DRAFT)
            total += status.st_size
            is_old_draft = is_draft and now - status.st_mtime > _OLD_DRAFT_SECONDS
            if is_old_draft or (total > self._most_bytes and not is_draft):
                with suppress(FileNotFoundError):
                    path.unlink()


def user_cache() -> Cache:
    """The cache of this user."""
    return Cache(cache_place())


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def _file_name(kind: Kind, key: Json) -> str:
    return f"{kind}-{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}"


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Entries and drafts, whatever else lies there."""
    for path in folder.iterdir():
        if path.name.startswith((*(f"{kind}-" for kind in get_args(Kind)), _DRAFT)):
            with suppress(FileNotFoundError):
                yield path, path.lstat()


def _read_entry(path: Path, key: Json) -> bytes:
    """Read the content of an entry.

    Raises:
        OSError: it cannot be read, or is a link.
        ValueError: it is damaged, too large, of another key, or somebody else's.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_private(status):
            raise ValueError("it is not a file of this user's alone")
        if status.st_size > LARGEST_ENTRY:
            raise ValueError(f"it has {status.st_size} bytes")
        header = parse_json(file.readline(_LONGEST_HEADER))
        content = file.read(status.st_size)  # which Python allocates before it reads
    digest = hashlib.sha256(content).hexdigest()
    if header != {"key": json.loads(json.dumps(key)), "sha256": digest}:
        raise ValueError("it is damaged, or of another key")
    return content


def _write_whole(folder: Path, name: str, content: bytes) -> None:
    descriptor, draft = tempfile.mkstemp(prefix=_DRAFT, dir=folder)  # for this user alone
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(draft, folder / name)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
