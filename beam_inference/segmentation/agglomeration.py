"""Agglomeration of fragments by mean affinity, exact in parts: pure functions.

Two regions are joined whose **mean affinity**, over all edges between a voxel of one and a voxel of
the other, is the greatest of all, again and again, until none is as great as the threshold (Lee et
al., *Superhuman Accuracy on the SNEMI3D Connectomics Challenge*, 2017; Funke et al., *Large Scale
Image Segmentation with Structured Loss*, 2018).

The mean of a join lies between the means of its parts: a join is never a better partner than the
better of its parts was. Such a linkage is *reducible* (Bruynooghe 1978), and then it does not
matter which of two pairs is joined first, if in both each region is the other's best partner. So
whatever can be decided within a part of the volume is decided there, and **the result is that of
the whole volume, for all chunk shapes**: see :func:`agglomerate`.

For this, partners must be ranked without ties, and the rank of a join must not exceed that of its
parts where means are equal, either. A region's name is the least id of its fragments; of pairs with
equal means, the one with the greater lesser name comes first, then the one with the greater
greater name. (In the opposite order, a body that takes in fragments of lesser names would sink each
time, and all its edges with it.) Sums are integers; a float64 quotient of two of them is rounded
monotonically, which is all that is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.records import add_parts, no_records


@dataclass(frozen=True)
class RegionGraph:
    """Regions, and the edges between them.

    Attributes:
        names: names of the regions, ascending.
        records: record of each, see :data:`beam_inference.segmentation.records.RECORD`.
        pairs: (edges, 2), places in ``names``, the lesser first; each pair once.
        sums: sum of the affinities between each pair's voxels, as integers.
        counts: number of these affinities.
    """

    names: NDArray[np.int64]
    records: NDArray[np.void]
    pairs: NDArray[np.int64]
    sums: NDArray[np.int64]
    counts: NDArray[np.int64]


def sum_edges(
    names: NDArray[np.int64],
    pairs: NDArray[np.int64],
    sums: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sum edges over pairs.

    Args:
        names: names of regions.
        pairs: (edges, 2), places in ``names``, in any order and more than once.
        sums: sum of each edge.
        counts: count of each edge.

    Returns:
        Pairs, the lesser place first and each once; their sums; their counts.
    """
    one, other = pairs.T
    codes = np.minimum(one, other) * len(names) + np.maximum(one, other)
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    if not len(starts):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    once = np.stack(np.divmod(codes[starts], len(names)), axis=1)
    return once, np.add.reduceat(sums[order], starts), np.add.reduceat(counts[order], starts)


def combine_graphs(graphs: Sequence[RegionGraph]) -> RegionGraph:
    """Make one graph of parts of a volume's graph: records and edges in several of them add up."""
    names = np.unique(np.concatenate([graph.names for graph in graphs]))
    records = no_records(len(names))
    pairs = []
    for graph in graphs:
        places = np.searchsorted(names, graph.names)
        add_parts(records, places, graph.records)
        pairs.append(places[graph.pairs])
    sums = np.concatenate([graph.sums for graph in graphs])
    counts = np.concatenate([graph.counts for graph in graphs])
    return RegionGraph(names, records, *sum_edges(names, np.concatenate(pairs), sums, counts))


def agglomerate(
    graph: RegionGraph, is_complete: NDArray[np.bool_], threshold: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Join what can be joined for certain.

    The best pair comes first. If all edges of both its regions are in the graph, they are joined.
    If one has other edges, it may have better partners elsewhere, so the fate of the other cannot
    be decided here either: both wait, and so does every region that would be joined to them.
    Regions that do not wait at the end are final: they have no partner left.

    Args:
        graph: graph of a part of the volume.
        is_complete: whether all edges of a region are in ``graph``, for each region.
        threshold: the least mean affinity of a pair that is joined, in the unit of the sums.

    Returns:
        For each region, the place of the region that it is now part of, which is the least of its
        parts; and whether it waits, which is meaningful for those that are no part of another.
    """
    waits = ~is_complete
    joined = kernels().join_regions(
        _as_places(graph.pairs[:, 0]),
        _as_places(graph.pairs[:, 1]),
        graph.sums.copy(),
        graph.counts.copy(),
        waits,
        float(threshold),
    )
    return joined.astype(np.int64), waits


_MOST_ENDS = 2**31
"""Places and ends of edges are int32 while regions are joined."""


def _as_places(values: NDArray[np.int64]) -> NDArray[np.int32]:
    """Values as int32, which halves the memory; no machine holds a graph with more edges."""
    assert 2 * len(values) < _MOST_ENDS
    return values.astype(np.int32)


def sum_records(graph: RegionGraph, joined: NDArray[np.int64]) -> NDArray[np.void]:
    """Records of the regions that others were joined to, at their places; others are empty."""
    records = no_records(len(graph.names))
    add_parts(records, joined, graph.records)
    return records


def contract(
    graph: RegionGraph, joined: NDArray[np.int64], stays: NDArray[np.bool_]
) -> RegionGraph:
    """Make the graph of regions after joins; some of them stay in it.

    Args:
        graph: the graph.
        joined: for each region, the place of the region that it is now part of.
        stays: whether a region stays; edges of others are removed with them.
    """
    stays = stays & (joined == np.arange(len(joined)))
    places = np.cumsum(stays) - 1
    pairs = joined[graph.pairs]
    one, other = pairs.T
    left = stays[one] & stays[other] & (one != other)
    names = graph.names[stays]
    edges = sum_edges(names, places[pairs[left]], graph.sums[left], graph.counts[left])
    return RegionGraph(names, sum_records(graph, joined)[stays], *edges)
