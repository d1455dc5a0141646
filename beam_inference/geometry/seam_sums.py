"""Splits a chunk's sums into parts for its neighbours, and adds such parts up.

A chunk's ``sums`` are its own patches, weighted and added, over ``owned_work(index).core_box`` of
the exchange plan: float32, shape (channels, Z, Y, X). They are multiples of one step, which are
added exactly (:mod:`beam_inference.geometry.exact_sums`), so any order gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan_totals import PlanTotals
from beam_inference.geometry.seam_exchange import SeamExchangePlan
from beam_inference.limits import WRITTEN_BYTES

Sums = NDArray[np.float32]


def seam_boxes(exchange: SeamExchangePlan, contributor: int, receiver: int) -> list[BoundingBox]:
    """The boxes in which a contributor's sums are added to a receiver's.

    Returns:
        Disjoint boxes, one in each shared box of the receiver that the contributor's patches reach.
    """
    owned = exchange.owned_work(contributor)
    if owned is None:
        return []
    touched = [box.intersection(owned.core_box) for box in exchange.shared_boxes(receiver)]
    return [box for box in touched if box.size]


def seam_bytes(totals: PlanTotals, channels: int) -> int:
    """Bytes of all seam files, for a network with so many output channels."""
    return totals.seam_voxels * channels * np.dtype(np.float32).itemsize


def most_seam_files(totals: PlanTotals, channels: int) -> int:
    """Upper bound of the number of seam files, for a network with so many output channels."""
    return totals.seam_pairs + seam_bytes(totals, channels) // WRITTEN_BYTES


def split_sums(
    exchange: SeamExchangePlan, index: int, sums: Sums
) -> Iterator[tuple[int, list[Sums]]]:
    """Split a chunk's sums into the parts for each receiver, which may be the chunk itself.

    Yields:
        The receiver's index, and a view of the sums for each box of :func:`seam_boxes`.
    """
    owned = exchange.owned_work(index)
    assert owned is not None
    for receiver in exchange.receivers(index):
        boxes = seam_boxes(exchange, index, receiver)
        if boxes:
            yield receiver, [sums[(slice(None), *box.slices_in(owned.core_box))] for box in boxes]


def merge_sums(
    exchange: SeamExchangePlan,
    index: int,
    parts: Iterable[tuple[int, Sequence[Sums]]],
    channels: int,
) -> list[tuple[BoundingBox, Sums]]:
    """Add up the shared boxes of a chunk.

    Args:
        exchange: the geometry of the job's exchange.
        index: the chunk.
        parts: each contributor's index and what it gave in :func:`split_sums`, in any order.
        channels: of the network's output.

    Returns:
        Each shared box with its sums, shape (channels, Z, Y, X).
    """
    shared = [
        (box, arrays.zeros((channels, *box.shape), np.float32))
        for box in exchange.shared_boxes(index)
    ]
    for contributor, pieces in parts:
        boxes = seam_boxes(exchange, contributor, index)
        for piece, array in zip(boxes, pieces, strict=True):
            for box, total in shared:
                if box.contains(piece):
                    total[(slice(None), *piece.slices_in(box))] += array
    return shared
