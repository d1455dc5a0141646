"""The sums that chunks are made of, as files in the state folder: ``seams/FINGERPRINT/000000000/RECEIVER/CONTRIBUTOR``.

A file has one writer and one reader, so the reader removes it. Its content is raw float32, little-endian, box after box
of :func:`beam_inference.seams.seam_boxes`, each in C order (channel, z, y, x), and a CRC-32 of all that.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import partial

import numpy as np
import tensorstore as ts

from beam_inference.bounding_box import Zyx
from beam_inference.chunk_entries import CHUNKS_PER_FOLDER
from beam_inference.seams import Sums
from beam_inference.storage import Storage
from beam_inference.stores import TRANSFER_SECONDS, again_if_failed, delete_folder, open_kvstore, persistently

_CRC_BYTES = 4


class SeamFiles:
    """Those of one job.

    Args:
        state_url: its state folder. storage: how that is reached.
        fingerprint: the job's.
    """

    def __init__(self, state_url: str, storage: Storage, fingerprint: str) -> None:
        self._url = f"{state_url}/seams/{fingerprint[:16]}"
        self._store = open_kvstore(self._url, storage)

    def write(self, receiver: int, contributor: int, arrays: Sequence[Sums]) -> int:
        """Write what a contributor's sums say to a receiver, durably; the number of bytes."""
        content = b"".join(np.ascontiguousarray(array, "<f4").tobytes() for array in arrays)
        content += zlib.crc32(content).to_bytes(_CRC_BYTES, "little")
        key = f"{_folder(receiver)}{contributor:012d}"
        persistently("write", f"{self._url}/{key}", lambda: self._store.write(key, content).result(TRANSFER_SECONDS))
        return len(content)

    def read(
        self, receiver: int, wanted: Sequence[tuple[int, Sequence[Zyx]]], channels: int
    ) -> list[list[Sums]] | None:
        """What each contributor says, given the shapes of its boxes; None if any of it is absent or damaged."""
        keys = [f"{_folder(receiver)}{contributor:012d}" for contributor, _ in wanted]
        reading = [self._store.read(key) for key in keys]  # all at once
        found = []
        for key, under_way, (_, shapes) in zip(keys, reading, wanted, strict=True):
            result = persistently(
                "read",
                f"{self._url}/{key}",
                again_if_failed(under_way, partial(self._store.read, key), TRANSFER_SECONDS),
            )
            arrays = _parsed(bytes(result.value), shapes, channels) if result.state == "value" else None
            if arrays is None:
                return None
            found.append(arrays)
        return found

    def forget_all(self) -> int:
        """Remove all files of the job; how many there were."""
        everything = ts.KvStore.KeyRange()
        there = len(persistently("list", self._url, lambda: self._store.list(everything).result(TRANSFER_SECONDS)))
        delete_folder(self._store, self._url)
        return there

    def forget(self, receiver: int) -> None:
        """Remove what a receiver was made of."""
        delete_folder(self._store, self._url, _folder(receiver))


def _folder(receiver: int) -> str:
    return f"{receiver // CHUNKS_PER_FOLDER:09d}/{receiver:012d}/"


def _parsed(content: bytes, shapes: Sequence[Zyx], channels: int) -> list[Sums] | None:
    values = memoryview(content)[:-_CRC_BYTES]
    sizes = [channels * math.prod(shape) for shape in shapes]
    if len(values) != 4 * sum(sizes) or zlib.crc32(values).to_bytes(_CRC_BYTES, "little") != content[-_CRC_BYTES:]:
        return None
    flat, arrays, start = np.frombuffer(values, "<f4"), [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        arrays.append(flat[start : start + size].reshape(channels, *shape))
        start += size
    return arrays
