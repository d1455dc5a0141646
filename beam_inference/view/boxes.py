"""Boxes of a job's grids as annotations: a limited number around the middle of the ROI."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.zyx import Zyx, triple
from beam_inference.view.viewer_state import Boxes


def chunk_boxes(plan: InferencePlan, most: int) -> Boxes:
    """Boxes that chunks write."""
    chunks = plan.chunks
    middle = _middle(plan)
    center = [
        (m - a) // n for m, a, n in zip(middle, chunks.roi.start, chunks.chunk_shape, strict=True)
    ]
    indices = map(chunks.index, around(chunks.shape, triple(center), most))
    return _boxes(
        "chunks",
        "#ffd24d",
        chunks.count,
        [(f"chunk {index}", chunks.core_box(index)) for index in indices],
    )


def patch_boxes(plan: InferencePlan, most: int) -> Boxes:
    """Boxes that patches predict."""
    lattice = plan.lattice
    middle = _middle(plan)
    touching = lattice.touching(BoundingBox(middle, triple([m + 1 for m in middle])))
    shape = triple([axis.count for axis in lattice.axes])
    near = around(shape, triple([each[0] for each in touching]), most)
    boxes = [(f"patch {z}, {y}, {x} (z, y, x)", lattice.patch_box((z, y, x))) for z, y, x in near]
    return _boxes("patches", "#66ccff", lattice.count, boxes)


def around(shape: Zyx, center: Zyx, most: int) -> list[Zyx]:
    """Positions of a window of a grid around one of them, a limited number; the grid is not listed.

    ``center`` is a position of the grid.
    """
    width = 1
    while width < max(shape) and math.prod(min(n, width + 1) for n in shape) <= most:
        width += 1
    starts = [
        min(max(0, c - width // 2), max(0, n - width)) for c, n in zip(center, shape, strict=True)
    ]
    ranges = [range(start, min(n, start + width)) for start, n in zip(starts, shape, strict=True)]
    return [(z, y, x) for z, y, x in product(*ranges)]


def _boxes(name: str, color: str, count: int, boxes: Sequence[tuple[str, BoundingBox]]) -> Boxes:
    some = "" if len(boxes) == count else f" ({len(boxes):,} of {count:,})"
    return Boxes(name + some, color, boxes)


def _middle(plan: InferencePlan) -> Zyx:
    return triple(
        [(a + b) // 2 for a, b in zip(plan.chunks.roi.start, plan.chunks.roi.stop, strict=True)]
    )
