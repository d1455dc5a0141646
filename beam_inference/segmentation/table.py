"""The table of components or segments: CSV files of a million lines each, in the order of ids, beside the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.zyx import ceil_div
from beam_inference.segmentation.plans import LabelPlan
from beam_inference.segmentation.records import HEADER, RECORD, table_lines
from beam_inference.segmentation.scratch import Arrays, Scratch
from beam_inference.volumes.kvstores import TRANSFER_SECONDS, open_kvstore, persistently, read_file

_SUMMARY = "summary.json"
LINES_PER_PART = 1_000_000
"""Of each part of the table but the last."""


def tabulate(plan: LabelPlan) -> Callable[[int], None]:
    """Write the parts of the table that begin in a slab of chunks."""
    scratch = plan.scratch()
    write = _writer(plan)

    def do(z: int) -> None:
        before = scratch.read("before", z)["before"]
        last = z == plan.grid.shape[0] - 1
        first_part, stop_part = (
            ceil_div(int(count), LINES_PER_PART) for count in (before[0], before[-1])
        )
        if last:
            write(_SUMMARY, json.dumps({"objects": int(before[-1])}))
            stop_part += before[-1] == 0  # a header at least
        for part in range(first_part, stop_part):
            write(
                f"{part:06d}.csv",
                HEADER + "".join(_lines(plan, scratch, z, part * LINES_PER_PART)),
            )

    return do


def _lines(plan: LabelPlan, scratch: Scratch, z: int, done: int) -> Iterator[str]:
    """Lines of the components after the ``done`` first, which begin in a slab of chunks; LINES_PER_PART at most."""
    left = LINES_PER_PART
    for slab in range(z, plan.grid.shape[0]):
        for first, records in _records_of(plan, scratch, slab, done):
            some = records[:left]
            ids = np.arange(first, first + len(some))
            yield table_lines(some, ids, plan.grid.roi.start, plan.output.voxel_size_nm)
            left -= len(some)
            if not left:
                return


def _records_of(
    plan: LabelPlan, scratch: Scratch, z: int, done: int
) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Records of a slab's components after the ``done`` first of all, in the order of ids, each with the first id."""
    ny = plan.grid.shape[1]
    before = scratch.read("before", z)["before"]
    counts = np.diff(before).reshape(-1, ny)
    # where a plane's components begin in the file of their row
    within = np.cumsum(counts, axis=0) - counts
    parts = []
    firsts = []
    for (plane, y), count in np.ndenumerate(counts):
        earlier = int(before[plane * ny + y])
        skipped = min(max(done - earlier, 0), int(count))
        if skipped < count:
            start = int(within[plane, y])
            parts.append((plan.row(z, y), start + skipped, start + int(count)))
            firsts.append(earlier + skipped + 1)
    return zip(firsts, scratch.read_records("rows", parts, RECORD), strict=True)


def tabulate_segments(
    plan: LabelPlan, found: Callable[[Scratch], Iterator[Arrays]]
) -> Callable[[int], None]:
    """Write the whole table: of the names and records that are found in the scratch folder, in any order."""
    scratch = plan.scratch()
    write = _writer(plan)

    def do(_: int) -> None:
        parts = list(found(scratch))
        names, records = (
            np.concatenate([part[of] for part in parts]) for of in ("names", "records")
        )
        order = np.argsort(names)
        write(_SUMMARY, json.dumps({"objects": len(order)}))
        for part in range(max(1, ceil_div(len(order), LINES_PER_PART))):
            some = order[part * LINES_PER_PART : (part + 1) * LINES_PER_PART]
            lines = table_lines(
                records[some], names[some], plan.grid.roi.start, plan.output.voxel_size_nm
            )
            write(f"{part:06d}.csv", HEADER + lines)

    return do


def _writer(plan: LabelPlan) -> Callable[[str, str], None]:
    store = open_kvstore(plan.table_url, plan.storage)

    def write(name: str, text: str) -> None:
        content = text.encode()
        persistently(
            "write",
            f"{plan.table_url}/{name}",
            lambda: store.write(name, content).result(TRANSFER_SECONDS),
        )

    return write


def count_of(plan: LabelPlan) -> int:
    """How many objects there are, once the table is written."""
    return int(json.loads(read_file(f"{plan.table_url}/{_SUMMARY}", plan.storage))["objects"])
