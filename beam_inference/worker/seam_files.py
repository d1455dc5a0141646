"""Files of partial sums that chunks exchange, in the state folder of a job.

A file's key is ``seams/FINGERPRINT/000000000/RECEIVER/CONTRIBUTOR.NUMBER``. What a contributor
gives to a receiver is float32, little-endian, box after box of
:func:`beam_inference.geometry.seam_sums.seam_boxes`, each in C order (channel, z, y, x). It is cut
into files of a fixed number of values, each followed by a CRC-32 of which file of which job it is,
and of its values: no other one is taken for it. A file has one writer and one reader, so the reader
removes it.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.config.storage import Storage
from beam_inference.geometry.seam_sums import Sums
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.limits import SEAM_FILES_AT_ONCE, WRITTEN_BYTES
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import (
    MOST_PART_BYTES,
    TRANSFER_SECONDS,
    LinkGuard,
    open_kvstore,
    or_else_again,
    retry_request,
)

_CRC_BYTES = 4
_VALUE_BYTES = 4
FILE_VALUES = WRITTEN_BYTES // _VALUE_BYTES
"""Values in a file at most: as many bytes as blocks are written at a time."""


class SeamFiles:
    """Reads, writes and deletes the seam files of one job.

    Args:
        state_url: the job's state folder.
        storage: how that is reached.
        key: name of the folders of records of the job, :attr:`ResolvedJob.records_key`.
        file_values: values in a file at most.
    """

    def __init__(
        self,
        state_url: str,
        storage: Storage,
        key: str,
        file_values: int = FILE_VALUES,
    ) -> None:
        self._job = key
        folder = f"seams/{key[:16]}"
        self._url = f"{state_url}/{folder}"
        self._guard = LinkGuard(state_url, folder)
        self._storage = storage
        self._store = open_kvstore(self._url, storage)
        self._file_values = file_values

    def write(self, receiver: int, contributor: int, sums: Sequence[Sums]) -> None:
        """Write what a contributor gives to a receiver, durably.

        Args:
            receiver: a chunk.
            contributor: a chunk.
            sums: an array (channels, Z, Y, X) for each box.
        """
        for number, content in enumerate(_contents(sums, self._file_values)):
            key = _key(receiver, contributor, number)
            content.extend(self._crc32(key, content))
            self._write(key, content)

    def read(
        self, receiver: int, wanted: Sequence[tuple[int, Sequence[Zyx]]], channels: int
    ) -> list[list[Sums]] | None:
        """Read what contributors give to a receiver.

        Args:
            receiver: a chunk.
            wanted: contributors, each with the shapes of its boxes.
            channels: output channels of the network.

        Returns:
            For each contributor an array (channels, Z, Y, X) per box; None if any file is absent or
            damaged.
        """
        sizes = [channels * sum(map(math.prod, shapes)) for _, shapes in wanted]
        keys = [
            [
                _key(receiver, contributor, number)
                for number in range(ceil_div(size, self._file_values))
            ]
            for (contributor, _), size in zip(wanted, sizes, strict=True)
        ]
        waiting = iter([key for files in keys for key in files])
        reading = deque(map(self._store.read, islice(waiting, SEAM_FILES_AT_ONCE)))
        sums = []
        for files, (_, shapes), size in zip(keys, wanted, sizes, strict=True):
            values = arrays.empty((size,), np.float32)
            for number, key in enumerate(files):
                result = self._await_read(reading.popleft(), key)
                part = values[number * self._file_values :][: self._file_values]
                if result.state != "value" or not self._parse(key, bytes(result.value), part):
                    return None
                del result
                reading.extend(map(self._store.read, islice(waiting, 1)))
            sums.append(list(_boxes(values, shapes, channels)))
        return sums

    def forget(self, receiver: int) -> None:
        """Delete all that was given to a receiver."""
        delete_folder(self._url, self._storage, _folder(receiver))

    def forget_all(self) -> int:
        """Delete all files of the job; return how many there were."""
        listing = partial(list_keys, self._store, self._storage, timeout=TRANSFER_SECONDS)
        keys = retry_request("list", self._url, listing)
        delete_folder(self._url, self._storage)
        return len(keys)

    def _write(self, key: str, content: bytearray) -> None:
        self._guard.check(key)
        retry_request(
            "write",
            f"{self._url}/{key}",
            lambda: self._store.write(key, content).result(  # type: ignore[arg-type]  # a buffer does
                TRANSFER_SECONDS
            ),
        )

    def _parse(self, key: str, content: bytes, values: NDArray[np.float32]) -> bool:
        """Fill in a file's values; False if it is damaged, another file, or of other length."""
        payload = memoryview(content)[:-_CRC_BYTES]
        is_whole = len(payload) == values.nbytes
        if not is_whole or self._crc32(key, payload) != content[-_CRC_BYTES:]:
            return False
        values[:] = np.frombuffer(payload, "<f4")
        return True

    def _crc32(self, key: str, content: bytearray | memoryview) -> bytes:
        of_name = zlib.crc32(f"{self._job}/{key}".encode())
        return zlib.crc32(content, of_name).to_bytes(_CRC_BYTES, "little")

    def _await_read(self, future: Any, key: str) -> Any:
        """Wait for a file; request it again if that fails."""
        request = partial(self._store.read, key)
        action = or_else_again(future, request, TRANSFER_SECONDS)
        return retry_request("read", f"{self._url}/{key}", action, MOST_PART_BYTES)


def _folder(receiver: int) -> str:
    return f"{receiver // CHUNKS_PER_FOLDER:09d}/{receiver:012d}/"


def _key(receiver: int, contributor: int, number: int) -> str:
    return f"{_folder(receiver)}{contributor:012d}.{number:03d}"


def _contents(sums: Sequence[Sums], file_values: int) -> Iterator[bytearray]:
    """The bytes of arrays, one after the other, file by file."""
    file_bytes = _VALUE_BYTES * file_values
    content = bytearray()
    for array in sums:
        for index in np.ndindex(array.shape[:-2]):  # a copy of a plane is less than one of a box
            plane = np.ascontiguousarray(array[index], "<f4").data.cast("B")
            while plane:
                room = file_bytes - len(content)
                content += plane[:room]
                plane = plane[room:]
                if len(content) == file_bytes:
                    yield content
                    content = bytearray()
    if content:
        yield content


def _boxes(values: NDArray[np.float32], shapes: Sequence[Zyx], channels: int) -> Iterator[Sums]:
    start = 0
    for shape in shapes:
        stop = start + channels * math.prod(shape)
        yield values[start:stop].reshape(channels, *shape)
        start = stop
