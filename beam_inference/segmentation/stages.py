"""The stages that make components of a volume, each begun once the one before it is complete.

========  =====================  =====================================================================================
stage     is done for            what it does
========  =====================  =====================================================================================
label     each chunk             labels it alone; labels, records, and faces at seams, to the scratch folder
match     each chunk             which labels on both sides of its seams are one, as pairs
unite     all at once            the union of all pairs; totals of what crosses seams
number    a row of chunks (x)    final ids: the rank of a component's first voxel among all that are kept
deliver   all at once            the ids of what crosses seams, to every chunk that it is in
relabel   each chunk             the output
tabulate  a slab of chunks (yx)  the table's parts
clean     all at once            removes the scratch folder
========  =====================  =====================================================================================

Ids are in the order of first voxels (z, y, x). So the ids of a plane follow those of all planes before it, and within a
plane those of a row of chunks follow those of the rows before it: ``unite`` counts what begins in each plane of each
row, and from there a row numbers its own.

``unite`` and ``deliver`` read their files one after the other and hold, in all, 8 bytes for each label that touches a
seam, some 200 for each component that crosses one, and 8 for each plane of each row. All else is bounded by a chunk,
by the components whose first voxel is in one row of chunks, or by a part of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.bounding_box import BoundingBox
from beam_inference.outputs import create_output
from beam_inference.segmentation.labelling import CODE_BITS, POSITIONS, Faces, equivalences, label_chunk
from beam_inference.segmentation.records import add_parts, no_records
from beam_inference.segmentation.scratch import Scratch
from beam_inference.segmentation.table import tabulate
from beam_inference.segmentation.union import number_components, unite
from beam_inference.segmentation.work import Components
from beam_inference.volumes import open_volume

DoChunk = Callable[[int], None]


@dataclass(frozen=True)
class Stage:
    """One stage: see :class:`beam_inference.chunk_tasks.ChunkTask`."""

    name: str
    count: int
    work: Components
    open: Callable[[Components], DoChunk]

    def opened(self) -> DoChunk:
        """What does one of its chunks."""
        return self.open(self.work)


def stages(work: Components) -> tuple[Stage, ...]:
    """All stages, in their order."""
    nz, ny, _ = work.grid.shape
    counts = {
        label: work.grid.count,
        match: work.grid.count,
        unite_chunks: 1,
        number: nz * ny,
        deliver: 1,
        relabel: work.grid.count,
        tabulate: nz,
        clean: 1,
    }
    return tuple(Stage(open.__name__.split("_")[0], count, work, open) for open, count in counts.items())


def label(work: Components) -> DoChunk:
    """Label each chunk alone."""
    source = open_volume(work.source, scale=work.scale, channel=[work.channel], storage=work.storage)
    labels, scratch = create_output(work.scratch_labels()), work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        values = np.ascontiguousarray(work.foreground(source.read(core)[0]))
        chunk = label_chunk(values, core, work.grid, index, work.connectivity, work.min_size)
        labels.write(core, chunk.labels[np.newaxis])
        scratch.write("faces", index, **_named(chunk.faces))
        inner = chunk.records[chunk.touching :]
        scratch.write("touching", index, records=chunk.records[: chunk.touching], kept=_per_plane(work, inner, core))
        scratch.write("inner", index, records=inner)

    return do


def _named(faces: Faces) -> dict[str, NDArray[Any]]:
    planes = {f"first{axis}": plane for axis, plane in enumerate(faces.first)}
    return planes | {f"last{axis}": plane for axis, plane in enumerate(faces.last)} | {"values": faces.values}


def _faces(scratch: Scratch, index: int) -> Faces:
    named = scratch.read("faces", index)
    first, last = (tuple(named[f"{side}{axis}"] for axis in range(3)) for side in ("first", "last"))
    return Faces(first, last, named["values"])


def _planes(work: Components, records: NDArray[np.void]) -> NDArray[np.int64]:
    """The plane of each component's first voxel, counted from the volume's first."""
    _, y, x = work.grid.roi.shape
    planes: NDArray[np.int64] = records["first"] // (y * x)
    return planes


def _per_plane(work: Components, records: NDArray[np.void], core: BoundingBox) -> NDArray[np.int64]:
    """How many components have their first voxel in each plane of a chunk."""
    before = core.start[0] - work.grid.roi.start[0]
    return np.bincount(_planes(work, records) - before, minlength=core.shape[0]).astype(np.int64)


def match(work: Components) -> DoChunk:
    """Find, at the seams after a chunk, which labels are one."""
    scratch, grid = work.scratch(), work.grid

    def do(index: int) -> None:
        there = dict.fromkeys(POSITIONS, -1)
        for step in POSITIONS:
            position = tuple(p + s for p, s in zip(grid.position(index), step, strict=True))
            if all(p < n for p, n in zip(position, grid.shape, strict=True)):
                there[step] = grid.index(position)
        faces = {step: _faces(scratch, chunk) for step, chunk in there.items() if chunk >= 0}
        pairs = equivalences(faces, grid.core_box(index).shape, work.connectivity)
        touching = len(faces[0, 0, 0].values)
        scratch.write("pairs", index, pairs=pairs, chunks=np.array(list(there.values())), touching=np.array(touching))

    return do


def unite_chunks(work: Components) -> DoChunk:
    """Find the components that cross seams."""
    return partial(_unite, work, work.scratch())


def _unite(work: Components, scratch: Scratch, _: int) -> None:
    every = range(work.grid.count)
    touching = np.fromiter((int(file["touching"]) for file in scratch.read_all("pairs", every)), np.int64)
    begins = np.concatenate([[0], np.cumsum(touching)])  # a label k of chunk c that touches a seam is begins[c] + k - 1
    component = np.arange(begins[-1])
    for file in scratch.read_all("pairs", every):
        one, other = (
            begins[file["chunks"]][codes >> CODE_BITS] + (codes & (1 << CODE_BITS) - 1) - 1 for codes in file["pairs"].T
        )
        unite(component, one, other)
    records = no_records(number_components(component))
    (nz, ny, _x), planes = work.grid.shape, work.grid.roi.shape[0]
    kept = np.zeros((planes, ny), np.int64)  # components, by the plane and the row of chunks of their first voxel
    for index, file in zip(every, scratch.read_all("touching", every), strict=True):
        add_parts(records, component[begins[index] : begins[index + 1]], file["records"])
        z, y, _x = work.grid.position(index)
        kept[slice(*work.planes_of(z)), y] += file["kept"]

    rows = _rows(work, records)
    large = np.flatnonzero(records["voxels"] >= work.min_size)
    order = large[np.lexsort((records["first"][large], rows[large]))]
    numbers = np.full(len(records), -1, np.int64)
    numbers[order] = np.arange(len(order))
    records, rows = records[order], rows[order]
    np.add.at(kept, (_planes(work, records), rows % ny), 1)
    before = np.concatenate([[0], np.cumsum(kept)])
    ends = np.searchsorted(rows, np.arange(nz * ny + 1))
    scratch.write_all("crossing", ((row, {"records": records[ends[row] : ends[row + 1]]}) for row in range(nz * ny)))
    scratch.write_all(
        "before",
        ((z, {"before": before[start * ny : stop * ny + 1]}) for z in range(nz) for start, stop in [work.planes_of(z)]),
    )
    scratch.write_all(
        "numbers", ((index, {"numbers": numbers[component[begins[index] : begins[index + 1]]]}) for index in every)
    )


def _rows(work: Components, records: NDArray[np.void]) -> NDArray[np.int64]:
    """The row of chunks in which each component's first voxel is."""
    z, y, _ = np.unravel_index(records["first"], work.grid.roi.shape)
    depth, height, _ = work.grid.chunk_shape
    rows: NDArray[np.int64] = z // depth * work.grid.shape[1] + y // height
    return rows


def number(work: Components) -> DoChunk:
    """Give their ids to the components whose first voxel is in a row of chunks."""
    scratch, (_, ny, nx) = work.scratch(), work.grid.shape

    def do(row: int) -> None:
        z, y = divmod(row, ny)
        chunks = [work.grid.index((z, y, x)) for x in range(nx)]
        parts = [file["records"] for file in scratch.read_all("inner", chunks)]
        parts.append(scratch.read("crossing", row)["records"])
        records = np.concatenate(parts)
        order = np.argsort(records["first"])
        records = records[order]
        planes = _planes(work, records)
        within = np.arange(len(planes)) - np.searchsorted(planes, planes)
        before = scratch.read("before", z)["before"]
        ids = np.empty(len(order), np.int64)
        ids[order] = 1 + before[(planes - work.planes_of(z)[0]) * ny + y] + within
        *inner, crossing = np.split(ids, np.cumsum([len(part) for part in parts])[:-1])
        scratch.write_all("inner_ids", ((chunk, {"ids": each}) for chunk, each in zip(chunks, inner, strict=True)))
        scratch.write("crossing_ids", row, ids=crossing)
        scratch.write_records("rows", row, records)

    return do


def deliver(work: Components) -> DoChunk:
    """Tell every chunk the ids of what crosses its seams."""
    return partial(_deliver, work, work.scratch())


def _deliver(work: Components, scratch: Scratch, _: int) -> None:
    rows, every = range(work.grid.shape[0] * work.grid.shape[1]), range(work.grid.count)
    ids = np.concatenate([*(file["ids"] for file in scratch.read_all("crossing_ids", rows)), [0]])  # -1 is what goes
    numbers = zip(every, scratch.read_all("numbers", every), strict=True)
    scratch.write_all("touching_ids", ((index, {"ids": ids[file["numbers"]]}) for index, file in numbers))


def relabel(work: Components) -> DoChunk:
    """Write the output."""
    labels, output, scratch = create_output(work.scratch_labels()), create_output(work.output), work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        touching, inner = (scratch.read(kind, index)["ids"] for kind in ("touching_ids", "inner_ids"))
        ids = np.concatenate([[0], touching, inner]).astype(output.dtype)
        output.write(core, ids[labels.read(core)])

    return do


def clean(work: Components) -> DoChunk:
    """Remove the scratch folder."""
    scratch = work.scratch()
    return lambda _: scratch.delete()
