"""Graphs of the fragments of a chunk and of groups of chunks, and their form in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.zyx import Zyx
from beam_inference.segmentation.affinities import FRACTION_BITS, MOST
from beam_inference.segmentation.agglomeration import (
    RegionGraph,
    agglomerate,
    combine_graphs,
    contract,
    sum_records,
)
from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.records import add_parts, no_records
from beam_inference.segmentation.scratch import Arrays
from beam_inference.segmentation.watershed import Links, no_link

Names = NDArray[np.int64]

SIDES = tuple((axis, side) for axis in range(3) for side in (0, 1))
"""Sides of a chunk or group: an axis, and 0 before it or 1 after it."""


@dataclass(frozen=True)
class Part:
    """The regions of a chunk, or of a group of chunks.

    Attributes:
        graph: graph of its regions, and of those at the other side of its seams.
        open: for each side of :data:`SIDES`, the names of the fragments at the seam, on both sides
            of it; empty where there is no seam. They may have edges in other parts.
    """

    graph: RegionGraph
    open: tuple[Names, ...]


@dataclass(frozen=True)
class Outcome:
    """The fate of the regions of a part.

    Attributes:
        names: names of the regions.
        to: name of the region that each is now part of.
        settled: whether that is final, for each region.
        rest: the regions that are not final.
        final: names of the regions that are.
        records: their records, see :data:`beam_inference.segmentation.records.RECORD`.
    """

    names: Names
    to: Names
    settled: NDArray[np.bool_]
    rest: Part
    final: Names
    records: NDArray[np.void]


def settle_part(part: Part, threshold: float) -> Outcome:
    """Join what can be joined for certain; ``threshold`` is in the unit of the sums."""
    graph = part.graph
    is_complete = ~np.isin(graph.names, np.concatenate(part.open))
    joined, waits = agglomerate(graph, is_complete, threshold)
    final = (joined == np.arange(len(joined))) & ~waits
    records = sum_records(graph, joined)[final]
    rest = Part(contract(graph, joined, waits), part.open)
    return Outcome(
        graph.names, graph.names[joined], ~waits[joined], rest, graph.names[final], records
    )


def chunk_part(
    labels: NDArray[np.uint32],
    ids: Names,
    records: NDArray[np.void],
    links: Links,
    before: Sequence[Names],
    after: Sequence[bool],
) -> Part:
    """Make the graph of one chunk.

    Args:
        labels: (z, y, x).
        ids: the fragment of each label; that of label 0 is 0.
        records: records of the labels from 1 on.
        links: links of the chunk; edges to the chunks after it belong to those.
        before: for each axis, the fragments in the last plane of the chunk before it, a
            two-dimensional array; an empty one where there is no chunk.
        after: for each axis, whether there is a chunk after it.
    """
    names = np.unique(np.concatenate([ids[1:], *(plane[plane > 0] for plane in before)]))
    places = np.searchsorted(names, ids)
    places[0] = -1
    sides: list[Names] = []
    beyond: list[NDArray[np.int32]] = []
    for axis in range(3):
        planes = np.moveaxis(labels, axis, 0)
        sides += [np.zeros(0, np.int64)] * 2
        beyond.append(np.full(planes[0].shape, -1, np.int32))
        if before[axis].size:
            fragments, which = np.unique(before[axis], return_inverse=True)
            at = np.where(fragments > 0, np.searchsorted(names, fragments), -1)
            beyond[-1] = at.astype(np.int32)[which]
            sides[-2] = np.union1d(fragments, ids[planes[0]])
        if after[axis]:
            sides[-1] = np.unique(ids[planes[-1]])
    all_records = no_records(len(names))
    add_parts(all_records, places[1:], records)
    return Part(
        RegionGraph(names, all_records, *_edges(labels, places, len(names), links, beyond)),
        tuple(side[side > 0] for side in sides),
    )


def _edges(
    labels: NDArray[np.uint32],
    places: Names,
    regions: int,
    links: Links,
    beyond: Sequence[NDArray[np.int32]],
) -> tuple[Names, Names, Names]:
    """Pairs of touching regions, ascending; sums of their affinities; and counts."""
    floats = links[0].dtype.kind == "f"
    rows = kernels().touching_regions(
        labels,
        places.astype(np.int32),
        regions,
        links,
        tuple(beyond),
        (
            float(no_link(links[0].dtype)),
            MOST if floats else np.inf,
            2.0**FRACTION_BITS if floats else 1.0,
        ),
    )
    codes, sums, counts = rows[np.argsort(rows[:, 0])].T
    return np.stack(np.divmod(codes, max(1, regions)), axis=1), sums, counts


def group_part(parts: Mapping[Zyx, Part]) -> Part:
    """Make the part of a group of parts, by their positions in it, 0 or 1 on each axis."""
    sides = []
    for axis, side in SIDES:
        outer = max(position[axis] for position in parts) if side else 0
        names = [
            part.open[2 * axis + side]
            for position, part in parts.items()
            if position[axis] == outer
        ]
        sides.append(np.unique(np.concatenate(names)))
    return Part(combine_graphs([part.graph for part in parts.values()]), tuple(sides))


def as_arrays(part: Part) -> Arrays:
    """A part as arrays for a file."""
    graph = part.graph
    sides = {f"open{number}": names for number, names in enumerate(part.open)}
    return sides | {name: getattr(graph, name) for name in _GRAPH}


def from_arrays(arrays: Arrays) -> Part:
    """The part of which :func:`as_arrays` made the arrays of a file."""
    graph = RegionGraph(*(arrays[name] for name in _GRAPH))
    return Part(graph, tuple(arrays[f"open{number}"] for number in range(len(SIDES))))


_GRAPH = ("names", "records", "pairs", "sums", "counts")
