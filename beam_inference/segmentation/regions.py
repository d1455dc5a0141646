"""Graphs of the fragments of a chunk and of groups of chunks, and their form in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.errors import StateError
from beam_inference.geometry.zyx import Zyx
from beam_inference.segmentation.affinities import FRACTION_BITS, MOST
from beam_inference.segmentation.agglomeration import (
    RegionGraph,
    agglomerate,
    combine_graphs,
    contract,
    sum_edges,
    sum_records,
)
from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.records import RECORD, add_parts, no_records
from beam_inference.segmentation.watershed import Links, no_link
from beam_inference.volumes.packed_arrays import Arrays

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


@dataclass(frozen=True)
class Seam:
    """The seam before a chunk on one axis.

    Attributes:
        own: labels of the chunk's first plane, two-dimensional.
        other: labels of the last plane of the chunk before it.
        other_ids: the fragment of each of those labels; that of label 0 is 0.
        links: the links between the two planes.
    """

    own: NDArray[np.uint32]
    other: NDArray[np.uint32]
    other_ids: Names
    links: AnyArray


def label_edges(labels: NDArray[np.uint32], count: int, links: Links) -> NDArray[np.int64]:
    """Edges between the labels of a chunk, as :func:`chunk_part` takes them."""
    edges: NDArray[np.int64] = kernels().touching_labels(
        labels, count, links, _limits(links[0].dtype)
    )
    return edges


def chunk_part(
    edges: NDArray[np.int64],
    ids: Names,
    records: NDArray[np.void],
    before: Sequence[Seam | None],
    after: Sequence[NDArray[np.uint32]],
) -> Part:
    """Make the graph of one chunk; edges to the chunks after it belong to those.

    Args:
        edges: edges between its labels, of :func:`label_edges`.
        ids: the fragment of each label; that of label 0 is 0.
        records: records of the labels from 1 on.
        before: for each axis, the seam before the chunk; None where there is no chunk.
        after: for each axis, the labels of the last plane; empty where there is no chunk after it.
    """
    beyond = [
        np.zeros(0, np.int64) if seam is None else _fragments(seam.other_ids, seam.other)
        for seam in before
    ]
    names = np.unique(np.concatenate([ids[1:], *beyond]))
    places = np.searchsorted(names, ids)
    places[0] = -1
    rows = [_between_regions(edges, places, len(names))]
    sides: list[Names] = []
    for seam, others, last in zip(before, beyond, after, strict=True):
        if seam is None:
            sides.append(others)
        else:
            sides.append(np.union1d(others, _fragments(ids, seam.own)))
            rows.append(_seam_edges(seam, places, names))
        sides.append(_fragments(ids, last))
    all_records = no_records(len(names))
    add_parts(all_records, places[1:], records)
    codes, sums, counts = np.concatenate(rows).T
    pairs = np.stack(np.divmod(codes, max(1, len(names))), axis=1)
    return Part(
        RegionGraph(names, all_records, *sum_edges(names, pairs, sums, counts)), tuple(sides)
    )


def _fragments(ids: Names, labels: NDArray[np.uint32]) -> Names:
    """Names of the fragments in a plane of labels, ascending."""
    names = np.unique(ids[np.unique(labels)])
    return names[names > 0]


def _between_regions(edges: NDArray[np.int64], places: Names, regions: int) -> NDArray[np.int64]:
    """Edges between labels as edges between regions, of which several labels may be parts."""
    one, other = (places[labels] for labels in np.divmod(edges[:, 0], len(places)))
    codes = np.minimum(one, other) * regions + np.maximum(one, other)
    between: NDArray[np.int64] = np.column_stack([codes, edges[:, 1:]])[one != other]
    return between


def _seam_edges(seam: Seam, places: Names, names: Names) -> NDArray[np.int64]:
    """Edges across a seam, between regions."""
    if not seam.own.shape == seam.other.shape == seam.links.shape:
        raise _changed()
    # Background is 0 for the loop, so that places count from 1.
    others = np.searchsorted(names, seam.other_ids) + 1
    others[seam.other_ids == 0] = 0
    rows: NDArray[np.int64] = kernels().touching_planes(
        (places + 1).astype(np.int32)[seam.own],
        others.astype(np.int32)[seam.other],
        len(names) + 1,
        seam.links,
        _limits(seam.links.dtype),
    )
    one, other = np.divmod(rows[:, 0], len(names) + 1)
    rows[:, 0] = (one - 1) * len(names) + other - 1
    return rows


def _limits(dtype: AnyDtype) -> tuple[float, float, float]:
    """What a link is where there is no edge; the most that an affinity counts; and its unit."""
    floats = dtype.kind == "f"
    return (
        float(no_link(dtype)),
        MOST if floats else np.inf,
        2.0**FRACTION_BITS if floats else 1.0,
    )


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
    """The part of which :func:`as_arrays` made the arrays of a file.

    Raises:
        StateError: they are no graph: what joins regions does not look at bounds.
    """
    graph = RegionGraph(*(arrays[name] for name in _GRAPH))
    if not _is_graph(graph):
        raise _changed()
    return Part(graph, tuple(arrays[f"open{number}"] for number in range(len(SIDES))))


def _is_graph(graph: RegionGraph) -> bool:
    """Whether arrays are the graph of some regions, with each edge once."""
    regions = len(graph.names)
    edges = len(graph.pairs)
    numbers = (graph.names, graph.pairs, graph.sums, graph.counts)
    if any(each.dtype != np.int64 for each in numbers) or graph.records.dtype != RECORD:
        return False
    shapes = [(regions,), (regions,), (edges, 2), (edges,), (edges,)]
    if [getattr(graph, name).shape for name in _GRAPH] != shapes:
        return False
    one, other = graph.pairs.T
    codes = one * regions + other
    return bool(
        (np.diff(graph.names) > 0).all()
        and (np.diff(codes) > 0).all()
        and (one >= 0).all()
        and (one < other).all()
        and (other < regions).all()
        and (graph.counts > 0).all()
    )


def _changed() -> StateError:
    return StateError(
        "the graph of fragments in the scratch folder is not as an earlier stage wrote it: give "
        "the command with --overwrite to start again"
    )


_GRAPH = ("names", "records", "pairs", "sums", "counts")
