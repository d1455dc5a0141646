"""Arrays that stages write for one another: a file for each chunk and kind of data.

The file of chunk 12 is ``KIND/000000000/000000000012``. It says itself which file of which job it
is, so that no other one is taken for it. Whoever can write there can write any numbers: those that
loops without bounds are given are checked by whoever reads them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.kvstores import (
    MOST_PART_BYTES,
    TRANSFER_SECONDS,
    LinkGuard,
    open_kvstore,
    or_else_again,
    refuse_link,
    retry_request,
)
from beam_inference.volumes.packed_arrays import Arrays, pack_arrays, unpack_arrays

Value = TypeVar("Value")

_AT_A_TIME = 32
"""Requests under way, and files in memory, while many are read or written."""


@dataclass(frozen=True, slots=True)
class RecordsPart:
    """A part of a file of records.

    Attributes:
        index: of the file.
        number: of the part in it.
        start, stop: its first record, and the one behind its last.
    """

    index: int
    number: int
    start: int
    stop: int


class Scratch:
    """The files under a URL.

    Requests that fail in a way that may pass are repeated; in the end they raise a WorkerFault.

    Args:
        url: a folder of the job's fingerprint, or one in it.
        storage: how it is reached.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        refuse_link(url)
        self._url = url
        self._storage = storage
        self._store = open_kvstore(url, storage)
        self._guard = LinkGuard(url)
        self._place = "/".join(url.split("/")[-2:])

    def write(self, kind: str, index: int, **arrays: AnyArray) -> None:
        """Write named arrays, durably; replaces earlier ones."""
        self.write_all(kind, [(index, arrays)])

    def write_all(self, kind: str, files: Iterable[tuple[int, Arrays]]) -> None:
        """Write many files, some at a time."""

        def begin(index: int, arrays: Arrays) -> Callable[[], Any]:
            key = _key(kind, index)
            return self._begin_to_write(key, pack_arrays(arrays, f"{self._place}/{key}"))

        for finish in _some_ahead(begin(index, arrays) for index, arrays in files):
            finish()

    def read(self, kind: str, index: int) -> Arrays:
        """Read the named arrays of one file.

        Raises:
            StateError: it is absent or damaged.
        """
        return next(self.read_all(kind, [index]))

    def read_all(self, kind: str, indices: Iterable[int]) -> Iterator[Arrays]:
        """Read the arrays of many files, in order, some of them ahead; raises as `read`."""
        keys = (_key(kind, index) for index in indices)
        for key, result in _some_ahead(
            (key, self._request("read", key, self._store.read)) for key in keys
        ):
            response = result()
            try:
                if response.state != "value":
                    raise self._broken(key, "is absent")
                arrays = unpack_arrays(bytes(response.value), f"{self._place}/{key}")
            except ValueError as error:
                raise self._broken(key, f"is damaged ({error})") from None
            yield _NamedArrays(arrays, self._broken(key, "lacks an array"))

    def write_records(
        self, kind: str, index: int, records: NDArray[np.void], stops: Sequence[int]
    ) -> None:
        """Write records so that parts of them can be read without the rest.

        Args:
            kind: of the file.
            index: of the file.
            records: the records.
            stops: how many records there are up to the end of each part.
        """
        content = records.tobytes()
        self._begin_to_write(_key(kind, index), content)()
        edges = [records.itemsize * stop for stop in (0, *stops)]
        sums = [zlib.crc32(content[start:stop]) for start, stop in pairwise(edges)]
        self.write(_sums(kind), index, sums=np.array(sums, np.uint32))

    def read_records(
        self, kind: str, parts: Iterable[RecordsPart], dtype: np.dtype[np.void]
    ) -> Iterator[NDArray[np.void]]:
        """Read parts of files of records, in order, some of them ahead; raises as `read`."""

        @cache
        def sums_of(index: int) -> list[int]:
            sums: list[int] = self.read(_sums(kind), index)["sums"].tolist()
            return sums

        def begin(part: RecordsPart) -> tuple[RecordsPart, Callable[[], Any]]:
            span = slice(part.start * dtype.itemsize, part.stop * dtype.itemsize)
            key = _key(kind, part.index)
            read = self._request("read", key, lambda key: self._store.read(key, byte_range=span))
            return part, read

        for part, result in _some_ahead(map(begin, parts)):
            response = result()
            content = bytes(response.value)
            count = part.stop - part.start
            if response.state != "value" or len(content) != count * dtype.itemsize:
                raise self._broken(_key(kind, part.index), "is absent or cut off")
            if [zlib.crc32(content)] != sums_of(part.index)[part.number : part.number + 1]:
                raise self._broken(_key(kind, part.index), "is damaged, or another one")
            yield np.frombuffer(content, dtype)

    def delete(self) -> None:
        """Delete everything under the URL."""
        delete_folder(self._url, self._storage)

    def _begin_to_write(self, key: str, content: bytes) -> Callable[[], Any]:
        self._guard.check(key)
        return self._request("write", key, lambda key: self._store.write(key, content))

    def _request(self, what: str, key: str, send: Callable[[str], Any]) -> Callable[[], Any]:
        """Send a request; the function returned waits for its result, and retries it."""
        result = or_else_again(send(key), lambda: send(key), TRANSFER_SECONDS)
        return lambda: retry_request(what, f"{self._url}/{key}", result, MOST_PART_BYTES)

    def _broken(self, key: str, how: str) -> StateError:
        return StateError(
            f"the scratch file {self._url}/{key} {how}: an earlier stage wrote it. Was the folder "
            "changed? Give the command with --overwrite to start again; evaluate, without such a "
            "flag, after removing that folder."
        )


class _NamedArrays(dict[str, AnyArray]):
    """The arrays of a file; one that it does not have is an error of the file."""

    def __init__(self, arrays: Arrays, error: StateError) -> None:
        super().__init__(arrays)
        self._error = error

    def __missing__(self, name: str) -> AnyArray:
        raise self._error


def _sums(kind: str) -> str:
    """The kind of the files that hold the checksums of parts of files of records."""
    return f"{kind}_sums"


def _key(kind: str, index: int) -> str:
    return f"{kind}/{index // CHUNKS_PER_FOLDER:09d}/{index:012d}"


def _some_ahead(requests: Iterable[Value]) -> Iterator[Value]:
    """Yield requests in order, but take some in advance: they are sent as they are taken."""
    waiting: deque[Value] = deque()
    for request in requests:
        waiting.append(request)
        if len(waiting) >= _AT_A_TIME:
            yield waiting.popleft()
    yield from waiting
