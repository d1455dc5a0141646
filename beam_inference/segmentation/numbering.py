r"""The stages that turn labels of chunks into ids of the whole volume, for labels of any kind.

========  ===================  ====================================================================
stage     is done for          and does
========  ===================  ====================================================================
unite     all at once          unites all pairs of labels that are one; adds up what crosses seams
number    a row of chunks (x)  gives ids: the rank of a component's first voxel among those kept
deliver   all at once          writes the ids of what crosses seams for every chunk that it is in
========  ===================  ====================================================================

Before them, each chunk is labelled (:func:`save_chunk`) and its labels are compared with its
neighbours' (:func:`save_pairs`). After them, :func:`ids_of` returns the id of each label of a
chunk.

Ids are in the order of first voxels (z, y, x). So the ids of a plane follow those of all planes
before it, and within a plane those of a row of chunks follow those of the rows before it: ``unite``
counts the components that begin in each plane of each row, and from there a row numbers its own.

``unite`` and ``deliver`` read their files one after the other. They hold, in all, 8 bytes for each
label that touches a seam, some 200 for each component that crosses one, and 8 for each plane of
each row. All other memory is bounded by a chunk, or by the components whose first voxel is in one
row of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, empty
from beam_inference.errors import StateError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.stage_witnesses import Testimony, is_same
from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.labelling import CODE_BITS, POSITIONS, LabelledChunk
from beam_inference.segmentation.plans import LabelPlan
from beam_inference.segmentation.records import add_parts, no_records
from beam_inference.segmentation.scratch import Scratch
from beam_inference.segmentation.union import number_components, unite
from beam_inference.volumes.outputs import open_output
from beam_inference.volumes.packed_arrays import Arrays
from beam_inference.volumes.volume import Volume

DoChunk = Callable[[int], None]
Plan = TypeVar("Plan")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Stage:
    """One stage, a ChunkStage, whose worker is made by a picklable function."""

    name: str
    count: int
    make: Callable[[], DoChunk]

    def make_worker(self) -> DoChunk:
        """Make the function that does one of its chunks."""
        return self.make()


@dataclass(frozen=True)
class WitnessedStage(Stage):
    """A stage that can compare what it wrote with what it would write now, a WitnessStage."""

    hear: Callable[[], Testimony]

    def hear_witnesses(self) -> Testimony:
        """Make the function that compares what was written of a chunk."""
        return self.hear()


def stage_for_each(
    name: str, count: int, plans: Sequence[Plan], make: Callable[[Plan], DoChunk]
) -> Stage:
    """Make one stage that does the same for each of several plans.

    Args:
        name: name of the stage.
        count: its chunks for one plan.
        plans: the plans; all chunks of the first come first.
        make: a picklable function that makes the worker of one plan.
    """
    return Stage(name, count * len(plans), _for_each_plan(count, plans, make))


def witnessed_stage_for_each(
    name: str,
    count: int,
    plans: Sequence[Plan],
    make: Callable[[Plan], DoChunk],
    hear: Callable[[Plan], Testimony],
) -> WitnessedStage:
    """Make one stage as :func:`stage_for_each` does, which can compare what it wrote.

    Args:
        name: name of the stage.
        count: its chunks for one plan.
        plans: the plans; all chunks of the first come first.
        make: a picklable function that makes the worker of one plan.
        hear: a picklable function that makes the comparison of one plan.
    """
    return WitnessedStage(
        name,
        count * len(plans),
        _for_each_plan(count, plans, make),
        _for_each_plan(count, plans, hear),
    )


def _for_each_plan(
    count: int, plans: Sequence[Plan], make: Callable[[Plan], Callable[[int], Answer]]
) -> Callable[[], Callable[[int], Answer]]:
    """Make a picklable function that makes one function of chunks of several plans.

    Args:
        count: chunks of one plan.
        plans: the plans; all chunks of the first come first.
        make: a picklable function that makes the function of one plan.
    """
    return partial(_make_each, count, tuple(plans), make)


def _make_each(
    count: int, plans: Sequence[Plan], make: Callable[[Plan], Callable[[int], Answer]]
) -> Callable[[int], Answer]:
    functions = [make(plan) for plan in plans]

    def do(index: int) -> Answer:
        which, chunk = divmod(index, count)
        return functions[which](chunk)

    return do


def numbering_stages(plan: LabelPlan) -> tuple[Stage, ...]:
    """The three stages, in their order."""
    nz, ny, _ = plan.grid.shape
    return (
        Stage("unite", 1, partial(unite_chunks, plan)),
        Stage("number", nz * ny, partial(number, plan)),
        Stage("deliver", 1, partial(deliver, plan)),
    )


def save_chunk(
    plan: LabelPlan,
    scratch: Scratch,
    index: int,
    chunk: LabelledChunk,
    faces: Mapping[str, AnyArray],
) -> None:
    """Write a labelled chunk, its records, and faces for its neighbours: :func:`faces_after`."""
    scratch.write("labels", index, labels=chunk.labels)
    inner = chunk.records[chunk.touching :]
    kept = _per_plane(plan, inner, plan.grid.core_box(index))
    scratch.write("faces", index, **faces)
    scratch.write("touching", index, records=chunk.records[: chunk.touching], kept=kept)
    scratch.write("inner", index, records=inner)


def faces_after(plan: LabelPlan, scratch: Scratch, index: int) -> dict[Zyx, Arrays]:
    """Read the faces of a chunk, at (0, 0, 0), and of its neighbours after it, by their steps."""
    return {
        step: scratch.read("faces", chunk)
        for step, chunk in _after(plan, index).items()
        if chunk >= 0
    }


def save_pairs(
    plan: LabelPlan, scratch: Scratch, index: int, pairs: NDArray[np.int64], touching: int
) -> None:
    """Write which labels of a chunk and of its neighbours are one.

    Args:
        plan: the plan.
        scratch: the scratch folder.
        index: the chunk.
        pairs: (pairs, 2), codes of labels.
        touching: number of the chunk's labels that touch a seam.
    """
    chunks = np.array(list(_after(plan, index).values()))
    scratch.write("pairs", index, pairs=pairs, chunks=chunks, touching=np.array(touching))


def _after(plan: LabelPlan, index: int) -> dict[Zyx, int]:
    """The chunk and its neighbours at :data:`POSITIONS`; -1 where there is none."""
    neighbours = dict.fromkeys(POSITIONS, -1)
    for step in POSITIONS:
        z, y, x = (p + s for p, s in zip(plan.grid.position(index), step, strict=True))
        if all(p < n for p, n in zip((z, y, x), plan.grid.shape, strict=True)):
            neighbours[step] = plan.grid.index((z, y, x))
    return neighbours


def ids_of(scratch: Scratch, index: int) -> NDArray[np.int64]:
    """The id of each label of a chunk; that of label 0 is 0. Labels that touch seams come first."""
    touching, inner = (scratch.read(kind, index)["ids"] for kind in ("touching_ids", "inner_ids"))
    ids: NDArray[np.int64] = np.concatenate([[0], touching, inner])
    return ids


def write_ids(
    plan: LabelPlan, scratch: Scratch, output: Volume, index: int, ids: NDArray[np.int64]
) -> None:
    """Write a chunk of the output: the id of each of its labels.

    Raises:
        StateError: the chunk's labels are not those of the ids.
    """
    output.write(plan.grid.core_box(index), chunk_of_ids(plan, scratch, output, index, ids))


def chunk_of_ids(
    plan: LabelPlan, scratch: Scratch, output: Volume, index: int, ids: NDArray[np.int64]
) -> AnyArray:
    """Make a chunk of the output, (1, Z, Y, X); see :func:`write_ids`."""
    labels = scratch.read("labels", index)["labels"]
    is_whole = labels.dtype == np.uint32 and labels.shape == plan.grid.core_box(index).shape
    if not is_whole or labels.max() >= len(ids):  # the loop does not look at bounds
        raise StateError(
            f"the labels of chunk {index} in {plan.scratch_url} are not those that an earlier "
            "stage wrote: give the command with --overwrite to start again"
        )
    values = empty((1, *labels.shape), output.dtype)
    kernels().renumber(labels, ids.astype(output.dtype), values[0])
    return values


def hear_ids(
    plan: LabelPlan, scratch: Scratch, ids_of_chunk: Callable[[int], NDArray[np.int64]]
) -> Testimony:
    """Make the function that compares a chunk of the output with its ids."""
    output = open_output(plan.output)

    def holds(index: int) -> bool:
        if output is None:
            return False
        wanted = chunk_of_ids(plan, scratch, output, index, ids_of_chunk(index))
        return is_same(output.read(plan.grid.core_box(index)), wanted)

    return holds


def _planes(plan: LabelPlan, records: NDArray[np.void]) -> NDArray[np.int64]:
    """The plane of each component's first voxel, counted from the volume's first."""
    _, y, x = plan.grid.roi.shape
    planes: NDArray[np.int64] = records["first"] // (y * x)
    return planes


def _per_plane(plan: LabelPlan, records: NDArray[np.void], core: BoundingBox) -> NDArray[np.int64]:
    """Number of components whose first voxel is in each plane of a chunk."""
    before = core.start[0] - plan.grid.roi.start[0]
    return np.bincount(_planes(plan, records) - before, minlength=core.shape[0]).astype(np.int64)


def unite_chunks(plan: LabelPlan) -> DoChunk:
    """Make the worker that finds the components that cross seams."""
    return partial(_unite, plan, plan.scratch())


def _unite(plan: LabelPlan, scratch: Scratch, _: int) -> None:
    every = range(plan.grid.count)
    begins, component = _unite_labels(plan, scratch)
    records = no_records(number_components(component))
    nz, ny, _x = plan.grid.shape
    # Number of components by the plane and the row of chunks of their first voxel.
    kept = np.zeros((plan.grid.roi.shape[0], ny), np.int64)
    for index, file in zip(every, scratch.read_all("touching", every), strict=True):
        add_parts(records, component[begins[index] : begins[index + 1]], file["records"])
        z, y, _x = plan.grid.position(index)
        kept[slice(*plan.planes_of(z)), y] += file["kept"]

    # Number the components that cross seams and are large enough by row, then by first voxel.
    rows = _rows(plan, records)
    large = np.flatnonzero(records["voxels"] >= plan.min_size)
    order = large[np.lexsort((records["first"][large], rows[large]))]
    numbers = np.full(len(records), -1, np.int64)
    numbers[order] = np.arange(len(order))
    records = records[order]
    rows = rows[order]
    np.add.at(kept, (_planes(plan, records), rows % ny), 1)
    before = np.concatenate([[0], np.cumsum(kept)])
    ends = np.searchsorted(rows, np.arange(nz * ny + 1))

    def crossing(row: int) -> Arrays:
        return {"records": records[ends[row] : ends[row + 1]]}

    def before_rows(z: int) -> Arrays:
        start, stop = plan.planes_of(z)
        return {"before": before[start * ny : stop * ny + 1]}

    def numbers_of(index: int) -> Arrays:
        return {"numbers": numbers[component[begins[index] : begins[index + 1]]]}

    scratch.write_all("crossing", ((row, crossing(row)) for row in range(nz * ny)))
    scratch.write_all("before", ((z, before_rows(z)) for z in range(nz)))
    scratch.write_all("numbers", ((index, numbers_of(index)) for index in every))


def _unite_labels(plan: LabelPlan, scratch: Scratch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Unite the labels that touch seams, all of which are numbered chunk by chunk.

    Returns:
        Where each chunk's labels begin, so that label k of chunk c is ``begins[c] + k - 1``; and
        each label's parent, see :mod:`~beam_inference.segmentation.union`.
    """
    every = range(plan.grid.count)
    counts = (int(file["touching"]) for file in scratch.read_all("pairs", every))
    begins = np.concatenate([[0], np.cumsum(np.fromiter(counts, np.int64))])
    parent = np.arange(begins[-1])
    for file in scratch.read_all("pairs", every):
        one, other = (
            begins[file["chunks"]][codes >> CODE_BITS] + (codes & (1 << CODE_BITS) - 1) - 1
            for codes in file["pairs"].T
        )
        unite(parent, one, other)
    return begins, parent


def _rows(plan: LabelPlan, records: NDArray[np.void]) -> NDArray[np.int64]:
    """The row of chunks with each component's first voxel."""
    z, y, _ = np.unravel_index(records["first"], plan.grid.roi.shape)
    depth, height, _ = plan.grid.chunk_shape
    rows: NDArray[np.int64] = z // depth * plan.grid.shape[1] + y // height
    return rows


def number(plan: LabelPlan) -> DoChunk:
    """Make the worker that numbers the components whose first voxel is in a row of chunks."""
    scratch = plan.scratch()
    _, ny, nx = plan.grid.shape

    def do(row: int) -> None:
        z, y = divmod(row, ny)
        chunks = [plan.grid.index((z, y, x)) for x in range(nx)]
        parts = [file["records"] for file in scratch.read_all("inner", chunks)]
        parts.append(scratch.read("crossing", row)["records"])
        records = np.concatenate(parts)
        order = np.argsort(records["first"])
        records = records[order]
        planes = _planes(plan, records)
        within = np.arange(len(planes)) - np.searchsorted(planes, planes)
        before = scratch.read("before", z)["before"]
        ids = np.empty(len(order), np.int64)
        ids[order] = 1 + before[(planes - plan.planes_of(z)[0]) * ny + y] + within
        *inner, crossing = np.split(ids, np.cumsum([len(part) for part in parts])[:-1])
        scratch.write_all(
            "inner_ids",
            ((chunk, {"ids": each}) for chunk, each in zip(chunks, inner, strict=True)),
        )
        scratch.write("crossing_ids", row, ids=crossing)
        start, stop = plan.planes_of(z)
        stops = np.searchsorted(planes, np.arange(start, stop), "right").tolist()
        scratch.write_records("rows", row, records, stops)

    return do


def deliver(plan: LabelPlan) -> DoChunk:
    """Make the worker that writes, for every chunk, the ids of what crosses its seams."""
    return partial(_deliver, plan, plan.scratch())


def _deliver(plan: LabelPlan, scratch: Scratch, _: int) -> None:
    rows = range(plan.grid.shape[0] * plan.grid.shape[1])
    every = range(plan.grid.count)
    # Numbers count the components that cross seams. Those removed have -1: the 0 at the end.
    ids = np.concatenate([*(file["ids"] for file in scratch.read_all("crossing_ids", rows)), [0]])
    numbers = zip(every, scratch.read_all("numbers", every), strict=True)
    scratch.write_all(
        "touching_ids", ((index, {"ids": ids[file["numbers"]]}) for index, file in numbers)
    )
