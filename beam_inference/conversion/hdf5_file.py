"""Opens HDF5 files of this machine and of object stores, where they are read by ranges of bytes.

HDF5's library asks for one stretch after the other. What lies far apart, and what a window needs
of a file in a store, is therefore fetched before, several requests at a time.
"""

from __future__ import annotations

import io
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from beam_inference.config.storage import Storage
from beam_inference.conversion.protocol import import_library
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.errors import BeamInferenceError, VolumeError
from beam_inference.volumes.remote_files import PART_BYTES, RemoteFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_MOST_HELD = 2**26
"""Bytes of a file in a store that are fetched for a window before it is read."""

_SMALL_GAP = 2**12
"""Bytes between two parts that are fetched with them, rather than by two requests."""


@contextmanager
def open_file(file: StoredFile) -> Iterator[Any]:
    """Open an HDF5 file for reading, while the context is entered.

    Raises:
        VolumeError: it cannot be read.
        ConfigError: h5py is not installed.
        TransientReadError, PermanentReadError, WorkerFault: an object store does not send it.
    """
    with open_hdf5(file)[0] as opened:
        yield opened


def open_hdf5(file: StoredFile) -> tuple[Any, RemoteBytes | None]:
    """Open an HDF5 file for reading; whoever opens it closes it.

    Returns:
        The file of h5py; and of a file in an object store, what h5py reads it through.

    Raises:
        The errors of :func:`open_file`.
    """
    h5py = import_library("h5py", "HDF5")
    with suppress(ImportError):
        import hdf5plugin  # noqa: F401 - further compressions, where they are installed
    stream = RemoteBytes(file) if isinstance(file, RemoteFile) else None
    try:
        return h5py.File(file if stream is None else stream, "r"), stream
    except BeamInferenceError:
        raise
    except OSError as error:
        raise VolumeError(f"{file} cannot be read as HDF5: {error}") from None


class RemoteBytes(io.RawIOBase):
    """A file in an object store, as h5py reads it: always all the bytes that it asks for.

    Small parts are kept by the process, up to a bound, as those of other files are. h5py passes on
    what is raised here.

    Args:
        file: the file.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._stream = file.open()
        self._starts: list[int] = []
        self._held: list[bytes] = []

    def readable(self) -> bool:
        """Tell that it is."""
        return True

    def seekable(self) -> bool:
        """Tell that it is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, counted from the start or the end."""
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """The place that is read next."""
        return self._stream.tell()

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer, or as much of it as there is of the file."""
        view = memoryview(buffer).cast("B")
        place = self._stream.tell()
        number = bisect_right(self._starts, place) - 1
        if number >= 0:
            content = self._held[number]
            start = place - self._starts[number]
            if start + len(view) <= len(content):
                view[:] = content[start : start + len(view)]
                self._stream.seek(place + len(view))
                return len(view)
        return self._stream.readinto(view)  # type: ignore[attr-defined, no-any-return]

    def fetch(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Fetch parts of the file, several at a time, of which the first few may be all.

        Args:
            parts: the first byte of each, and the one behind its last.

        Returns:
            The first byte of each stretch, and its content, in order.

        Raises:
            TransientReadError, PermanentReadError, WorkerFault: the store does not send them.
        """
        size = self._file.size
        wanted = []
        held = 0
        for start, stop in _join(parts):
            held += stop - start
            if held > _MOST_HELD or stop > size:
                break  # HDF5 asks for the others itself, or says what is wrong
            wanted.append((start, stop))
        pieces = [
            (at, min(at + PART_BYTES, stop))
            for start, stop in wanted
            for at in range(start, stop, PART_BYTES)
        ]
        contents = self._file.read_parts(pieces)
        return [
            (start, b"".join(next(contents) for _ in range(start, stop, PART_BYTES)))
            for start, stop in wanted
        ]

    @contextmanager
    def hold(self, stretches: Sequence[tuple[int, bytes]]) -> Iterator[None]:
        """Answer from what was fetched while the context is entered."""
        self._starts = [start for start, _ in stretches]
        self._held = [content for _, content in stretches]
        try:
            yield
        finally:
            self._starts = []
            self._held = []


def _join(parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Parts in order, those that lie close together as one, but for large ones."""
    joined: tuple[int, int] | None = None
    for start, stop in sorted(parts):
        if joined is None:
            joined = (start, stop)
        elif start - joined[1] <= _SMALL_GAP and stop - joined[0] <= PART_BYTES:
            joined = (joined[0], max(joined[1], stop))
        else:
            yield joined
            joined = (start, stop)
    if joined is not None:
        yield joined


def as_argument(file: StoredFile) -> str:
    """A file as text, from which :func:`file_of_argument` makes it again, in another process."""
    if isinstance(file, RemoteFile):
        return json.dumps([file.url, file.storage.model_dump_json(), file.generation])
    return json.dumps(file)


def file_of_argument(text: str) -> StoredFile:
    """The file that :func:`as_argument` has made a text of."""
    content = json.loads(text)
    if isinstance(content, str):
        return content
    url, storage, generation = content
    return RemoteFile(url, Storage.model_validate_json(storage), generation)
