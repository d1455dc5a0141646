"""Records of the state folder: receipts, quarantine records, notes of launches."""

from __future__ import annotations

import zlib
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import Frozen
from beam_inference.errors import Stage
from beam_inference.geometry.bounding_box import BoundingBox

Entry = TypeVar("Entry", bound="Frozen")


class ChannelStatistics(Frozen):
    """Of one channel of a chunk as written."""

    min: float
    max: float
    mean: float
    zeros: int
    nans: int

    @classmethod
    def of(cls, channel: NDArray[Any]) -> ChannelStatistics:
        """Of one channel, (Z, Y, X)."""
        return cls(
            min=float(channel.min()),
            max=float(channel.max()),
            mean=float(channel.mean(dtype=np.float64)),
            zeros=int(channel.size - np.count_nonzero(channel)),
            nans=(
                sum(int(np.isnan(plane).sum()) for plane in channel)
                if channel.dtype.kind == "f"
                else 0
            ),
        )


class Part(Frozen):
    """A box of blocks, durably written.

    Attributes:
        box: which.
        crc32: of its bytes in C order (channel, z, y, x), little-endian.
        channels: statistics of each.
    """

    box: BoundingBox
    crc32: int
    channels: list[ChannelStatistics]

    @classmethod
    def of(cls, box: BoundingBox, array: NDArray[Any]) -> Part:
        """Of what was written there, (channels, Z, Y, X)."""
        channels = [ChannelStatistics.of(channel) for channel in array]
        return cls(box=box, crc32=crc32(array), channels=channels)


class Receipt(Frozen):
    """Proof that a chunk is durably written; or, among the ``sums``, that its patches are computed.

    Attributes:
        chunk: its index.
        parts: what was written: together its core box. With ``seams: exchange`` the blocks that it
            shares with its neighbours are written apart from the rest; among the ``sums``, the rest
            alone.
        batch_size: patches per network call; below the job's if the device ran out of memory.
        uniform_patches: those whose input was one value throughout, and whose answer was known.
        seconds: per stage.
        attempts: per stage.
        finished_at: when all was durable. worker: the process that did it, ``host:pid``.
        launch: which launch did it.
        fingerprint: of the job.
    """

    chunk: int
    parts: list[Part]
    batch_size: int
    uniform_patches: int
    seconds: dict[Stage, float]
    attempts: dict[Stage, int]
    finished_at: datetime
    worker: str
    launch: str
    fingerprint: str


class QuarantineRecord(Frozen):
    """Why a chunk could not be done.

    Attributes:
        chunk: its index.
        box: its core box. input_box: what it reads.
        stage: what failed; "seams" if chunks that it shares voxels with could not be done.
        cause: the error.
        attempts: how often it was tried.
        fingerprint: of the job.
    """

    chunk: int
    box: BoundingBox
    input_box: BoundingBox
    stage: Stage
    cause: str
    attempts: int
    launch: str
    fingerprint: str


class LaunchSummary(Frozen):
    """How a launch ended: chunks done, found done by workers, and quarantined by it."""

    done: int
    skipped: int
    quarantined: int


class LaunchNote(Frozen):
    """What a launch has left behind.

    Attributes:
        launch: its name.
        started: when. node: the machine that it was started on.
        stopped: whether its workers were asked to stop. summary: how it ended; None if it did not,
            or was killed.
    """

    launch: str
    started: datetime
    node: str
    stopped: bool
    summary: LaunchSummary | None


def crc32(array: NDArray[np.generic]) -> int:
    """CRC-32 of the bytes, in C order and little-endian, of an array of two axes or more."""
    found = 0
    for index in np.ndindex(array.shape[:-2]):  # a copy of a plane is less than one of a chunk
        plane = np.ascontiguousarray(array[index], array.dtype.newbyteorder("<"))
        found = zlib.crc32(plane.reshape(-1).view(np.uint8).data, found)
    return found
