"""Records of the state folder: receipts, quarantine records, notes of launches."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, AwareDatetime, Field

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Frozen, SafeLine, SafeText
from beam_inference.config.job import OUTPUT
from beam_inference.errors import Stage
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.shards import MOST_SHARDS

Entry = TypeVar("Entry", bound="Frozen")

Count = Annotated[int, Field(ge=0, lt=2**63)]
Value = Annotated[float, Field(ge=-4e38, le=4e38)]
"""A value of an output, of which the largest are those of float32."""

Seconds = Annotated[float, Field(ge=-1e11, le=1e11)]
"""A time; one below zero where the clock was set back meanwhile."""


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError("a moment before the year 1 or after 9999") from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time in UTC, whatever its clock said: other clocks are right, or wrong by centuries."""


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A record that cannot be believed.

    Attributes:
        chunk: the chunk under whose name it lies.
        message: its URL, what is wrong with it, and what becomes of its chunk.
        generation: of its file, as the store tells it.
    """

    chunk: int
    message: str
    generation: bytes


class ChannelStatistics(Frozen):
    """Statistics of one channel of a chunk, as written."""

    min: Value
    max: Value
    mean: Value
    zeros: Count
    nans: Count

    @classmethod
    def of(cls, channel: AnyArray) -> ChannelStatistics:
        """Compute the statistics of one channel, (Z, Y, X)."""
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
        box: the voxels.
        crc32: checksum of their bytes in C order (channel, z, y, x), little-endian.
        channels: statistics of each channel.
    """

    box: BoundingBox
    crc32: Annotated[int, Field(ge=0, lt=2**32)]
    channels: list[ChannelStatistics]

    @classmethod
    def of(cls, box: BoundingBox, array: AnyArray) -> Part:
        """Describe an array (channels, Z, Y, X) that was written into a box."""
        channels = [ChannelStatistics.of(channel) for channel in array]
        return cls(box=box, crc32=crc32(array), channels=channels)


class Receipt(Frozen):
    """Proof that a chunk is durably written; or, among the ``sums``, that its patches are computed.

    Attributes:
        chunk: index of the chunk.
        parts: the boxes that were written, together the core box. With ``strategy: exchange``
            the blocks that the chunk shares with its neighbours are written apart from the rest; a
            receipt among the ``sums`` has the rest alone.
        further_parts: the same of the job's further outputs, by their keys in the job file.
        batch_size: patches per network call; below the job's if the device ran out of memory.
        uniform_patches: number of patches whose input was one value throughout, and whose answer
            was known.
        patches_beyond_bound: number of patches whose predictions were larger than the job's
            prediction bound allows: their sums may depend on the order of their terms.
        seconds: time spent, by stage.
        attempts: attempts made, by stage.
        finished_at: time when everything was durable.
        worker: process that did the chunk, ``host:pid``.
        launch: launch that did it.
        fingerprint: fingerprint of the job.
    """

    chunk: int
    parts: list[Part]
    further_parts: dict[SafeText, list[Part]] = Field(default_factory=dict)
    batch_size: Count
    uniform_patches: Count
    patches_beyond_bound: Count = 0
    seconds: dict[Stage, Seconds]
    attempts: dict[Stage, Count]
    finished_at: Moment
    worker: SafeText
    launch: SafeText
    fingerprint: str

    @property
    def parts_by_output(self) -> dict[str, list[Part]]:
        """The boxes that were written, by the key of the output in the job file."""
        return {OUTPUT: self.parts, **self.further_parts}


@dataclass(frozen=True, slots=True)
class ReceiptTally:
    """What receipts say together.

    Attributes:
        chunks: number of chunks with a receipt that can be believed.
        patches_beyond_bound: see :class:`Receipt`; a patch counts in each chunk that computed it.
    """

    chunks: int
    patches_beyond_bound: int


class QuarantineRecord(Frozen):
    """Why a chunk could not be done.

    Attributes:
        chunk: index of the chunk.
        box: its core box.
        input_box: the voxels that it reads.
        stage: the stage that failed; "seams" if a chunk that it shares voxels with could not be
            done.
        cause: text of the error.
        attempts: number of attempts.
        launch: launch that gave it up.
        fingerprint: fingerprint of the job.
    """

    chunk: int
    box: BoundingBox
    input_box: BoundingBox
    stage: Stage
    cause: SafeLine
    attempts: int
    launch: SafeText
    fingerprint: str


class LaunchSummary(Frozen):
    """Summary of how a launch ended.

    Attributes:
        done: chunks that it did.
        skipped: chunks that its workers found done.
        quarantined: chunks that it put into quarantine.
        summed: chunks whose patches it computed, where other launches put them together.
    """

    done: Count
    skipped: Count
    quarantined: Count
    summed: Count = 0


class ShardCount(Frozen):
    """Number of shards that a job is divided into.

    Attributes:
        shards: the number.
    """

    shards: int = Field(ge=1, le=MOST_SHARDS)


class LaunchNote(Frozen):
    """Note of one launch.

    Attributes:
        launch: its identifier.
        started: time when it began.
        node: machine that it was started on.
        stopped: whether its workers were asked to stop.
        summary: how it ended; None if it did not, or was killed.
    """

    launch: SafeText
    started: Moment
    node: SafeText
    stopped: bool
    summary: LaunchSummary | None


def crc32(array: NDArray[np.generic]) -> int:
    """CRC-32 of an array's bytes, in C order and little-endian; it has two axes or more."""
    checksum = 0
    # Plane by plane, because a copy of a plane takes less memory than one of a chunk.
    for index in np.ndindex(array.shape[:-2]):
        plane = np.ascontiguousarray(array[index], array.dtype.newbyteorder("<"))
        checksum = zlib.crc32(plane.reshape(-1).view(np.uint8).data, checksum)
    return checksum
