"""Single files in object stores and on web servers, of which any part is read by itself.

TensorStore reads ranges of bytes, and names the content that they belong to, its *generation*: that
a file is replaced while it is read is noticed where the store has generations. TensorStore does not
tell how long a file is, which is found out by asking for single bytes.
"""

from __future__ import annotations

import functools
import io
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import tensorstore as ts

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import (
    BeamInferenceError,
    PermanentReadError,
    VolumeError,
    WorkerFault,
)
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    TRANSFER_SECONDS,
    KvStore,
    one_line,
    open_with,
    status,
    with_settings,
)
from beam_inference.volumes.volume import read_error

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PART_BYTES = 2**22
"""Bytes that one request asks for, where a large part of a file is read."""

BUFFER_BYTES = 2**14
"""Bytes that one request asks for, where a header is read. Each process keeps some of them."""

_KEPT_BUFFERS = 2**12

_AT_A_TIME = 16
"""Requests of one call that are under way at a time."""

_FIRST_PROBE = 2**16
_LARGEST_FILE = 2**50
_TAIL_BYTES = 2**18
"""Bytes at the end of a file that are read to count them."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL, with the content that it had when it was found.

    Attributes:
        url: its URL.
        storage: how object stores are reached.
        generation: the store's name of its content, in hexadecimal digits; web servers that state
            no ETag have one name for every content.
    """

    url: str
    storage: Storage
    generation: str

    def __str__(self) -> str:
        return self.url

    @property
    def identity(self) -> Json:
        """JSON values that change when the content does."""
        return {"url": self.url, "bytes": self.size, "generation": self.generation}

    @property
    def size(self) -> int:
        """Bytes of the file. Raises the errors of :meth:`read`."""
        return _count_bytes(self)

    def holds(self, place: int) -> bool:
        """Whether there is a byte of this number, counted from 0. Raises as :meth:`read` does."""
        try:
            self._content(self._begin(place, place + 1).result(timeout=PATIENCE_SECONDS))
        except (ValueError, OSError) as error:
            if status(error) == "OUT_OF_RANGE":
                return False
            raise self._error(error) from error
        return True

    def read(self, start: int, stop: int | None) -> bytes:
        """Read the bytes from ``start`` to ``stop``, all of which must be there; None: to the end.

        Raises:
            TransientReadError: another attempt may succeed.
            PermanentReadError: the file ends before.
            WorkerFault: the file is gone, was changed, or may not be read.
        """
        return self._wait(self._begin(start, stop), _patience(start, stop))

    def read_tail(self, start: int) -> bytes:
        """Read the few bytes from ``start`` to the end. Raises the errors of :meth:`read`."""
        return self._wait(self._begin(start, None), PATIENCE_SECONDS)

    def read_parts(self, parts: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """Read several parts in their order, some of them at a time.

        Args:
            parts: the first byte of each, and the one behind its last. None is empty.

        Raises:
            The errors of :meth:`read`.
        """
        later = iter(parts)
        pending = deque((self._begin(*part), part) for part in islice(later, _AT_A_TIME))
        while pending:
            under_way, part = pending.popleft()
            content = self._wait(under_way, _patience(*part))
            pending.extend((self._begin(*part), part) for part in islice(later, 1))
            yield content

    def read_whole(self, most: int) -> bytes:
        """Read the whole file by one request.

        Args:
            most: bytes that it may have.

        Raises:
            PermanentReadError: it has more.
            The errors of :meth:`read`.
        """
        if self.holds(most):
            raise PermanentReadError(f"{self} has more than {most:,} bytes, the most expected")
        return self.read(0, None)

    def open(self, buffer_bytes: int = BUFFER_BYTES) -> BinaryIO:
        """Open a stream of the file, which may be read at any position.

        Args:
            buffer_bytes: bytes that a request asks for at least.
        """
        return io.BufferedReader(_Stream(self), buffer_bytes)

    def _begin(self, start: int, stop: int | None) -> ts.Future[KvStore.ReadResult]:
        return _open(self.url, self.storage).read("", byte_range=slice(start, stop))

    def _wait(self, future: ts.Future[KvStore.ReadResult], patience: float) -> bytes:
        try:
            return self._content(future.result(timeout=patience))
        except (ValueError, OSError) as error:
            raise self._error(error) from error

    def _content(self, result: KvStore.ReadResult) -> bytes:
        """What was read, once it is known to be of the content that was found at first."""
        if result.state != "value" or result.stamp.generation.hex() != self.generation:
            change = "removed" if result.state == "missing" else "changed"
            raise WorkerFault(f"{self} was {change} since it was first looked at: start again")
        return bytes(result.value)

    def _error(self, error: Exception) -> BeamInferenceError:
        return read_error(error, str(self))


def _patience(start: int, stop: int | None) -> float:
    """How long some bytes may take: few of them no longer than any small answer."""
    is_small = stop is not None and stop - start <= _TAIL_BYTES
    return PATIENCE_SECONDS if is_small else TRANSFER_SECONDS


def find_remote_file(url: str, storage: Storage) -> RemoteFile:
    """Find the file at a URL.

    Raises:
        VolumeError: there is none, it is empty, or its server does not send parts of it.
        The errors of :meth:`RemoteFile.read`.
    """
    try:
        result = _open(url, storage).read("", byte_range=slice(0, 1)).result(PATIENCE_SECONDS)
    except (ValueError, OSError) as error:
        if status(error) == "OUT_OF_RANGE":
            raise VolumeError(
                f"{url} is empty, or its server sends other parts of it than it is asked for"
            ) from None
        if "ignored by server" in str(error):
            raise VolumeError(
                f"{url}: its server sends whole files only, and no parts of them (byte ranges), "
                "which files of any size need. Copy it here first."
            ) from None
        raise read_error(error, url) from error
    if result.state != "value":
        raise VolumeError(f"there is nothing at {url}")
    return RemoteFile(url, storage, result.stamp.generation.hex())


@functools.lru_cache(maxsize=16)
def _open(url: str, storage: Storage) -> KvStore:
    """The store of one file alone, whose key is empty: the whole URL is decoded, as it should be.

    Raises:
        VolumeError: the URL cannot be understood.
    """
    try:
        return open_with(
            lambda context: KvStore.open(with_settings(url, storage), context=context), storage
        )
    except (ValueError, OSError) as error:
        raise VolumeError(f"cannot open {url}: {one_line(error)}") from None


@functools.lru_cache(maxsize=2**16)
def _count_bytes(file: RemoteFile) -> int:
    """The length of a file, by looking for bytes that are there and others that are not."""
    held = 0
    beyond = _FIRST_PROBE
    while beyond < _LARGEST_FILE and file.holds(beyond):
        held = beyond
        beyond *= 4
    while beyond - held > _TAIL_BYTES:
        middle = (held + beyond) // 2
        if file.holds(middle):
            held = middle
        else:
            beyond = middle
    return held + len(file.read_tail(held))


@functools.lru_cache(maxsize=_KEPT_BUFFERS)
def _read_kept(file: RemoteFile, number: int) -> bytes:
    """One of the parts of a file that readers of headers come back to; empty behind its end."""
    start = number * BUFFER_BYTES
    try:
        return file.read(start, start + BUFFER_BYTES)
    except PermanentReadError:  # mostly because it ends before
        return file.read_tail(start) if file.holds(start) else b""


class _Stream(io.RawIOBase):
    """A file that is read at any position, one request after the other."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._position = 0

    @property
    def name(self) -> str:
        return self._file.url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        position = offset + (self._file.size if whence == io.SEEK_END else origin[whence])
        if position < 0:
            raise ValueError(f"a position of {position} in {self._file}")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        if len(view) > BUFFER_BYTES:
            stop = min(self._position + len(view), self._file.size)
            content = self._file.read(self._position, stop) if stop > self._position else b""
        else:  # up to the end of the kept part, which may be less than is wanted
            number, start = divmod(self._position, BUFFER_BYTES)
            content = _read_kept(self._file, number)[start : start + len(view)]
        view[: len(content)] = content
        self._position += len(content)
        return len(content)
