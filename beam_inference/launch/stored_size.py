"""What a job's output takes in its store, from the chunks of it that are done.

How much blocks shrink depends on the values, which only the network knows. So the sizes come from
real output: voxels of finished chunks, such as those of ``run --sample``, are read back, and
written into memory as the output stores them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from beam_inference.config.formats import OutputSpec
from beam_inference.config.volumes import VolumeSource
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.records import Part, Receipt
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.cost import Totals
from beam_inference.launch.planned_job import PlannedJob, PlannedOutput
from beam_inference.pyramid.pyramid import Pyramid
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import (
    open_kvstore,
)
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.outputs import create_output

MOST_BLOCKS = 16
"""Blocks, or shards, of a volume that are looked at."""

MOST_BYTES = 2**28
"""Decoded bytes of a volume after which no further block is looked at."""


@dataclass(frozen=True, slots=True)
class StoredSample:
    """Some blocks, or shards, of a volume that a job has written.

    Attributes:
        blocks: their number.
        decoded_bytes: of their voxels.
        stored_bytes: what they take in the store.
    """

    blocks: int
    decoded_bytes: int
    stored_bytes: int

    @property
    def ratio(self) -> float:
        """Stored bytes of a decoded one."""
        return self.stored_bytes / self.decoded_bytes


@dataclass(frozen=True, slots=True)
class StoredSize:
    """The size of a whole job in its store, once it is complete.

    Attributes:
        stored_bytes: of all outputs, previews and coarser scales; not of receipts.
        objects: that stay: blocks or shards, and records of chunks. Blocks that are absent because
            they are outside of a mask count, too.
        samples: what it rests on, by the keys of volumes in the job file. Coarser scales are
            counted as if they shrank as their finest one does.
    """

    stored_bytes: float
    objects: int
    samples: Mapping[str, StoredSample]


def stored_size(
    job: PlannedJob, whole: Totals, pyramids: Mapping[str, Pyramid]
) -> StoredSize | None:
    """Estimate what a job will store, from the chunks of it that are done.

    Args:
        job: the job.
        whole: its totals, pyramids included.
        pyramids: those of its outputs, by the outputs' keys.

    Returns:
        The size; None where a volume has no whole block among the chunks that are done.

    Raises:
        UserError: the records of the chunks, or the output, cannot be read.
    """
    receipts = _some_receipts(job)
    samples = {}
    for key, volume in job.volumes.items():
        sample = _sample_volume(volume, [each.parts_by_output.get(key, []) for each in receipts])
        if sample is None:
            return None
        samples[key] = sample
    stored = sum(_decoded_bytes(job, key) * sample.ratio for key, sample in samples.items())
    stored += sum(pyramid.size * samples[key].ratio for key, pyramid in pyramids.items())
    return StoredSize(stored, whole.write_requests - whole.seam_files, samples)


def _decoded_bytes(job: PlannedJob, key: str) -> int:
    spec = job.volumes[key].spec
    box = job.plan.chunks.roi if key in job.outputs else spec.bounds
    return box.size * _voxel_bytes(spec)


def _voxel_bytes(spec: OutputSpec) -> int:
    return spec.channels * np.dtype(spec.dtype).itemsize


def _some_receipts(job: PlannedJob) -> list[Receipt]:
    """Receipts of finished chunks from all over the job; none before the first launch."""
    if not job.output_exists:
        return []
    state = State(default_state_url(job.config), job.config.storage)
    launched = state.load_job()
    if launched is None:
        return []
    state = state.of(launched)
    count = launched.plan.chunks.count
    drawn = np.random.default_rng(0)
    found: list[int] = []
    for part in range(MOST_BLOCKS):
        start, stop = (count * edge // MOST_BLOCKS for edge in (part, part + 1))
        if start == stop:
            continue
        # from anywhere in the part: the first chunks of rows are at the border of the volume
        middle = int(drawn.integers(start, stop))
        after = state.receipt_indices(middle, stop)
        first = next(after, None)
        if first is None:
            first = next(state.receipt_indices(start, middle), None)
        if first is not None:
            found.append(first)
    return state.read_receipts(found)


def _sample_volume(volume: PlannedOutput, parts: Sequence[Sequence[Part]]) -> StoredSample | None:
    """Store whole blocks of some chunks, given as the parts of each, in memory."""
    if not volume.exists:
        return None
    spec = volume.spec
    boxes = list(_whole_blocks(spec, parts))
    if not boxes:
        return None
    output = open_source(VolumeSource(spec.url, storage=spec.storage), check_blocks=False)
    url = f"memory://{uuid.uuid4().hex}/"
    copy = create_output(replace(spec, url=url))
    store = open_kvstore(url, spec.storage)
    metadata = set(list_keys(store, spec.storage))
    try:
        for box in boxes:
            copy.write(box, output.read(box))
        stored = sum(
            len(store[key]) for key in list_keys(store, spec.storage) if key not in metadata
        )
    finally:
        delete_folder(url, spec.storage)
    decoded = sum(box.size for box in boxes) * _voxel_bytes(spec)
    return StoredSample(len(boxes), decoded, stored)


def _whole_blocks(spec: OutputSpec, parts: Sequence[Sequence[Part]]) -> Iterator[BoundingBox]:
    """The block, or shard, in the middle of each chunk, as far as the chunk has all of it."""
    decoded = 0
    for some in parts:
        if not some or decoded >= MOST_BYTES:
            continue
        largest = max((part.box for part in some), key=lambda box: box.size)
        box = _middle_block(spec, largest)
        if largest.contains(box):
            decoded += box.size * _voxel_bytes(spec)
            yield box


def _middle_block(spec: OutputSpec, box: BoundingBox) -> BoundingBox:
    """The block, or shard, around the middle voxel of a box."""
    middle = zyx.triple(
        (start + stop) // 2 - origin
        for start, stop, origin in zip(box.start, box.stop, spec.bounds.start, strict=True)
    )
    index = zyx.triple(at // side for at, side in zip(middle, spec.write_shape, strict=True))
    start = zyx.add(spec.bounds.start, zyx.multiply(index, spec.write_shape))
    return BoundingBox(start, zyx.add(start, spec.write_shape)).intersection(spec.bounds)
