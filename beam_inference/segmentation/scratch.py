"""Arrays that stages write for one another: a file for each chunk and kind of data.

The file of chunk 12 is ``KIND/000000000/000000000012``.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    delete_folder,
    open_kvstore,
    or_else_again,
    refuse_link,
    retry_request,
)

Arrays = Mapping[str, AnyArray]
Value = TypeVar("Value")

_AT_A_TIME = 32
"""Requests under way, and files in memory, while many are read or written."""


class Scratch:
    """The files under a URL.

    Requests that fail in a way that may pass are repeated; in the end they raise a WorkerFault.
    """

    def __init__(self, url: str, storage: Storage) -> None:
        refuse_link(url)
        self._url = url
        self._store = open_kvstore(url, storage)

    def write(self, kind: str, index: int, **arrays: AnyArray) -> None:
        """Write named arrays, durably; replaces earlier ones."""
        self.write_all(kind, [(index, arrays)])

    def write_all(self, kind: str, files: Iterable[tuple[int, Arrays]]) -> None:
        """Write many files, some at a time."""

        def begin(index: int, arrays: Arrays) -> Callable[[], Any]:
            content = _pack(arrays)
            return self._request(
                "write", _key(kind, index), lambda key: self._store.write(key, content)
            )

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
                arrays = _unpack(response.value)
            except (zstandard.ZstdError, ValueError, TypeError) as error:
                raise self._broken(key, f"is damaged ({error})") from None
            yield arrays

    def write_records(self, kind: str, index: int, records: NDArray[np.void]) -> None:
        """Write records so that some of them can be read without the rest."""
        content = records.tobytes()
        self._request("write", _key(kind, index), lambda key: self._store.write(key, content))()

    def read_records(
        self, kind: str, parts: Iterable[tuple[int, int, int]], dtype: np.dtype[np.void]
    ) -> Iterator[NDArray[np.void]]:
        """Read the records ``start … stop`` of each ``(index, start, stop)``; raises as `read`."""

        def begin(index: int, start: int, stop: int) -> tuple[str, int, Callable[[], Any]]:
            part = slice(start * dtype.itemsize, stop * dtype.itemsize)
            key = _key(kind, index)
            return (
                key,
                stop - start,
                self._request("read", key, lambda key: self._store.read(key, byte_range=part)),
            )

        for key, count, result in _some_ahead(begin(*part) for part in parts):
            response = result()
            if response.state != "value" or len(response.value) != count * dtype.itemsize:
                raise self._broken(key, "is absent or cut off")
            yield np.frombuffer(bytes(response.value), dtype)

    def delete(self) -> None:
        """Delete everything under the URL."""
        delete_folder(self._store, self._url)

    def _request(self, what: str, key: str, send: Callable[[str], Any]) -> Callable[[], Any]:
        """Send a request; the function returned waits for its result, and retries it."""
        result = or_else_again(send(key), lambda: send(key), TRANSFER_SECONDS)
        return lambda: retry_request(what, f"{self._url}/{key}", result)

    def _broken(self, key: str, how: str) -> StateError:
        return StateError(
            f"the scratch file {self._url}/{key} {how}: an earlier stage wrote it. Was the folder "
            "changed? Give the command with --overwrite to start again."
        )


def _pack(arrays: Arrays) -> bytes:
    """One frame of Zstandard, with a checksum: names, dtypes and shapes as JSON, then the values.

    Unlike in an ``.npz`` file, nothing is parsed by ``ast``, and packing takes a tenth of the time.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    heads = [[name, _described(each.dtype), each.shape] for name, each in contiguous.items()]
    packer = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
    pieces = [packer.compress(json.dumps(heads).encode() + b"\n")]
    pieces += [packer.compress(each.data.cast("B")) for each in contiguous.values() if each.size]
    return b"".join([*pieces, packer.flush()])


def _unpack(packed: bytes) -> Arrays:
    """The arrays that were packed, which can be written to: so loops are compiled for one kind.

    Raises:
        ValueError, TypeError, zstandard.ZstdError: they are damaged.
    """
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    content = bytearray(unpacker.decompress(packed))
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("it is cut off, or more follows")
    start = content.index(b"\n") + 1
    arrays = {}
    for name, description, shape in json.loads(content[:start]):
        dtype = _dtype(description)
        count = math.prod(shape)
        arrays[name] = np.frombuffer(content, dtype, count, start).reshape(shape)
        start += count * dtype.itemsize
    return arrays


def _described(dtype: AnyDtype) -> str | list[Any]:
    """A dtype as JSON; of records, their fields."""
    return dtype.str if dtype.names is None else dtype.descr


def _dtype(description: str | list[Any]) -> AnyDtype:
    if isinstance(description, str):
        return np.dtype(description)
    return np.dtype([(name, kind, *map(tuple, shape)) for name, kind, *shape in description])


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
