"""Files that another file names: followed inside its folder only.

A file that somebody was sent may name any file of this machine, whose bytes would then lie in the
volume that is made of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from beam_inference.conversion.stored_files import StoredFile
from beam_inference.errors import VolumeError
from beam_inference.volumes.remote_files import RemoteFile, find_remote_file

_LONGEST_NAME = 300
"""Characters of a path that are repeated in a message."""


@contextmanager
def path_errors(path: str) -> Iterator[None]:
    """Turn what the system says of a path, such as that it is too long, into an error of the user.

    Raises:
        VolumeError: the path cannot be used.
    """
    try:
        if (
            "\0" in path
        ):  # some functions of the system say no more of it than that nothing is there
            raise ValueError("it holds a null byte")
        yield
    except (OSError, ValueError) as error:
        shown = path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]}…"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise VolumeError(f"the path {shown} cannot be used: {reason}") from None


def file_beside(path: StoredFile, name: str) -> StoredFile:
    """The file of a name in the folder of the file that names it, or in a folder there.

    Args:
        path: the file that names the other.
        name: the name as it stands there.

    Raises:
        VolumeError: it is an absolute path, it leads out of the folder, also by symbolic links, or
            there is no such file.
    """
    if isinstance(path, RemoteFile):
        return _remote_file_beside(path, name)
    folder = Path(path).parent
    place = Path(os.path.realpath(folder / name))
    if Path(name).is_absolute() or not place.is_relative_to(os.path.realpath(folder)):
        raise VolumeError(
            f"{path} names the file {name}, which leads out of its folder {folder}: files from "
            "elsewhere are not read in its place. If it is right, copy it into the folder, and "
            "change the name."
        )
    if not place.exists():
        raise VolumeError(
            f"{path} names the file {name}, and there is none in {folder}. Copy it there."
        )
    if not stat.S_ISREG(place.stat().st_mode):
        raise VolumeError(f"{path} names {name} as its data, which is not one file beside it")
    return str(folder / name)


def _remote_file_beside(file: RemoteFile, name: str) -> RemoteFile:
    folder = file.url.rpartition("/")[0]
    if {"", ".", ".."}.intersection(name.split("/")):
        raise VolumeError(
            f"{file} names the file {name}, which may lead out of its folder {folder}: files from "
            "elsewhere are not read in its place. If it is right, copy it into the folder, and "
            "change the name."
        )
    return find_remote_file(f"{folder}/{quote(name)}", file.storage)
