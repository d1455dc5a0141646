"""What a receipt must say so that it is believed: its own chunk, its own job, the boxes due."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from beam_inference.config.job import OUTPUT
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.records import Part, Receipt
from beam_inference.job.resolved_job import ResolvedJob

_MOST_PARTS = 1000
"""Boxes that a chunk is written in at most; each is held against each."""


def receipt_fault(receipt: Receipt, chunk: int, job: ResolvedJob) -> str | None:
    """Describe what is wrong with what a receipt says; its blocks are not read.

    Args:
        receipt: the receipt.
        chunk: the chunk under whose name it lies.
        job: the job.

    Returns:
        The end of a sentence about the chunk, or None if nothing is wrong.
    """
    fault = _identity_fault(receipt, chunk, job)
    if fault is not None:
        return fault
    box = job.plan.chunks.core_box(chunk)
    for key, written in receipt.parts_by_output.items():
        due = box.coarsen(job.config.preview_scale(key))
        fault = _parts_fault([part.box for part in written], due)
        if fault is None:
            fault = _channels_fault(key, written, job)
        if fault is not None:
            return f"its receipt names {fault}{_of_output(key)}"
    return None


def _channels_fault(key: str, written: Sequence[Part], job: ResolvedJob) -> str | None:
    """How many channels parts describe, in words, if it is not as many as the output has."""
    output = job.config.by_output.get(key)
    if output is None:  # a preview, which makes one of several
        return None
    counts = {len(part.channels) for part in written} - {output.output_channels}
    return f"{counts.pop()} channels of {output.output_channels}" if counts else None


def _parts_fault(parts: list[BoundingBox], box: BoundingBox) -> str | None:
    """What parts are, in words, if they do not make up a box, each voxel once."""
    if len(parts) > _MOST_PARTS:
        return f"{len(parts)} boxes"
    inside = all(box.contains(part) for part in parts)
    disjoint = all(not a.intersection(b).size for a, b in combinations(parts, 2))
    if not inside or not disjoint or sum(part.size for part in parts) != box.size:
        return ", ".join(map(str, parts)) or "nothing"
    return None


def _of_output(key: str) -> str:
    return "" if key == OUTPUT else f" of {key}"


def first_receipt_fault(receipt: Receipt, chunk: int, job: ResolvedJob) -> str | None:
    """Describe what is wrong with a first-stage receipt; see :func:`receipt_fault`.

    It names the voxels that no other chunk adds to, or nothing where they are not computed.
    """
    fault = _identity_fault(receipt, chunk, job)
    if fault is not None:
        return fault
    exchange = job.exchange
    if exchange is None:
        return "its first-stage receipt belongs to no job with seams: crop"
    private = exchange.private_box(chunk)
    named = {key: [part.box for part in parts] for key, parts in receipt.parts_by_output.items()}
    is_any = any(named.values())
    for key, boxes in named.items():
        due = None if private is None else private.coarsen(job.config.preview_scale(key))
        if is_any and boxes != [due]:
            text = ", ".join(map(str, boxes)) or "nothing"
            return f"its first-stage receipt names {text}{_of_output(key)}"
    return None


def _identity_fault(receipt: Receipt, chunk: int, job: ResolvedJob) -> str | None:
    if receipt.chunk != chunk:
        return f"its receipt is that of chunk {receipt.chunk}"
    if receipt.fingerprint != job.fingerprint:
        return f"its receipt belongs to another job, with fingerprint {receipt.fingerprint[:12]}"
    if {OUTPUT, *receipt.further_parts} != set(job.config.written_keys):
        return f"its receipt names the outputs {', '.join(receipt.parts_by_output)}"
    return None
