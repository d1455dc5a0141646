"""Overlaps of labels and segments, counted in parts of a volume and summed: pure functions.

A row of a table of overlaps says how many voxels have one label and one segment, and the box they
are in. Rows of parts of a volume are summed, so the table of the whole volume is the same for every
chunk shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx

ROW = np.dtype(
    [
        ("cell", "<i8"),
        ("label", "<u8"),
        ("segment", "<u8"),
        ("voxels", "<i8"),
        ("start", "<i8", (3,)),
        ("stop", "<i8", (3,)),
    ]
)
"""A label and a segment that overlap: in which cell of a chunk (0 once cells are summed), in how
many voxels, and the box of these voxels, ZYX."""

Rows = NDArray[np.void]

_ROWS_AT_A_TIME = 2**21
"""Rows that wait until they are summed."""


_LARGEST_ID = 2**64 - 1


def cells_along(shape: Zyx, cell_shape: Zyx) -> Zyx:
    """The number of cells on each axis of a box that begins at a cell."""
    return zyx.ceil_div_each(shape, cell_shape)


def check_not_negative(name: str, values: AnyArray, core: BoundingBox) -> None:
    """Refuse negative ids. Raises ValueError."""
    if values.dtype.kind == "i" and values.min() < 0:
        raise ValueError(f"a {name} in {core} is {values.min()}: labels are 0 or more")


def is_among(labels: AnyArray, ids: Sequence[int]) -> NDArray[np.bool_]:
    """Whether each label is one of some ids, exactly: ids of 64 bits are not compared as floats.

    Args:
        labels: integers from 0 on, of any shape.
        ids: 0 or more; those that are no label of 64 bits are none here.
    """
    known = np.array([each for each in ids if each <= _LARGEST_ID], np.uint64)
    among: NDArray[np.bool_] = np.isin(labels.astype(np.uint64), known)
    return among


def count_overlaps(
    labels: AnyArray, segments: AnyArray, core: BoundingBox, cell_shape: Zyx, ignore: Sequence[int]
) -> Rows:
    """Count the voxels of each label and segment in each cell of a chunk.

    Args:
        labels: (z, y, x), integers from 0 on.
        segments: likewise, of the same shape.
        core: the chunk's box.
        cell_shape: the shape of a cell, ZYX; cells are counted from the chunk's first voxel.
        ignore: labels whose voxels are not judged.

    Returns:
        Rows in the order of cells, labels and segments.

    Raises:
        ValueError: a label or segment is negative.
    """
    check_not_negative("label", labels, core)
    check_not_negative("segment", segments, core)
    label = labels.astype(np.uint64).ravel()
    segment = segments.astype(np.uint64).ravel()
    depth, height, width = labels.shape
    # Runs of equal voxels along x are far fewer than voxels; a run ends with its cell.
    is_first = np.ones(label.shape, bool)
    is_first[1:] = (label[1:] != label[:-1]) | (segment[1:] != segment[:-1])
    rows = is_first.reshape(-1, width)
    rows[:, :: cell_shape[2]] = True
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=label.size)
    if ignore:
        judged = ~is_among(label[starts], ignore)
        starts = starts[judged]
        lengths = lengths[judged]
    places = np.stack(np.unravel_index(starts, (depth, height, width)), axis=1).astype(np.int64)
    runs = np.empty(len(starts), ROW)
    cells = (places // cell_shape).T
    runs["cell"] = np.ravel_multi_index(tuple(cells), cells_along(core.shape, cell_shape))
    runs["label"] = label[starts]
    runs["segment"] = segment[starts]
    runs["voxels"] = lengths
    runs["start"] = places + core.start
    runs["stop"] = runs["start"] + 1
    runs["stop"][:, 2] += lengths - 1
    return _sum_equal(runs)


def sum_cells(rows: Rows) -> Rows:
    """Sum the rows of a chunk's cells."""
    whole = rows.copy()
    whole["cell"] = 0
    return _sum_equal(whole)


def sum_tables(tables: Iterable[Rows]) -> Rows:
    """Sum tables, of which few are held at a time."""
    total = np.empty(0, ROW)
    waiting: list[Rows] = []
    for table in tables:
        waiting.append(table)
        if sum(map(len, waiting)) >= max(_ROWS_AT_A_TIME, len(total)):
            total = _sum_equal(np.concatenate([total, *waiting]))
            waiting = []
    return _sum_equal(np.concatenate([total, *waiting]))


def _sum_equal(rows: Rows) -> Rows:
    """Sum rows of equal cell, label and segment; the result is in their order."""
    rows = rows[np.lexsort((rows["segment"], rows["label"], rows["cell"]))]
    if not len(rows):
        return rows
    is_first = np.ones(len(rows), bool)
    is_first[1:] = False
    for name in ("cell", "label", "segment"):
        is_first[1:] |= rows[name][1:] != rows[name][:-1]
    first = np.flatnonzero(is_first)
    result = rows[first]
    result["voxels"] = np.add.reduceat(rows["voxels"], first)
    result["start"] = np.minimum.reduceat(rows["start"], first, axis=0)
    result["stop"] = np.maximum.reduceat(rows["stop"], first, axis=0)
    return result


def best_pairs(table: Rows) -> NDArray[np.bool_]:
    """Which rows are of a label and a segment that overlap most with each other, in both ways.

    Of equal overlaps that of the lesser id counts as the greater one.

    Args:
        table: the table of a whole volume.
    """
    return _is_most(table, "label", "segment") & _is_most(table, "segment", "label")


def _is_most(table: Rows, of: str, other: str) -> NDArray[np.bool_]:
    order = np.lexsort((table[other], -table["voxels"], table[of]))
    ids = table[of][order]
    is_first = np.ones(len(table), bool)
    is_first[1:] = ids[1:] != ids[:-1]
    most = np.zeros(len(table), bool)
    most[order[is_first]] = True
    return most


def wrong_voxels(rows: Rows, right: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count, in each cell of a chunk, the voxels that are judged and those that are wrong.

    Args:
        rows: of the chunk's cells, in the order of cells.
        right: rows of the labels and segments that belong together.

    Returns:
        For each cell up to the last that has rows: voxels that are judged, voxels that are wrong.
    """
    keys = np.dtype([("label", "<u8"), ("segment", "<u8")])
    own = np.empty(len(rows), keys)
    wanted = np.empty(len(right), keys)
    for name in ("label", "segment"):
        own[name] = rows[name]
        wanted[name] = right[name]
    is_wrong = ~np.isin(own, wanted)
    count = int(rows["cell"].max(initial=-1)) + 1
    judged = np.zeros(count, np.int64)
    wrong = np.zeros(count, np.int64)
    np.add.at(judged, rows["cell"], rows["voxels"])
    np.add.at(wrong, rows["cell"][is_wrong], rows["voxels"][is_wrong])
    return judged, wrong
