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

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    codes = pairs.min(axis=1, initial=len(names)) * len(names) + pairs.max(axis=1, initial=0)
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
    regions = _Regions(graph, is_complete)
    ranks = map(regions.rank, range(len(graph.counts)))
    queue = [rank for rank in ranks if -rank[0] >= threshold]
    heapq.heapify(queue)
    while queue:
        rank = regions.rank(queue[0][-1])
        if -rank[0] < threshold:
            heapq.heappop(queue)
        elif rank != queue[0]:  # it has sunk since it was queued: joins change means
            heapq.heapreplace(queue, rank)
        else:
            heapq.heappop(queue)
            regions.join(rank[-1])
    slots = np.array(regions.parent, np.int64)
    while not np.array_equal(above := slots[slots], slots):
        slots = above
    names = np.array(regions.name, np.int64)[slots]
    waits = np.zeros(len(names), bool)
    waits[names] = np.array(regions.waiting, bool)[slots]
    return names, waits


class _Regions:
    """Regions and edges while they are joined.

    A region has a slot, which is that of its part with more neighbours at the time of the join:
    only the neighbours of the other part are gone through, so that a body which takes in thousands
    of fragments does not go through its own neighbours each time.
    """

    def __init__(self, graph: RegionGraph, is_complete: NDArray[np.bool_]) -> None:
        # For each edge: its two regions, sum and count; a count of 0 means that it was removed.
        self._one = _array(graph.pairs[:, 0])
        self._other = _array(graph.pairs[:, 1])
        self._sums = _array(graph.sums)
        self._counts = _array(graph.counts)
        # For each slot: the edges to other slots, the name, and whether the region waits.
        self._edges: list[dict[int, int]] = [{} for _ in range(len(graph.names))]
        self.parent = list(range(len(graph.names)))
        self.name = list(self.parent)
        self.waiting = (~is_complete).tolist()
        for edge, (one, other) in enumerate(zip(self._one, self._other, strict=True)):
            self._edges[one][other] = self._edges[other][one] = edge

    def rank(self, edge: int) -> tuple[float, int, int, int]:
        """Sort key of an edge; the least is the best.

        It is minus the mean affinity, minus the lesser name, minus the greater name; and the edge.
        """
        if not self._counts[edge]:
            return (np.inf, 0, 0, edge)
        one = self.name[self._slot(self._one[edge])]
        other = self.name[self._slot(self._other[edge])]
        return (-self._sums[edge] / self._counts[edge], -min(one, other), -max(one, other), edge)

    def _slot(self, region: int) -> int:
        parent = self.parent
        while parent[region] != region:
            parent[region] = region = parent[parent[region]]
        return region

    def join(self, edge: int) -> None:
        """Join the two regions of the best edge of all, or let them wait."""
        one = self._slot(self._one[edge])
        other = self._slot(self._other[edge])
        if self.waiting[one] or self.waiting[other]:
            self.waiting[one] = self.waiting[other] = True
            return
        if len(self._edges[one]) < len(self._edges[other]):
            one, other = other, one
        mine = self._edges[one]
        gone = self._edges[other]
        self.parent[other] = one
        self._edges[other] = {}
        self.name[one] = min(self.name[one], self.name[other])
        self._counts[edge] = 0
        del mine[other], gone[one]
        for third, theirs in gone.items():
            edges = self._edges[third]
            del edges[other]
            own = mine.get(third)
            # The two regions' edges to a common neighbour become one.
            mine[third] = edges[one] = theirs if own is None else self._sum(own, theirs)

    def _sum(self, one: int, other: int) -> int:
        """Add one edge to another, and remove it; the one that stays is returned.

        The better of them stays: its place in the queue is not behind that of their sum, so that
        the queue need not be changed.
        """
        sums = self._sums
        counts = self._counts
        if sums[one] * counts[other] < sums[other] * counts[one]:
            one, other = other, one
        sums[one] += sums[other]
        counts[one] += counts[other]
        counts[other] = 0
        return one


def _array(values: NDArray[np.int64]) -> array[int]:
    """Values for access one by one: in half the memory of a list, and faster than NumPy's."""
    return array("q", values.tobytes())


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
    left = stays[pairs].all(axis=1) & (pairs[:, 0] != pairs[:, 1])
    names = graph.names[stays]
    edges = sum_edges(names, places[pairs[left]], graph.sums[left], graph.counts[left])
    return RegionGraph(names, sum_records(graph, joined)[stays], *edges)
