"""A job whose ROI a later launch has enlarged: what is done of it stays done.

Chunks are numbered from the ROI, so the receipts of before are written once more, under the numbers
of now. A chunk that ended with the former ROI, and is larger by now, is done again.
"""

from __future__ import annotations

from collections.abc import Collection

from beam_inference.errors import StateError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.job.chunk_records import folders
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State


def check_may_be_enlarged(earlier: ResolvedJob, roi: BoundingBox) -> None:
    """Refuse a larger ROI than that of before where the lattice would lie otherwise.

    Args:
        earlier: the job as it was launched before.
        roi: the ROI as it is now.

    Raises:
        StateError: it is larger, and the first launch had no domain.
    """
    if roi != earlier.roi and roi.contains(earlier.roi) and not earlier.may_be_enlarged:
        raise StateError(
            f"the job has begun with roi {earlier.roi}, and {roi} is larger. That can be only if "
            "the first launch had roi.domain, the box that the patch lattice tiles: without it, "
            "the lattice lies by the ROI, and so do the bits. Use another output.path, or pass "
            "--overwrite to compute every chunk again."
        )


def check_enlargement(earlier: ResolvedJob, job: ResolvedJob, url: str) -> None:
    """Refuse another ROI than that of before, unless it holds that one, on the same grid of chunks.

    Args:
        earlier: the job as it was launched before; it has the same fingerprint.
        job: the job as it is now.
        url: URL of its state folder.

    Raises:
        StateError: the ROI is smaller somewhere, or its chunks lie otherwise.
    """
    before = earlier.plan.chunks
    now = job.plan.chunks
    if not now.roi.contains(before.roi):
        raise StateError(
            f"{url}: the job has begun with roi {before.roi}, and {now.roi} does not hold all of "
            "it: a ROI may be enlarged only. Write one that holds both, or use another output.path"
        )
    shifts = [
        (first - start) % length
        for first, start, length in zip(
            before.roi.start, now.roi.start, before.chunk_shape, strict=True
        )
    ]
    if any(shifts):
        nearest = [
            start - (length - shift) % length
            for start, shift, length in zip(now.roi.start, shifts, before.chunk_shape, strict=True)
        ]
        raise StateError(
            f"{url}: chunks of {list(before.chunk_shape)} voxels lie from {list(before.roi.start)} "
            f"on, and roi.start {list(now.roi.start)} is not on their grid (z, y, x), so that "
            f"nothing that is done could be kept. The next one before is {nearest}"
        )


def enlarge_job(
    state: State, earlier: ResolvedJob, job: ResolvedJob, without: Collection[int]
) -> None:
    """Record a job with a larger ROI, and the receipts of before under the numbers of now.

    Killed at any time, it can be called again.

    Args:
        state: the state folder.
        earlier: the job as it was launched before.
        job: the same with a larger ROI, see :func:`check_enlargement`.
        without: chunks of before that are to be done again.

    Raises:
        WorkerFault: the state folder cannot be read or written.
    """
    before = earlier.plan.chunks
    now = job.plan.chunks
    target = state.of(job)
    source = state.of(earlier)
    for start, stop in folders(before.count):
        for receipt in source.read_receipts(source.receipt_indices(start, stop)):
            box = before.core_box(receipt.chunk)
            index = _chunk_of(now, box)
            if receipt.chunk not in without and now.core_box(index) == box:
                target.write_receipt(receipt.model_copy(update={"chunk": index}))
    state.replace_job(job)


def _chunk_of(chunks: ChunkGrid, box: BoundingBox) -> int:
    """The chunk that begins where a box does."""
    z, y, x = (
        (first - start) // length
        for first, start, length in zip(
            box.start, chunks.roi.start, chunks.chunk_shape, strict=True
        )
    )
    return chunks.index((z, y, x))
