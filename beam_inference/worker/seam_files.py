"""The sums that chunks are made of, in the state folder: ``seams/FINGERPRINT/000000000/RECEIVER/CONTRIBUTOR.NUMBER``.

What a contributor says to a receiver is float32, little-endian, box after box of
:func:`beam_inference.geometry.seam_sums.seam_boxes`, each in C order (channel, z, y, x). Files hold
:data:`FILE_VALUES` of it each, the last one what is left, and their CRC-32. They have one writer
and one reader, so the reader removes them.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.config.storage import Storage
from beam_inference.geometry.seam_sums import Sums
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.limits import SEAM_FILES_AT_ONCE, WRITTEN_BYTES
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    again_if_failed,
    delete_folder,
    open_kvstore,
    persistently,
)

_CRC_BYTES = 4
FILE_VALUES = WRITTEN_BYTES // 4
"""Values in a file at most: as many bytes as blocks are written at a time."""


class SeamFiles:
    """Those of one job.

    Args:
        state_url: its state folder. storage: how that is reached.
        fingerprint: the job's.
    """

    def __init__(self, state_url: str, storage: Storage, fingerprint: str) -> None:
        self._url = f"{state_url}/seams/{fingerprint[:16]}"
        self._store = open_kvstore(self._url, storage)

    def write(self, receiver: int, contributor: int, sums: Sequence[Sums]) -> None:
        """Write what a contributor's sums say to a receiver, durably."""
        for number, content in enumerate(_contents(sums)):
            content.extend(_crc32(content))
            self._write(_key(receiver, contributor, number), content)

    def _write(self, key: str, content: bytearray) -> None:
        persistently(
            "write",
            f"{self._url}/{key}",
            lambda: self._store.write(key, content).result(  # type: ignore[arg-type]  # a buffer does
                TRANSFER_SECONDS
            ),
        )

    def read(
        self, receiver: int, wanted: Sequence[tuple[int, Sequence[Zyx]]], channels: int
    ) -> list[list[Sums]] | None:
        """What each contributor says, given the shapes of its boxes; None if any of it is absent or damaged."""
        sizes = [channels * sum(map(math.prod, shapes)) for _, shapes in wanted]
        keys = [
            [_key(receiver, contributor, number) for number in range(ceil_div(size, FILE_VALUES))]
            for (contributor, _), size in zip(wanted, sizes, strict=True)
        ]
        waiting = iter([key for files in keys for key in files])
        reading = deque(map(self._store.read, islice(waiting, SEAM_FILES_AT_ONCE)))
        found = []
        for files, (_, shapes), size in zip(keys, wanted, sizes, strict=True):
            values = arrays.empty((size,), np.float32)
            for number, key in enumerate(files):
                result = persistently(
                    "read",
                    f"{self._url}/{key}",
                    again_if_failed(
                        reading.popleft(), partial(self._store.read, key), TRANSFER_SECONDS
                    ),
                )
                here = values[number * FILE_VALUES :][:FILE_VALUES]
                if result.state != "value" or not _parse(bytes(result.value), here):
                    return None
                del result
                reading.extend(map(self._store.read, islice(waiting, 1)))
            found.append(list(_boxes(values, shapes, channels)))
        return found

    def forget_all(self) -> int:
        """Remove all files of the job; how many there were."""
        everything = ts.KvStore.KeyRange()
        there = len(
            persistently(
                "list", self._url, lambda: self._store.list(everything).result(TRANSFER_SECONDS)
            )
        )
        delete_folder(self._store, self._url)
        return there

    def forget(self, receiver: int) -> None:
        """Remove what a receiver was made of."""
        delete_folder(self._store, self._url, _folder(receiver))


def _folder(receiver: int) -> str:
    return f"{receiver // CHUNKS_PER_FOLDER:09d}/{receiver:012d}/"


def _key(receiver: int, contributor: int, number: int) -> str:
    return f"{_folder(receiver)}{contributor:012d}.{number:03d}"


def _contents(sums: Sequence[Sums]) -> Iterator[bytearray]:
    """The bytes of arrays, one after the other, file by file."""
    content = bytearray()
    for array in sums:
        for index in np.ndindex(array.shape[:-2]):  # a copy of a plane is less than one of a box
            plane = np.ascontiguousarray(array[index], "<f4").data.cast("B")
            while plane:
                room = 4 * FILE_VALUES - len(content)
                content += plane[:room]
                plane = plane[room:]
                if len(content) == 4 * FILE_VALUES:
                    yield content
                    content = bytearray()
    if content:
        yield content


def _crc32(content: bytearray | memoryview) -> bytes:
    return zlib.crc32(content).to_bytes(_CRC_BYTES, "little")


def _parse(content: bytes, values: NDArray[np.float32]) -> bool:
    """Fill in a file's values; False if it does not hold as many, or is damaged."""
    there = memoryview(content)[:-_CRC_BYTES]
    if len(there) != values.nbytes or _crc32(there) != content[-_CRC_BYTES:]:
        return False
    values[:] = np.frombuffer(there, "<f4")
    return True


def _boxes(values: NDArray[np.float32], shapes: Sequence[Zyx], channels: int) -> Iterator[Sums]:
    start = 0
    for shape in shapes:
        stop = start + channels * math.prod(shape)
        yield values[start:stop].reshape(channels, *shape)
        start = stop
