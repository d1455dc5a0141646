"""Scores of a table of overlaps: information, pairs of voxels, and Dice; and the worst objects.

Sums are rounded once (``math.fsum``), so they do not depend on any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.evaluation.overlaps import Rows
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import triple


@dataclass(frozen=True, slots=True)
class ObjectScores:
    """Agreement of a segmentation with labels.

    Attributes:
        voxels: that are judged.
        labels: number of labels; segments: of segments. 0 counts as one, as any other.
        information_split: conditional entropy of the segments, given the labels, in bits: what
            labels were split.
        information_merge: that of the labels, given the segments: what was merged.
        rand_split: of two voxels that share a label, the probability that they share a segment.
        rand_merge: of two voxels that share a segment, the probability that they share a label.
    """

    voxels: int
    labels: int
    segments: int
    information_split: float
    information_merge: float
    rand_split: float
    rand_merge: float

    @property
    def variation_of_information(self) -> float:
        """The sum of both parts, in bits; 0 is best."""
        return self.information_split + self.information_merge

    @property
    def adapted_rand_error(self) -> float:
        """One minus the harmonic mean of both probabilities; 0 is best."""
        both = self.rand_split + self.rand_merge
        return 1.0 - (2.0 * self.rand_split * self.rand_merge / both if both else 0.0)


@dataclass(frozen=True, slots=True)
class WorstObject:
    """A label that was split, or a segment that merges labels.

    Attributes:
        id: of the label or the segment.
        bits: its part of the information that was split or merged.
        voxels: that are judged.
        parts: segments that a label is in, or labels that a segment is in.
        largest: voxels of the largest part.
        box: its voxels, ZYX.
    """

    id: int
    bits: float
    voxels: int
    parts: int
    largest: int
    box: BoundingBox


@dataclass(frozen=True, slots=True)
class ClassDice:
    """Dice coefficient of one class; None where neither volume has it."""

    id: int
    dice: float | None
    label_voxels: int
    output_voxels: int


def score_objects(table: Rows) -> ObjectScores:
    """Score the table of a whole volume, which must have a row.

    The values are those of ``variation_of_information`` and ``adapted_rand_error`` in scikit-image
    with the same labels ignored. A pair of voxels is never a voxel with itself. Where no two
    voxels share a label or a segment, the probability is 1.
    """
    voxels = table["voxels"]
    labels = _sum_by(table["label"], voxels)
    segments = _sum_by(table["segment"], voxels)
    total = int(voxels.sum())
    joint = _entropy(voxels, total)
    both = _pairs(voxels)
    return ObjectScores(
        voxels=total,
        labels=len(labels),
        segments=len(segments),
        information_split=max(0.0, joint - _entropy(labels, total)),
        information_merge=max(0.0, joint - _entropy(segments, total)),
        rand_split=_share(both, _pairs(labels)),
        rand_merge=_share(both, _pairs(segments)),
    )


def score_classes(table: Rows) -> tuple[list[ClassDice], float | None]:
    """Compute the Dice coefficient of each class, and that of all classes but 0 together.

    Args:
        table: of a whole volume; label and segment are numbers of classes.

    Returns:
        Classes by their numbers; the global coefficient, None where there is no class but 0.
    """
    ids = np.union1d(table["label"], table["segment"])
    is_same = table["label"] == table["segment"]
    counts = {
        name: _sum_at(ids, table[column][chosen], table["voxels"][chosen])
        for name, column, chosen in (
            ("both", "label", is_same),
            ("label", "label", slice(None)),
            ("output", "segment", slice(None)),
        )
    }
    classes = [
        ClassDice(int(number), _dice(both, label + output), int(label), int(output))
        for number, both, label, output in zip(
            ids, counts["both"], counts["label"], counts["output"], strict=True
        )
    ]
    wanted = ids > 0
    both, label, output = (int(counts[name][wanted].sum()) for name in ("both", "label", "output"))
    return classes, _dice(both, label + output)


def worst_objects(table: Rows, of: str, most: int) -> list[WorstObject]:
    """List the labels that were split most, or the segments that merge most.

    Args:
        table: of a whole volume.
        of: "label" or "segment".
        most: how many objects to list; those that are one part are not listed.
    """
    order = np.argsort(table[of], kind="stable")
    rows = table[order]
    if not len(rows):
        return []
    first = np.flatnonzero(np.append(True, rows[of][1:] != rows[of][:-1]))
    voxels = np.add.reduceat(rows["voxels"], first)
    parts = np.diff(first, append=len(rows))
    whole = np.repeat(voxels, parts)
    share = rows["voxels"] / whole
    losses = np.add.reduceat(-rows["voxels"] * np.log2(share), first) / int(voxels.sum())
    ranked = np.lexsort((rows[of][first], -losses))
    chosen = [place for place in ranked[:most] if parts[place] > 1]
    found = []
    for place in chosen:
        own = rows[first[place] : first[place] + parts[place]]
        box = BoundingBox(
            triple(int(n) for n in own["start"].min(axis=0)),
            triple(int(n) for n in own["stop"].max(axis=0)),
        )
        found.append(
            WorstObject(
                id=int(own[of][0]),
                bits=float(losses[place]),
                voxels=int(voxels[place]),
                parts=int(parts[place]),
                largest=int(own["voxels"].max()),
                box=box,
            )
        )
    return found


def _dice(both: int, sum_of_sizes: int) -> float | None:
    return 2.0 * int(both) / int(sum_of_sizes) if sum_of_sizes else None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _sum_by(ids: NDArray[np.uint64], voxels: NDArray[np.int64]) -> NDArray[np.int64]:
    once = np.unique(ids)
    return _sum_at(once, ids, voxels)


def _sum_at(
    once: NDArray[np.uint64], ids: NDArray[np.uint64], voxels: NDArray[np.int64]
) -> NDArray[np.int64]:
    sums = np.zeros(len(once), np.int64)
    np.add.at(sums, np.searchsorted(once, ids), voxels)
    return sums


def _entropy(voxels: NDArray[np.int64], total: int) -> float:
    shares = voxels / total
    return -math.fsum(shares * np.log2(shares))


def _pairs(voxels: NDArray[np.int64]) -> float:
    """The number of ordered pairs of two voxels in one part."""
    counts = voxels.astype(np.float64)
    return math.fsum(counts * (counts - 1))
