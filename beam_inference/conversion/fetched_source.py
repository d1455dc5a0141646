"""Files in object stores whose libraries read files of this machine only: each process has a copy.

A copy lies in a folder of its own in ``$TMPDIR``, under the file's name, so that nothing else lies
beside it that it could name. It is removed when its last reader ends, or the process.
"""

from __future__ import annotations

import errno
import functools
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from beam_inference.config.fields import Json
from beam_inference.conversion.protocol import Read, Source, SourceInfo, Voxels
from beam_inference.conversion.raw_array import reserve
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.environment import format_bytes
from beam_inference.errors import (
    PermanentReadError,
    TransientReadError,
    UserError,
    VolumeError,
    WorkerFault,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.remote_files import PART_BYTES, RemoteFile

_PREFIX = "beam_inference_copy_"

_lock = threading.Lock()
"""One thread of a process copies a file, and the others take its copy."""


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """A volume in a file that is copied to this machine before it is read.

    Attributes:
        file: the file.
        dataset: name of the volume in it; None where there is one alone.
        scale: number of its scale.
        describe: finds the volume in a local file, by its path, name and scale; a function of a
            module.
        info: its extent, dtype, and so on.
    """

    file: RemoteFile
    dataset: str | None
    scale: int
    describe: Callable[[str, str | None, int], Source]
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """The facts that identify the file, and which volume in it is meant."""
        return self.file.identity | {"dataset": self.dataset, "scale": self.scale}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return [self.file]

    def open(self) -> Read:
        """Copy the file, unless this process has a copy, and open that."""
        copy = fetch(self.file)
        with errors_of_copy(copy.path, self.file.url):
            source = self.describe(copy.path, self.dataset, self.scale)
            read_copy = source.open()
        if source.info != self.info:
            raise WorkerFault(f"{self.file} is another volume than at the launch: start again")

        def read(box: BoundingBox) -> Voxels:
            with errors_of_copy(copy.path, self.file.url):
                return read_copy(box)

        return read


def fetched_source(
    file: RemoteFile,
    dataset: str | None,
    scale: int,
    describe: Callable[[str, str | None, int], Source],
) -> FetchedSource:
    """The volume in a file of an object store, of which this process makes a copy.

    Args:
        file: the file.
        dataset: name of the volume in it; None where there is one alone.
        scale: number of its scale.
        describe: as in :class:`FetchedSource`.

    Raises:
        VolumeError: it cannot be read as a volume of numbers.
        WorkerFault: there is no space for it.
    """
    copy = fetch(file)
    with errors_of_copy(copy.path, file.url):
        info = describe(copy.path, dataset, scale).info
    return FetchedSource(file, dataset, scale, describe, info)


class LocalCopy:
    """A copy of a file in a folder of its own, which is removed with the last reference to it.

    Args:
        folder: the folder.
        name: name of the copy in it.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.path = str(Path(folder) / name)
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


def fetch(file: RemoteFile) -> LocalCopy:
    """Copy a file to this machine; the copy made last is taken again.

    Raises:
        WorkerFault: there is no space, or the file was changed or removed.
        TransientReadError, PermanentReadError: it cannot be read.
    """
    with _lock:
        return _fetch(file)


@functools.lru_cache(maxsize=1)
def _fetch(file: RemoteFile) -> LocalCopy:
    size = file.size
    free = shutil.disk_usage(tempfile.gettempdir()).free
    shortage = WorkerFault(
        f"{file} has {format_bytes(size)}, of which each process needs a copy, and "
        f"{tempfile.gettempdir()} has {format_bytes(free)} left. Set TMPDIR to a folder with "
        "more space."
    )
    if size > free:
        raise shortage
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    copy = LocalCopy(folder, _name_of(file))
    parts = [(start, min(start + PART_BYTES, size)) for start in range(0, size, PART_BYTES)]
    try:
        with Path(copy.path).open("wb") as target:
            reserve(target, size)
            for content in file.read_parts(parts):
                target.write(content)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise shortage from None
        raise
    return copy


def _name_of(file: RemoteFile) -> str:
    """The last part of a file's URL, as the name of a local file."""
    name = unquote(file.url.rpartition("/")[2]).replace("/", "_").replace("\0", "_")
    return name[-200:].lstrip(".") or "file"


@contextmanager
def temporary_file(content: bytes, name: str) -> Iterator[str]:
    """A file of this machine that exists while the context is entered; its path.

    Raises:
        WorkerFault: there is no space for it.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        path = Path(folder) / name
        try:
            path.write_bytes(content)
        except OSError as error:
            raise WorkerFault(
                f"cannot write {len(content):,} bytes to {folder}: {error.strerror}. Set TMPDIR to "
                "a folder with more space."
            ) from None
        yield str(path)


@contextmanager
def errors_of_copy(path: str, url: str) -> Iterator[None]:
    """Let errors name the file at a URL, and not its copy on this machine."""
    try:
        yield
    except (UserError, WorkerFault, TransientReadError, PermanentReadError) as error:
        raise type(error)(str(error).replace(path, url)) from error


@contextmanager
def launch_errors() -> Iterator[None]:
    """Turn errors of reading into errors of the user's, where nothing has begun.

    Raises:
        VolumeError: a file could not be read, or copied here.
    """
    try:
        yield
    except (WorkerFault, TransientReadError, PermanentReadError) as error:
        raise VolumeError(str(error)) from None
