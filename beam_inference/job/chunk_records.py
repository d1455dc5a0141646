"""Small records of chunks, one file each, in a folder of a key-value store.

Their keys are like ``FOLDER/000000000/000000000012.json``: folders hold 4096 of
them, and keys sort as their chunks do, so that a range of chunks is one range of keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import tensorstore as ts

from beam_inference.volumes.kvstores import PATIENCE_SECONDS, or_else_again, retry_request

CHUNKS_PER_FOLDER = 4096
_LISTINGS_AT_A_TIME = 32
_CHUNK_KEY = re.compile(rb"/(\d{12})\.json$")


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


class ChunkEntries:
    """The records in one folder.

    A request that fails in a way that may pass is repeated, with backoff; then WorkerFault is
    raised.

    Args:
        store: the key-value store.
        url: URL of the store, for messages.
        folder: folder of the records in it.
    """

    def __init__(self, store: Any, url: str, folder: str) -> None:
        self._store = store
        self._url = url
        self._folder = folder

    def write(self, chunk: int, text: str) -> None:
        """Write a chunk's record, durably; replaces an earlier one."""
        key = self._key(chunk)
        retry_request(
            "write",
            f"{self._url}/{key}",
            lambda: self._store.write(key, text).result(timeout=PATIENCE_SECONDS),
        )

    def read(self, chunks: Iterable[int]) -> Iterator[tuple[str, bytes]]:
        """Read the records of some chunks, where there is one; yields key and content, in order."""
        keys = [self._key(chunk) for chunk in chunks]
        for key, reading in [(key, self._store.read(key)) for key in keys]:
            result = retry_request(
                "read",
                f"{self._url}/{key}",
                or_else_again(reading, partial(self._store.read, key)),
            )
            if result.state == "value":
                yield key, bytes(result.value)

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
        request = or_else_again(self._store.list(keys), partial(self._store.list, keys))

        def indices() -> list[int]:
            names = retry_request("list", f"{self._url}/{self._folder}", request)
            # A killed writer leaves lock files beside the keys of a local store, and people leave
            # copies.
            return sorted(int(match[1]) for match in map(_CHUNK_KEY.search, names) if match)

        return indices
