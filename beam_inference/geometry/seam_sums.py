"""Sums of contributions, cut where chunks share voxels, and put together again in the contributors' order: pure.

A chunk's ``sums`` are its own patches, weighted and added, over
``plan.owned_work(index).core_box``: float32, shape (channels, Z, Y, X). Float addition is not
associative, so the order is the job's, whatever was finished first; then a voxel's bits depend
neither on the runner nor on retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import ChunkWork, InferencePlan
from beam_inference.limits import WRITTEN_BYTES

Sums = NDArray[np.float32]


def seam_boxes(plan: InferencePlan, contributor: int, receiver: int) -> list[BoundingBox]:
    """Where a receiver wants a contributor's sums: disjoint boxes, one in each of the shared ones that it reaches."""
    owned = plan.owned_work(contributor)
    if owned is None:
        return []
    touched = [box.intersection(owned.core_box) for box in plan.shared_boxes(receiver)]
    return [box for box in touched if box.size]


def most_files(plan: InferencePlan, channels: int) -> int:
    """Files of sums that chunks write for each other and themselves, at most; ``channels`` of the network."""
    return plan.seam_pairs + plan.seam_voxels * channels * 4 // WRITTEN_BYTES


def cut(plan: InferencePlan, index: int, sums: Sums) -> Iterator[tuple[int, list[Sums]]]:
    """What a chunk's sums say to each receiver, itself among them, box by box of :func:`seam_boxes`: views."""
    owned = plan.owned_work(index)
    assert owned is not None
    for receiver in plan.receivers(index):
        boxes = seam_boxes(plan, index, receiver)
        if boxes:
            yield receiver, [sums[(slice(None), *box.slices_in(owned.core_box))] for box in boxes]


def merged(
    plan: InferencePlan, index: int, parts: Iterable[tuple[int, Sequence[Sums]]], channels: int
) -> list[tuple[BoundingBox, Sums]]:
    """The shared boxes of a chunk, finished. ``parts`` are those of its contributors, in their order."""
    shared = [
        (box, arrays.zeros((channels, *box.shape), np.float32)) for box in plan.shared_boxes(index)
    ]
    for contributor, pieces in parts:
        for piece, array in zip(seam_boxes(plan, contributor, index), pieces, strict=True):
            for box, total in shared:
                if box.contains(piece):
                    total[(slice(None), *piece.slices_in(box))] += array
    return shared


def added(
    core: BoundingBox, works: Sequence[ChunkWork], sums: Iterable[Sums], channels: int
) -> Sums:
    """A whole core, from the sums of each of ``plan.contributions``: the bits that :func:`merged` would give it."""
    total = arrays.zeros((channels, *core.shape), np.float32)
    for work, array in zip(works, sums, strict=True):
        total[(slice(None), *work.core_box.slices_in(core))] += array
    return total
