"""The stages that make a segmentation of affinities, each begun once the one before it is complete.

==========  ====================  =====================================================================================
stage       is done for           what it does
==========  ====================  =====================================================================================
label       each chunk            the watershed of it alone; labels, records, and faces at seams, to the scratch folder
match       each chunk            which labels on both sides of its seams are one, as pairs
unite       all at once           \
number      a row of chunks (x)    > ids of fragments, see :mod:`~beam_inference.segmentation.numbering`
deliver     all at once           /
join0       each chunk            the graph of its fragments; joins what can be joined for certain
join1, …    each group of 2×2×2   the same of what is left of its chunks, or groups; the last is one group of all
…, settle1  each group            from the last level down: what became of what a group had left
paint       each chunk            the output
tabulate    all at once           the table's parts
clean       all at once           removes the scratch folder
==========  ====================  =====================================================================================

A segment's id is the least of its fragments' ids, which count in the order of first voxels (z, y, x).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.zyx import Zyx
from beam_inference.segmentation.affinities import as_limit, read_links
from beam_inference.segmentation.component_stages import clean
from beam_inference.segmentation.labelling import STEPS, arranged, planes_at_seams, seams_of
from beam_inference.segmentation.numbering import (
    DoChunk,
    Stage,
    faces_after,
    ids_of,
    leave_chunk,
    leave_pairs,
    numbering,
)
from beam_inference.segmentation.plans import Segmentation
from beam_inference.segmentation.regions import (
    Names,
    Part,
    as_arrays,
    chunk_part,
    from_arrays,
    group_part,
    settle_what_can_be,
)
from beam_inference.segmentation.scratch import Arrays, Scratch
from beam_inference.segmentation.table import tabulate_segments
from beam_inference.segmentation.watershed import fragments, joined_pairs
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from beam_inference.volumes.volume import Volume


def segment_stages(work: Segmentation) -> tuple[Stage, ...]:
    """All stages, in their order."""
    chunks = work.grid.count
    top = len(work.levels) - 1
    groups = [int(np.prod(shape)) for shape in work.levels]
    return (
        Stage("label", chunks, partial(label, work)),
        Stage("match", chunks, partial(match, work)),
        *numbering(replace(work, min_size=1)),  # a small fragment may be part of a large segment
        Stage("join0", chunks, partial(join_chunk, work)),
        *(
            Stage(f"join{level}", groups[level], partial(join_group, work, level))
            for level in range(1, top + 1)
        ),
        *(
            Stage(f"settle{level}", groups[level], partial(settle, work, level))
            for level in range(top - 1, 0, -1)
        ),
        Stage("paint", chunks, partial(paint, work)),
        Stage("tabulate", 1, partial(tabulate_segments, work, partial(_all_records, groups))),
        Stage("clean", 1, partial(clean, work)),
    )


def _affinities(work: Segmentation) -> Volume:
    return open_volume(
        work.source, scale=work.scale, channel=list(work.channels), storage=work.storage
    )


def label(work: Segmentation) -> DoChunk:
    """Find the fragments of each chunk alone."""
    source = _affinities(work)
    labels = create_output(work.scratch_labels())
    scratch = work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        found, count, joined = fragments(
            read_links(source, core, to_next=work.to_next), work.low, work.high
        )
        chunk = arranged(found, count, core, work.grid, index, 1)
        labels.write(core, chunk.labels[np.newaxis])
        first, last = planes_at_seams(chunk.labels, work.grid, index)
        faces = joined | {f"first{axis}": plane for axis, plane in enumerate(first)}
        faces |= {f"last{axis}": plane for axis, plane in enumerate(last)} | {
            "touching": np.array(chunk.touching)
        }
        leave_chunk(work, scratch, index, chunk, faces)

    return do


def match(work: Segmentation) -> DoChunk:
    """Find, at the seams after a chunk, which labels are one fragment."""
    scratch = work.scratch()

    def do(index: int) -> None:
        faces = faces_after(work, scratch, index)
        leave_pairs(work, scratch, index, joined_pairs(faces), int(faces[0, 0, 0]["touching"]))

    return do


def join_chunk(work: Segmentation) -> DoChunk:
    """Join what can be joined within a chunk."""
    source = _affinities(work)
    labels = create_output(work.scratch_labels())
    scratch = work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        here, there = seams_of(work.grid, index)
        before = [
            _plane_before(work, scratch, index, axis) if here[axis] else _NO_PLANE
            for axis in range(3)
        ]
        touching, inner = (scratch.read(kind, index)["records"] for kind in ("touching", "inner"))
        part = chunk_part(
            labels.read(core)[0],
            ids_of(scratch, index),
            np.concatenate([touching, inner]),
            read_links(source, core, to_next=work.to_next),
            before,
            there,
        )
        _join(work, scratch, 0, index, part)

    return do


_NO_PLANE: Names = np.zeros((0, 0), np.int64)


def _plane_before(work: Segmentation, scratch: Scratch, index: int, axis: int) -> Names:
    """The fragments in the last plane of the chunk before one."""
    z, y, x = (p - s for p, s in zip(work.grid.position(index), STEPS[axis], strict=True))
    neighbour = work.grid.index((z, y, x))
    ids = np.concatenate([[0], scratch.read("touching_ids", neighbour)["ids"]])
    plane: Names = ids[np.squeeze(scratch.read("faces", neighbour)[f"last{axis}"], axis)]
    return plane


def join_group(work: Segmentation, level: int) -> DoChunk:
    """Join what can be joined within a group."""
    scratch = work.scratch()

    def do(group: int) -> None:
        position = np.unravel_index(group, work.levels[level])
        parts: dict[Zyx, Part] = {}
        for z, y, x in product((0, 1), repeat=3):
            below = tuple(2 * int(p) + s for p, s in zip(position, (z, y, x), strict=True))
            if all(p < n for p, n in zip(below, work.levels[level - 1], strict=True)):
                file = scratch.read(
                    f"rest{level - 1}", int(np.ravel_multi_index(below, work.levels[level - 1]))
                )
                parts[z, y, x] = from_arrays(file)
        _join(work, scratch, level, group, group_part(parts))

    return do


def _join(work: Segmentation, scratch: Scratch, level: int, index: int, part: Part) -> None:
    outcome = settle_what_can_be(part, as_limit(work.threshold, floats=work.floats))
    large = outcome.records["voxels"] >= work.min_size
    small = np.isin(outcome.to, outcome.final[~large])
    scratch.write(f"rest{level}", index, **as_arrays(outcome.rest))
    scratch.write(
        f"final{level}", index, names=outcome.final[large], records=outcome.records[large]
    )
    to = np.where(small, 0, outcome.to)
    scratch.write(f"ends{level}", index, names=outcome.names, to=to, settled=outcome.settled)


def settle(work: Segmentation, level: int) -> DoChunk:
    """Say what became of the regions that a group had to do with."""
    scratch = work.scratch()

    def do(group: int) -> None:
        names, to = _ends(work, scratch, level, group)
        scratch.write(f"settled{level}", group, names=names, to=to)

    return do


def _ends(work: Segmentation, scratch: Scratch, level: int, index: int) -> tuple[Names, Names]:
    """Names of a part's regions, ascending, and the segments that they are in; 0 for those that are removed."""
    here = scratch.read(f"ends{level}", index)
    names = here["names"]
    to = here["to"]
    settled = here["settled"]
    if not settled.all():
        position = tuple(int(p) // 2 for p in np.unravel_index(index, work.levels[level]))
        above = int(np.ravel_multi_index(position, work.levels[level + 1]))
        last = level + 2 == len(work.levels)
        known = scratch.read(f"ends{level + 1}" if last else f"settled{level + 1}", above)
        to = np.where(settled, to, _looked_up(known["names"], known["to"], to))
    return names, to


def _looked_up(names: Names, values: Names, wanted: Names) -> NDArray[np.int64]:
    found: NDArray[np.int64] = values[np.searchsorted(names, wanted).clip(max=len(names) - 1)]
    return found


def paint(work: Segmentation) -> DoChunk:
    """Write the output."""
    labels = create_output(work.scratch_labels())
    output = create_output(work.output)
    scratch = work.scratch()

    def do(index: int) -> None:
        core = work.grid.core_box(index)
        ids = ids_of(scratch, index)
        names, to = _ends(work, scratch, 0, index)
        ids[1:] = _looked_up(names, to, ids[1:]) if len(ids) > 1 else ids[1:]
        output.write(core, ids.astype(output.dtype)[labels.read(core)])

    return do


def _all_records(groups: list[int], scratch: Scratch) -> Iterator[Arrays]:
    for level, count in enumerate(groups):
        yield from scratch.read_all(f"final{level}", range(count))
