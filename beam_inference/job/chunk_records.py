"""Small records of chunks, one file each, in a folder of a key-value store.

Their keys are like ``FOLDER/000000000/000000000012.json``: folders hold 4096 of
them, and keys sort as their chunks do, so that a range of chunks is one range of keys.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import tensorstore as ts

from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, StateError
from beam_inference.job.seals import open_record, seal_record
from beam_inference.volumes.conditional_writes import delete_value
from beam_inference.volumes.folders import begin_listing
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    LinkGuard,
    local_bytes,
    or_else_again,
    refuse_pipe,
    retry_request,
)

CHUNKS_PER_FOLDER = 4096
MOST_CHUNKS = 10**12
"""Of a job: its records are named by numbers of 12 digits."""

_LISTINGS_AT_A_TIME = 32
_READS_AT_A_TIME = 64
_MOST_BYTES = 2**23
"""Of a record: a receipt of a chunk with a thousand channels has some 200 KB."""

_CHUNK_KEY = re.compile(rb"/(\d{12})\.json$")


def folders(stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunks of a folder's size: first chunk, and the one after the last."""
    for first in range(start, stop, CHUNKS_PER_FOLDER):
        yield first, min(stop, first + CHUNKS_PER_FOLDER)


def check_count(count: int, what: str) -> None:
    """Refuse more chunks than anybody could compute, as of a volume of a forged shape.

    Args:
        count: number of chunks.
        what: of which, for the message.

    Raises:
        ConfigError: there are more than :data:`MOST_CHUNKS`.
    """
    if count > MOST_CHUNKS:
        raise ConfigError(
            f"{what} would have {float(count):.3g} chunks, and {MOST_CHUNKS:.0e} are the most: "
            "check the shape that the volume states, or take larger chunks"
        )


def list_absent(
    start: int, stop: int, present: Callable[[int, int], Iterable[int]]
) -> Iterator[int]:
    """Yield the chunks of ``start … stop`` that are not among those that ``present`` lists.

    ``present`` is called for one folder at a time.
    """
    for first in range(start, stop, CHUNKS_PER_FOLDER):
        last = min(stop, first + CHUNKS_PER_FOLDER)
        listed = set(present(first, last))
        yield from (index for index in range(first, last) if index not in listed)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as it is stored.

    Attributes:
        chunk: the chunk under whose name it lies.
        url: URL of its file.
        text: its JSON.
        fault: what shows that the text is not the one that was written; None if nothing does.
        generation: of the file, as the store tells it.
    """

    chunk: int
    url: str
    text: bytes
    fault: str | None
    generation: bytes


class _Reading(NamedTuple):
    """A record that is being read.

    Attributes:
        chunk: whose record it is.
        key: of the record.
        length: bytes of a local file; 0 of an object.
        read: begins to read it again.
        result: a future.
    """

    chunk: int
    key: str
    length: int
    read: Callable[[], Any]
    result: Any


class ChunkEntries:
    """The records in one folder, each with a seal (see :mod:`beam_inference.job.seals`).

    A request that fails in a way that may pass is repeated, with backoff; then WorkerFault is
    raised.

    Args:
        store: the key-value store.
        url: URL of the store, for messages.
        storage: the settings that it was opened with.
        folder: folder of the records in it.
    """

    def __init__(self, store: Any, url: str, storage: Storage, folder: str) -> None:
        self._store = store
        self._url = url
        self._storage = storage
        self._folder = folder
        self._guard = LinkGuard(url)

    def remove(self, chunk: int) -> None:
        """Remove a chunk's record, if there is one."""
        self._write(self._key(chunk), None)

    def remove_unchanged(self, chunk: int, generation: bytes) -> None:
        """Remove a chunk's record, unless somebody has written it anew since it was read."""
        key = self._key(chunk)
        self._guard.check(key)
        retry_request(
            "write",
            f"{self._url}/{key}",
            lambda: delete_value(self._store, key, self._url, generation),
        )

    def write(self, chunk: int, text: str) -> None:
        """Write a chunk's record, a JSON object, durably; replaces an earlier one."""
        self._write(self._key(chunk), seal_record(text))

    def _write(self, key: str, text: str | None) -> None:
        self._guard.check(key)
        retry_request(
            "write",
            f"{self._url}/{key}",
            lambda: self._store.write(key, text).result(timeout=PATIENCE_SECONDS),
        )

    def read(self, chunks: Iterable[int]) -> Iterator[StoredRecord]:
        """Read the records of some chunks, where there is one, in order."""
        keys = ((chunk, self._key(chunk)) for chunk in chunks)
        under_way = deque(map(self._begin_read, islice(keys, _READS_AT_A_TIME)))
        while under_way:
            chunk, key, length, read, reading = under_way.popleft()
            url = f"{self._url}/{key}"
            most = max(length, _MOST_BYTES)  # it may have been written since
            result = retry_request("read", url, or_else_again(reading, read), most)
            if result.state == "value":
                text = bytes(result.value)
                generation = result.stamp.generation
                if length > _MOST_BYTES:
                    fault = f"it has {length:,} bytes, more than any record"
                    yield StoredRecord(chunk, url, text, fault, generation)
                else:
                    yield _open(chunk, url, text, generation)
            del result
            under_way.extend(map(self._begin_read, islice(keys, 1)))

    def _begin_read(self, place: tuple[int, str]) -> _Reading:
        """Begin to read a record; of one that is none, a byte tells its generation."""
        chunk, key = place
        url = f"{self._url}/{key}"
        length = local_bytes(url)
        refuse_pipe(url, max(length, _MOST_BYTES))
        part = slice(0, 1) if length > _MOST_BYTES else slice(None)
        read = partial(self._store.read, key, byte_range=part)
        return _Reading(chunk, key, length, read, read())

    def indices(self, start: int, stop: int) -> Iterator[int]:
        """List the chunks of ``start … stop`` that have a record, in order."""
        ranges = [
            (a, min(stop, a + CHUNKS_PER_FOLDER)) for a in range(start, stop, CHUNKS_PER_FOLDER)
        ]
        for first in range(0, len(ranges), _LISTINGS_AT_A_TIME):
            under_way = [
                self._listing(*each) for each in ranges[first : first + _LISTINGS_AT_A_TIME]
            ]
            for listing in under_way:
                yield from listing()

    def count(self, start: int, stop: int) -> int:
        """Count the chunks of ``start … stop`` that have a record, by listing."""
        return sum(1 for _ in self.indices(start, stop))

    def few_indices(self, start: int, stop: int) -> list[int]:
        """List the chunks that have a record in one request: where records are few."""
        return self._listing(start, stop)()

    def _key(self, chunk: int) -> str:
        return f"{self._folder}/{chunk // CHUNKS_PER_FOLDER:09d}/{chunk:012d}.json"

    def _listing(self, start: int, stop: int) -> Callable[[], list[int]]:
        """Begin to list a range of chunks; the function that is returned waits for the result."""
        keys = ts.KvStore.KeyRange(inclusive_min=self._key(start), exclusive_max=self._key(stop))
        begin = partial(begin_listing, self._store, self._storage, keys)
        request = or_else_again(begin(), begin)

        def indices() -> list[int]:
            names = retry_request("list", f"{self._url}/{self._folder}", request)
            # A killed writer leaves lock files beside the keys of a local store, people leave
            # copies and folders of copies, and a store may list a name twice.
            chunks = {int(match[1]) for match in map(_CHUNK_KEY.search, names) if match}
            listed = set(names)
            return sorted(
                chunk
                for chunk in chunks
                if start <= chunk < stop and self._key(chunk).encode() in listed
            )

        return indices


def _open(chunk: int, url: str, text: bytes, generation: bytes) -> StoredRecord:
    try:
        return StoredRecord(chunk, url, open_record(text), None, generation)
    except StateError as error:
        return StoredRecord(chunk, url, text, str(error), generation)
