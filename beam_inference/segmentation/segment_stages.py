r"""The stages that segment a volume of affinities, each begun once the one before it is complete.

==========  ===================  ==================================================================
stage       is done for          and does
==========  ===================  ==================================================================
label       each chunk           its watershed, alone; writes labels, their edges, records and faces
match       each chunk           finds labels on both sides of its seams that are one, as pairs
unite       all at once          \
number      a row of chunks (x)   > ids of fragments, see
deliver     all at once          /  :mod:`~beam_inference.segmentation.numbering`
join0       each chunk           joins what can be joined for certain in the graph of its fragments
join1, …    each group of 2×2×2  does so with the rest of its chunks, or groups; the last is of all
…, settle1  each group           from the last tier down: the fate of what a group had left over
paint       each chunk           writes the output
tabulate    all at once          writes the table
clean       all at once          removes the scratch folder
==========  ===================  ==================================================================

A segment's id is the least of its fragments' ids, which are in the order of first voxels (z, y, x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from beam_inference.geometry.zyx import Zyx
from beam_inference.job.stage_witnesses import Testimony
from beam_inference.segmentation.affinities import as_limit, read_links
from beam_inference.segmentation.component_stages import clean
from beam_inference.segmentation.labelling import STEPS, arrange_labels, planes_at_seams, seams_of
from beam_inference.segmentation.numbering import (
    DoChunk,
    Stage,
    faces_after,
    hear_ids,
    ids_of,
    numbering_stages,
    save_chunk,
    save_pairs,
    stage_for_each,
    witnessed_stage_for_each,
    write_ids,
)
from beam_inference.segmentation.plans import SegmentationPlan
from beam_inference.segmentation.regions import (
    Names,
    Part,
    Seam,
    as_arrays,
    chunk_part,
    from_arrays,
    group_part,
    label_edges,
    settle_part,
)
from beam_inference.segmentation.scratch import Scratch
from beam_inference.segmentation.table import tabulate_segments
from beam_inference.segmentation.watershed import find_fragments, fragment_pairs
from beam_inference.volumes.outputs import create_output
from beam_inference.volumes.packed_arrays import Arrays


def segment_stages(*plans: SegmentationPlan) -> tuple[Stage, ...]:
    """All stages, in their order.

    Args:
        plans: at least one. Several differ in threshold, name and output; they share the fragments
            and their graph.
    """
    plan = plans[0]
    chunks = plan.grid.count
    top = len(plan.tiers) - 1
    return (
        Stage("label", chunks, partial(label, plan)),
        Stage("match", chunks, partial(match, plan)),
        *numbering_stages(
            replace(plan, min_size=1)
        ),  # a small fragment may be part of a large segment
        Stage("join0", chunks, partial(join_chunk, plans)),
        *(
            stage_for_each(f"join{tier}", _groups(plan, tier), plans, partial(join_group, tier))
            for tier in range(1, top + 1)
        ),
        *(
            stage_for_each(f"settle{tier}", _groups(plan, tier), plans, partial(settle, tier))
            for tier in range(top - 1, 0, -1)
        ),
        witnessed_stage_for_each("paint", chunks, plans, paint, hear_painted),
        stage_for_each("tabulate", 1, plans, tabulate),
        Stage("clean", 1, partial(clean, plan)),
    )


def _groups(plan: SegmentationPlan, tier: int) -> int:
    return math.prod(plan.tiers[tier])


def label(plan: SegmentationPlan) -> DoChunk:
    """Make the worker that finds the fragments of each chunk alone."""
    source = plan.open_input()
    scratch = plan.scratch()

    def do(index: int) -> None:
        core = plan.grid.core_box(index)
        links = read_links(source, core, to_next=plan.to_next)
        fragments, count, joined = find_fragments(links, plan.low, plan.high)
        chunk = arrange_labels(fragments, count, core, plan.grid, index, 1)
        at_seams = {f"links{axis}": np.take(link, 0, axis) for axis, link in enumerate(links)}
        edges = label_edges(chunk.labels, count, links)
        scratch.write("edges", index, edges=edges, **at_seams)
        first, last = planes_at_seams(chunk.labels, plan.grid, index)
        faces = joined | {f"first{axis}": plane for axis, plane in enumerate(first)}
        faces |= {f"last{axis}": plane for axis, plane in enumerate(last)} | {
            "touching": np.array(chunk.touching)
        }
        save_chunk(plan, scratch, index, chunk, faces)

    return do


def match(plan: SegmentationPlan) -> DoChunk:
    """Make the worker that finds labels which are one fragment across the seams after a chunk."""
    scratch = plan.scratch()

    def do(index: int) -> None:
        faces = faces_after(plan, scratch, index)
        save_pairs(plan, scratch, index, fragment_pairs(faces), int(faces[0, 0, 0]["touching"]))

    return do


def join_chunk(plans: Sequence[SegmentationPlan]) -> DoChunk:
    """Make the worker that joins what can be joined within a chunk, at each plan's threshold."""
    plan = plans[0]
    scratch = plan.scratch()
    joins = [each.joins() for each in plans]

    def do(index: int) -> None:
        has_before, _ = seams_of(plan.grid, index)
        faces = scratch.read("faces", index)
        edges = scratch.read("edges", index)
        touching, inner = (scratch.read(kind, index)["records"] for kind in ("touching", "inner"))
        before: list[Seam | None] = [
            _seam_before(plan, scratch, index, axis, faces, edges) if has_before[axis] else None
            for axis in range(3)
        ]
        part = chunk_part(
            edges["edges"],
            ids_of(scratch, index),
            np.concatenate([touching, inner]),
            before,
            [faces[f"last{axis}"] for axis in range(3)],
        )
        for each, its_joins in zip(plans, joins, strict=True):
            _join(each, its_joins, 0, index, part)

    return do


def _seam_before(
    plan: SegmentationPlan, scratch: Scratch, index: int, axis: int, faces: Arrays, edges: Arrays
) -> Seam:
    """The seam between a chunk and the one before it on an axis."""
    z, y, x = (p - s for p, s in zip(plan.grid.position(index), STEPS[axis], strict=True))
    neighbour = plan.grid.index((z, y, x))
    return Seam(
        own=np.squeeze(faces[f"first{axis}"], axis),
        other=np.squeeze(scratch.read("faces", neighbour)[f"last{axis}"], axis),
        other_ids=np.concatenate([[0], scratch.read("touching_ids", neighbour)["ids"]]),
        links=edges[f"links{axis}"],
    )


def join_group(tier: int, plan: SegmentationPlan) -> DoChunk:
    """Make the worker that joins what can be joined within a group."""
    joins = plan.joins()

    def do(group: int) -> None:
        position = np.unravel_index(group, plan.tiers[tier])
        parts: dict[Zyx, Part] = {}
        for z, y, x in product((0, 1), repeat=3):
            below = tuple(2 * int(p) + s for p, s in zip(position, (z, y, x), strict=True))
            if all(p < n for p, n in zip(below, plan.tiers[tier - 1], strict=True)):
                file = joins.read(
                    f"rest{tier - 1}", int(np.ravel_multi_index(below, plan.tiers[tier - 1]))
                )
                parts[z, y, x] = from_arrays(file)
        _join(plan, joins, tier, group, group_part(parts))

    return do


def _join(plan: SegmentationPlan, joins: Scratch, tier: int, index: int, part: Part) -> None:
    outcome = settle_part(part, as_limit(plan.threshold, floats=plan.floats))
    large = outcome.records["voxels"] >= plan.min_size
    small = np.isin(outcome.to, outcome.final[~large])
    joins.write(f"rest{tier}", index, **as_arrays(outcome.rest))
    joins.write(f"final{tier}", index, names=outcome.final[large], records=outcome.records[large])
    to = np.where(small, 0, outcome.to)
    joins.write(f"ends{tier}", index, names=outcome.names, to=to, settled=outcome.settled)


def settle(tier: int, plan: SegmentationPlan) -> DoChunk:
    """Make the worker that writes the fate of the regions that a group had to do with."""
    joins = plan.joins()

    def do(group: int) -> None:
        names, to = _ends(plan, joins, tier, group)
        joins.write(f"settled{tier}", group, names=names, to=to)

    return do


def _ends(plan: SegmentationPlan, joins: Scratch, tier: int, index: int) -> tuple[Names, Names]:
    """Names of a part's regions, ascending, and of their segments, 0 for those removed."""
    ends = joins.read(f"ends{tier}", index)
    names = ends["names"]
    to = ends["to"]
    settled = ends["settled"]
    if not settled.all():
        position = tuple(int(p) // 2 for p in np.unravel_index(index, plan.tiers[tier]))
        above = int(np.ravel_multi_index(position, plan.tiers[tier + 1]))
        last = tier + 2 == len(plan.tiers)
        kind = "ends" if last else "settled"
        final = joins.read(f"{kind}{tier + 1}", above)
        to = np.where(settled, to, _look_up(final["names"], final["to"], to))
    return names, to


def _look_up(names: Names, values: Names, wanted: Names) -> Names:
    """The values of wanted names; any value for a name that is not there."""
    places = np.searchsorted(names, wanted).clip(max=len(names) - 1)
    return np.take(values, places)


def paint(plan: SegmentationPlan) -> DoChunk:
    """Make the worker that writes the output."""
    output = create_output(plan.output)
    scratch = plan.scratch()
    segments = _segments_of_chunks(plan, scratch)
    return lambda index: write_ids(plan, scratch, output, index, segments(index))


def hear_painted(plan: SegmentationPlan) -> Testimony:
    """Make the function that compares a chunk of the output with what is written there."""
    scratch = plan.scratch()
    return hear_ids(plan, scratch, _segments_of_chunks(plan, scratch))


def _segments_of_chunks(plan: SegmentationPlan, scratch: Scratch) -> Callable[[int], Names]:
    """Make the function that finds the segment of each label of a chunk; that of label 0 is 0."""
    joins = plan.joins()

    def segments_of(index: int) -> Names:
        ids = ids_of(scratch, index)
        names, to = _ends(plan, joins, 0, index)
        if len(ids) > 1:
            ids[1:] = _look_up(names, to, ids[1:])
        return ids

    return segments_of


def tabulate(plan: SegmentationPlan) -> DoChunk:
    """Make the worker that writes the table."""
    return tabulate_segments(plan, partial(_all_records, plan))


def _all_records(plan: SegmentationPlan) -> Iterator[Arrays]:
    joins = plan.joins()
    for tier in range(len(plan.tiers)):
        yield from joins.read_all(f"final{tier}", range(_groups(plan, tier)))
