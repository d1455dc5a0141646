"""The table of components or segments: CSV files in the order of ids, inside the output."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.json_text import parse_json
from beam_inference.errors import StateError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import ceil_div
from beam_inference.segmentation.plans import LabelPlan
from beam_inference.segmentation.records import HEADER, RECORD, table_lines
from beam_inference.segmentation.scratch import RecordsPart, Scratch
from beam_inference.volumes.kvstores import (
    TRANSFER_SECONDS,
    LinkGuard,
    open_kvstore,
    read_file,
    retry_request,
)
from beam_inference.volumes.outputs import open_output
from beam_inference.volumes.packed_arrays import Arrays

_SUMMARY = "summary.json"
_COMPARED_ROWS = 1000
_COMPARED_OBJECTS = 3
_COMPARED_VOXELS = 2**24
LINES_PER_PART = 1_000_000
"""Lines of each part of the table but the last."""


def tabulate(plan: LabelPlan, lines_per_part: int = LINES_PER_PART) -> Callable[[int], None]:
    """Write the parts of the table that begin in a slab of chunks; a stage's worker.

    Args:
        plan: the plan.
        lines_per_part: lines of each part of the table but the last.
    """
    scratch = plan.scratch()
    write = _writer(plan)

    def write_parts(z: int) -> None:
        before = scratch.read("before", z)["before"]  # objects before each row, see numbering
        first_part = ceil_div(int(before[0]), lines_per_part)
        stop_part = ceil_div(int(before[-1]), lines_per_part)
        if z == plan.grid.shape[0] - 1:
            write(_SUMMARY, json.dumps({"objects": int(before[-1])}))
            if not before[-1]:
                stop_part += 1  # an empty table has a header
        for part in range(first_part, stop_part):
            lines = _lines(plan, scratch, z, part * lines_per_part, lines_per_part)
            write(f"{part:06d}.csv", HEADER + "".join(lines))

    return write_parts


def _lines(plan: LabelPlan, scratch: Scratch, z: int, done: int, most: int) -> Iterator[str]:
    """Make at most ``most`` lines of components from slab ``z`` on, after the first ``done``."""
    left = most
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
    """Records of a slab's components but the first ``done`` of all, in the order of ids.

    Yields:
        The first id, and the records of consecutive ids from there on.
    """
    rows = plan.grid.shape[1]
    before = scratch.read("before", z)["before"]
    counts = np.diff(before).reshape(-1, rows)
    # Where a plane's components begin in the file of their row.
    within = np.cumsum(counts, axis=0) - counts
    parts = []
    firsts = []
    left_out = []
    for (plane, y), count in np.ndenumerate(counts):
        earlier = int(before[plane * rows + y])
        skipped = min(max(done - earlier, 0), int(count))
        if skipped < count:
            start = int(within[plane, y])
            parts.append(RecordsPart(plan.row(z, y), plane, start, start + int(count)))
            firsts.append(earlier + skipped + 1)
            left_out.append(skipped)
    found = scratch.read_records("rows", parts, RECORD)
    for first, skipped, records in zip(firsts, left_out, found, strict=True):
        yield first, records[skipped:]


def tabulate_segments(
    plan: LabelPlan,
    read_records: Callable[[], Iterator[Arrays]],
    lines_per_part: int = LINES_PER_PART,
) -> Callable[[int], None]:
    """Write the whole table; a stage's worker.

    Args:
        plan: the plan.
        read_records: reads "names" and "records" of all segments, in any order.
        lines_per_part: lines of each part of the table but the last.
    """
    write = _writer(plan)

    def write_table(_: int) -> None:
        arrays = list(read_records())
        names = np.concatenate([part["names"] for part in arrays])
        records = np.concatenate([part["records"] for part in arrays])
        order = np.argsort(names)
        write(_SUMMARY, json.dumps({"objects": len(order)}))
        for part in range(max(1, ceil_div(len(order), lines_per_part))):
            some = order[part * lines_per_part : (part + 1) * lines_per_part]
            lines = table_lines(
                records[some], names[some], plan.grid.roi.start, plan.output.voxel_size_nm
            )
            write(f"{part:06d}.csv", HEADER + lines)

    return write_table


def _writer(plan: LabelPlan) -> Callable[[str, str], None]:
    store = open_kvstore(plan.table_url, plan.storage)
    LinkGuard(plan.output.url).check(f"{plan.table_folder}/{_SUMMARY}")

    def write(name: str, text: str) -> None:
        content = text.encode()
        retry_request(
            "write",
            f"{plan.table_url}/{name}",
            lambda: store.write(name, content).result(TRANSFER_SECONDS),
        )

    return write


def count_of(plan: LabelPlan) -> int:
    """The number of objects, once the table is written.

    Raises:
        VolumeError: the table cannot be read.
        StateError: it was changed.
    """
    content = read_file(f"{plan.table_url}/{_SUMMARY}", plan.storage)
    with _understood(plan):
        count = parse_json(content)["objects"]
        if type(count) is not int or count < 0:
            raise ValueError("no number of objects")
    return int(count)


@dataclass(frozen=True)
class TableRow:
    """What the table says of an object: its id, its number of voxels, and their box."""

    id: int
    voxels: int
    box: BoundingBox


def first_rows(plan: LabelPlan, most: int) -> list[TableRow]:
    """The first objects of the table, once it is written.

    Raises:
        VolumeError: the table cannot be read.
        StateError: it was changed.
    """
    content = read_file(f"{plan.table_url}/{0:06d}.csv", plan.storage)
    with _understood(plan):
        lines = content.decode().splitlines()[: most + 1]
        if f"{lines[0]}\n" != HEADER or (len(lines) == 1) != (count_of(plan) == 0):
            raise ValueError("other columns, or other objects")
        return [_parse_row(row) for row in csv.DictReader(lines)]


def _parse_row(row: dict[str, str]) -> TableRow:
    start = zyx.triple(int(row[f"{axis}_start"]) for axis in "zyx")
    stop = zyx.triple(int(row[f"{axis}_stop"]) for axis in "zyx")
    return TableRow(int(row["id"]), int(row["voxels"]), BoundingBox(start, stop))


@contextmanager
def _understood(plan: LabelPlan) -> Iterator[None]:
    """Say what to do where a file of the table is not as it was written."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RecursionError, csv.Error) as error:
        raise StateError(
            f"{plan.table_url} is not the table that was written ({type(error).__name__}): pass "
            "--overwrite to make everything again"
        ) from None


def check_labels(plan: LabelPlan) -> None:
    """Compare a complete volume with its table, where that is quick: by its smallest objects.

    Raises:
        VolumeError: the table cannot be read.
        StateError: the volume, or the table, was changed since it was made.
    """
    rows = sorted(first_rows(plan, _COMPARED_ROWS), key=lambda row: row.box.size)
    volume = open_output(plan.output)
    small = [row for row in rows if row.box.size <= _COMPARED_VOXELS]
    for row in small[:_COMPARED_OBJECTS]:
        box = row.box
        is_held = volume is not None and volume.bounds.contains(box) and row.voxels > 0
        if not is_held or volume is None or (volume.read(box) == row.id).sum() != row.voxels:
            raise StateError(
                f"{plan.output.url} does not hold object {row.id} as its table says: one of them "
                "was changed, or removed. Choose another target, or pass --overwrite to make "
                "everything again"
            )
