r"""The stages of an evaluation, each begun once the one before it is complete.

=======  ============  =============================================================================
stage    is done for   and does
=======  ============  =============================================================================
count    each chunk    counts overlaps, in all and in each cell; or the values of a map
sum      all at once   sums what chunks have counted
rank     each chunk    finds the chunk's cells with the most voxels that are wrong
gather   all at once   finds the volume's
=======  ============  =============================================================================

``sum`` holds the table of the whole volume, 80 bytes for each pair of a label and a segment that
overlap, twice while it grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.evaluation.map_scores import count_at, count_values
from beam_inference.evaluation.overlaps import (
    best_pairs,
    cells_along,
    check_not_negative,
    count_overlaps,
    is_among,
    sum_cells,
    sum_tables,
    wrong_voxels,
)
from beam_inference.evaluation.plans import EvaluationPlan
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.stage_witnesses import Testimony
from beam_inference.segmentation.numbering import (
    DoChunk,
    Stage,
    stage_for_each,
    witnessed_stage_for_each,
)
from beam_inference.volumes.packed_arrays import Arrays

PLACE = np.dtype(
    [("start", "<i8", (3,)), ("stop", "<i8", (3,)), ("judged", "<i8"), ("wrong", "<i8")]
)
"""A cell: its box, ZYX; voxels of it that are judged, and those that are wrong."""


def evaluation_stages(*plans: EvaluationPlan) -> tuple[Stage, ...]:
    """All stages, in their order.

    Args:
        plans: at least one. Several differ in their output and in their scratch folder.
    """
    plan = plans[0]
    is_map = plan.kind == "map"
    return (
        witnessed_stage_for_each("count", plan.grid.count, plans, count_chunks, hear_counted),
        stage_for_each("sum", 1, plans, sum_maps if is_map else sum_labels),
        stage_for_each("rank", plan.grid.count, plans, rank),
        stage_for_each("gather", 1, plans, gather),
    )


Counts = Callable[[int], Mapping[str, Arrays]]
"""What is counted in a chunk: arrays by name, by the kind of the file that holds them."""


def count_chunks(plan: EvaluationPlan) -> DoChunk:
    """Make the worker that counts what a chunk holds."""
    scratch = plan.scratch()
    count = _counts(plan)

    def do(index: int) -> None:
        for kind, arrays in count(index).items():
            scratch.write(kind, index, **arrays)

    return do


def hear_counted(plan: EvaluationPlan) -> Testimony:
    """Make the function that compares what was counted in a chunk with what it holds now."""
    scratch = plan.scratch()
    count = _counts(plan)

    def holds(index: int) -> bool:
        return all(
            np.array_equal(scratch.read(kind, index)[name], array)
            for kind, arrays in count(index).items()
            for name, array in arrays.items()
        )

    return holds


def _counts(plan: EvaluationPlan) -> Counts:
    return _count_map(plan) if plan.kind == "map" else _count_labels(plan)


def _count_labels(plan: EvaluationPlan) -> Counts:
    """Count overlaps of labels with objects or classes."""
    output = plan.open_output()
    labels = plan.open_labels()

    def count(index: int) -> Mapping[str, Arrays]:
        core = plan.grid.core_box(index)
        cells = count_overlaps(
            labels.read(core)[0], output.read(core)[0], core, plan.cell_shape, plan.ignore
        )
        return {"cells": {"rows": cells}, "counts": {"rows": sum_cells(cells)}}

    return count


def _count_map(plan: EvaluationPlan) -> Counts:
    """Count the values of a map."""
    output = plan.open_output()
    output.check_dtype(plan.bins.dtype)
    labels = plan.open_labels()

    def count(index: int) -> Mapping[str, Arrays]:
        core = plan.grid.core_box(index)
        values = output.read(core)[0]
        truth = labels.read(core)[0]
        check_not_negative("label", truth, core)
        is_judged = ~is_among(truth, plan.ignore) if plan.ignore else np.ones(truth.shape, bool)
        is_positive = is_among(truth, plan.positive) if plan.positive else truth != 0
        is_wrong = ((values >= plan.thresholds[0]) != is_positive) & is_judged
        return {
            "counts": {
                "histograms": count_values(values, is_positive, is_judged, plan.bins),
                "at": count_at(values, is_positive, is_judged, plan.thresholds),
            },
            "cells": {
                "judged": _sum_in_cells(is_judged, plan.cell_shape),
                "wrong": _sum_in_cells(is_wrong, plan.cell_shape),
            },
        }

    return count


def sum_labels(plan: EvaluationPlan) -> DoChunk:
    """Make the worker that sums tables of overlaps, and finds which pairs are right."""
    scratch = plan.scratch()

    def do(_: int) -> None:
        files = scratch.read_all("counts", range(plan.grid.count))
        table = sum_tables(file["rows"] for file in files)
        if plan.kind == "classes":
            is_right = table["label"] == table["segment"]
        else:
            is_right = best_pairs(table)
        scratch.write("result", 0, table=table)
        scratch.write("right", 0, rows=table[is_right])

    return do


def sum_maps(plan: EvaluationPlan) -> DoChunk:
    """Make the worker that sums histograms."""
    scratch = plan.scratch()

    def do(_: int) -> None:
        histograms = np.zeros((2, plan.bins.count), np.int64)
        at = np.zeros((len(plan.thresholds), 3), np.int64)
        for file in scratch.read_all("counts", range(plan.grid.count)):
            histograms += file["histograms"]
            at += file["at"]
        scratch.write("result", 0, histograms=histograms, at=at)

    return do


def rank(plan: EvaluationPlan) -> DoChunk:
    """Make the worker that finds the cells of a chunk with the most voxels that are wrong."""
    scratch = plan.scratch()
    right = None if plan.kind == "map" else scratch.read("right", 0)["rows"]

    def do(index: int) -> None:
        cells = scratch.read("cells", index)
        if right is None:
            judged = cells["judged"]
            wrong = cells["wrong"]
        else:
            judged, wrong = wrong_voxels(cells["rows"], right)
        core = plan.grid.core_box(index)
        scratch.write("worst", index, places=_worst(plan, core, judged, wrong))

    return do


def gather(plan: EvaluationPlan) -> DoChunk:
    """Make the worker that finds the cells of the volume with the most voxels that are wrong."""
    scratch = plan.scratch()

    def do(_: int) -> None:
        worst = np.empty(0, PLACE)
        for each in _places(scratch.read_all("worst", range(plan.grid.count))):
            both = np.concatenate([worst, each])
            z, y, x = both["start"].T
            worst = both[np.lexsort((x, y, z, -both["wrong"]))[: plan.worst]]
        scratch.write("places", 0, places=worst)

    return do


def _places(files: Iterable[Arrays]) -> Iterable[NDArray[np.void]]:
    return (file["places"] for file in files)


def _sum_in_cells(is_true: AnyArray, cell_shape: tuple[int, int, int]) -> NDArray[np.int64]:
    """Count the true voxels in each cell of a chunk, cells in the order of their numbers."""
    counts = is_true.astype(np.int64)
    for axis, size in enumerate(cell_shape):
        counts = np.add.reduceat(counts, np.arange(0, is_true.shape[axis], size), axis=axis)
    return counts.ravel()


def _worst(
    plan: EvaluationPlan,
    core: BoundingBox,
    judged: NDArray[np.int64],
    wrong: NDArray[np.int64],
) -> NDArray[np.void]:
    """The cells of a chunk with the most wrong voxels, of those that have any."""
    order = np.argsort(-wrong, kind="stable")[: plan.worst]
    chosen = order[wrong[order] > 0]
    positions = np.stack(np.unravel_index(chosen, cells_along(core.shape, plan.cell_shape)), axis=1)
    places = np.empty(len(chosen), PLACE)
    places["start"] = positions * plan.cell_shape + core.start
    places["stop"] = np.minimum(places["start"] + plan.cell_shape, core.stop)
    places["judged"] = judged[chosen]
    places["wrong"] = wrong[chosen]
    return places


def boxes_of(places: NDArray[np.void]) -> list[BoundingBox]:
    """The boxes of places."""
    return [
        BoundingBox(
            zyx.triple(int(n) for n in place["start"]), zyx.triple(int(n) for n in place["stop"])
        )
        for place in places
    ]
