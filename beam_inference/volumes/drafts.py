"""Drafts: what killed writers leave beside local files, and how it is removed.

A local file is written under another name, and appears by a rename. Who is killed before that
leaves the draft behind: ``NAME_HEX.__lock`` by TensorStore, ``NAME.HEX.draft`` by
:mod:`beam_inference.volumes.conditional_writes`, whose empty ``NAME.guard`` may stay, too. They
damage nothing, but nobody else removes them.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from beam_inference.volumes.kvstores import local_folder

AGE_SECONDS = 3600.0
"""Age from which a draft is taken for left behind: nobody takes as long to write one."""

_DRAFT = re.compile(r"(.+)(_[0-9a-f]{16}\.__lock|\.[0-9a-f]{32}\.draft)")
_GUARD = re.compile(r"(.+\.json|info|provenance|\.z[a-z]+)\.guard")


_LOCK = re.compile(r"(.+)\.__lock")
"""A lock that TensorStore keeps by default, as in programs of others: not ours to sweep."""


def file_of_draft(name: str) -> str | None:
    """Return the name of the file that a draft, guard or lock belongs to; None if it is none.

    Args:
        name: name of the file that may be a draft, without its folder.
    """
    patterns = (_DRAFT, _GUARD, _LOCK)
    return next((match[1] for each in patterns if (match := each.fullmatch(name))), None)


def sweep_drafts(url: str, age_seconds: float = AGE_SECONDS) -> int:
    """Remove the drafts and guards that killed writers left in and below a local folder.

    A draft stays while it may still be written, and a guard while somebody holds it. What cannot be
    removed stays as well: it harms nobody.

    Args:
        url: URL of the folder; an object store has no drafts.
        age_seconds: seconds since a draft was written last, from which on it is removed.

    Returns:
        How many were removed.
    """
    folder = local_folder(url)
    return 0 if folder is None else _sweep(folder, _candidates(folder), age_seconds)


def sweep_drafts_of_file(url: str, age_seconds: float = AGE_SECONDS) -> int:
    """Remove the drafts that killed writers left of one file; see :func:`sweep_drafts`.

    Args:
        url: URL of the file, whose folder may hold anything else.
        age_seconds: as there.

    Returns:
        How many were removed.
    """
    path = local_folder(url)
    if path is None:
        return 0
    beside = path.parent.glob(f"{glob.escape(path.name)}[._]*")
    drafts = (each for each in beside if _DRAFT.fullmatch(each.name))
    return _sweep(path.parent, drafts, age_seconds)


def _sweep(folder: Path, paths: Iterable[Path], age_seconds: float) -> int:
    """Remove those of some drafts and guards that are left behind, and count them."""
    now = _time_of_files(folder)
    return 0 if now is None else sum(_remove(path, now - age_seconds) for path in paths)


def _time_of_files(folder: Path) -> float | None:
    """The time that a file gets which is written now; None where none can be written.

    On a shared disk that is another machine's clock; and by a clock of this one that is an hour
    ahead, every draft of others would be old.
    """
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_mtime
    return None


def _candidates(folder: Path) -> Iterator[Path]:
    """Files whose names are those of drafts or guards; links to folders are not followed."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if _DRAFT.fullmatch(name) or _GUARD.fullmatch(name):
                yield Path(parent, name)


def _remove(path: Path, written_before: float) -> bool:
    """Remove a draft that is old, or a guard that is empty; neither while somebody has locked it.

    Whoever waits for a guard looks, once it has the lock, whether the file still has its name.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            is_guard = _GUARD.fullmatch(path.name) is not None
            is_left = found.st_size == 0 if is_guard else found.st_mtime < written_before
            if is_left and os.path.samestat(found, path.lstat()):
                path.unlink()
                return True
        finally:
            os.close(descriptor)
    return False
