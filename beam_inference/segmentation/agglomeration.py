"""Agglomeration of fragments by mean affinity, exact in parts: pure.

Two regions are joined whose **mean affinity**, over all edges between a voxel of one and a voxel of
the other, is the greatest of all, again and again, until none is as great as the threshold (Lee et
al., *Superhuman Accuracy on the SNEMI3D Connectomics Challenge*, 2017; Funke et al., *Large Scale
Image Segmentation with Structured Loss*, 2018).

The mean of a join lies between the means of what it is made of: a join is never a better partner
    than the better of its parts was. Such a linkage is *reducible* (Bruynooghe 1978), and then it
    does not matter which of two pairs is joined first, if both are the best partner of one another.
    So whatever can be decided within a part of the volume is decided
there, and **the result is that of the whole volume, for all chunk shapes**: see
    :func:`agglomerate`.

For this, partners must be ranked without ties, and the rank of a join must not exceed that of its
parts either where means are equal. A region's name is the least id of its fragments; of equal
means, the pair whose lesser name is the greater, and then whose greater name is, comes first. (The
other way about, a body that takes in fragments of lesser names would sink, and with it all its
edges, each time.) Sums are integers; a float64 quotient of two of them is rounded monotonically,
which is all that is needed.
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
        names: of the regions, ascending.
        records: what is known of each, see :data:`beam_inference.segmentation.records.RECORD`.
        pairs: (edges, 2), places in ``names``, the lesser first; each pair once.
        sums: over each pair's edges, of the affinities, as integers.
        counts: of each pair's edges.
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
    """Pairs of places in ``names``, in any order and more than once, with each pair once: pairs, sums, counts."""
    codes = pairs.min(axis=1, initial=len(names)) * len(names) + pairs.max(axis=1, initial=0)
    order = np.argsort(codes, kind="stable")
    codes = codes[order]
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    if not len(starts):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    once = np.stack(np.divmod(codes[starts], len(names)), axis=1)
    return once, np.add.reduceat(sums[order], starts), np.add.reduceat(counts[order], starts)


def combine_graphs(graphs: Sequence[RegionGraph]) -> RegionGraph:
    """Parts of a volume's graph as one: what several of them know of a region or an edge adds up."""
    names = np.unique(np.concatenate([graph.names for graph in graphs]))
    records = no_records(len(names))
    pairs = []
    for graph in graphs:
        places = np.searchsorted(names, graph.names)
        add_parts(records, places, graph.records)
        pairs.append(places[graph.pairs])
    sums, counts = (
        np.concatenate([getattr(graph, part) for graph in graphs]) for part in ("sums", "counts")
    )
    return RegionGraph(names, records, *sum_edges(names, np.concatenate(pairs), sums, counts))


def agglomerate(
    graph: RegionGraph, known: NDArray[np.bool_], threshold: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Join what can be joined for certain.

    The best pair comes first. If all edges of both its regions are known, they are joined. If those
    of one are not,
    it may have better partners elsewhere, so what becomes of the other is not known here either: it
        waits, and so does what would be joined to it. All that is not waiting at the end is final:
        it has no partner left.

    Args:
        graph: of a part of the volume.
        known: of each region, whether all its edges are in ``graph``.
        threshold: the least mean affinity of a pair that is joined, in the unit of the sums.

    Returns:
        Of each region, the place of the region that it is now part of, which is the least of its
        parts; and which regions are waiting, meaningful for those that are no part of another.
    """
    regions = _Regions(graph, known)
    ranks = map(regions.rank, range(len(graph.counts)))
    queue = [rank for rank in ranks if -rank[0] >= threshold]
    heapq.heapify(queue)
    while queue:
        rank = regions.rank(queue[0][-1])
        if -rank[0] < threshold:
            heapq.heappop(queue)
        elif rank != queue[0]:  # it has sunk since it was queued
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
    """What is joined so far.

    A region has a slot: that of the part of it that had more neighbours when it was joined, so that
        a body which takes in thousands is not gone through each time.
    """

    def __init__(self, graph: RegionGraph, known: NDArray[np.bool_]) -> None:
        # of edges
        self._one = _array(graph.pairs[:, 0])
        self._other = _array(graph.pairs[:, 1])
        # a count of 0: the edge is no more
        self._sums = _array(graph.sums)
        self._counts = _array(graph.counts)
        # of slots: to others, by which edge
        self._edges: list[dict[int, int]] = [{} for _ in range(len(graph.names))]
        self.parent = list(range(len(graph.names)))
        self.name = list(self.parent)  # of slots
        self.waiting = (~known).tolist()  # of slots
        for edge, (one, other) in enumerate(zip(self._one, self._other, strict=True)):
            self._edges[one][other] = self._edges[other][one] = edge

    def rank(self, edge: int) -> tuple[float, int, int, int]:
        """The lower, the better: minus the mean affinity, minus the lesser name and the greater; and the edge."""
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
            mine[third] = edges[one] = theirs if own is None else self._sum(own, theirs)

    def _sum(self, one: int, other: int) -> int:
        """Two edges as one: as the better of them, whose place in the queue is not below that of both together."""
        sums = self._sums
        counts = self._counts
        if sums[one] * counts[other] < sums[other] * counts[one]:
            one, other = other, one
        sums[one] += sums[other]
        counts[one] += counts[other]
        counts[other] = 0
        return one


def _array(values: NDArray[np.int64]) -> array[int]:
    """For access one by one: less than half the memory of a list, and faster than NumPy's."""
    return array("q", values.tobytes())


def sum_records(graph: RegionGraph, joined: NDArray[np.int64]) -> NDArray[np.void]:
    """What is known of what regions were joined to, at its place; elsewhere nothing."""
    records = no_records(len(graph.names))
    add_parts(records, joined, graph.records)
    return records


def contract(
    graph: RegionGraph, joined: NDArray[np.int64], stays: NDArray[np.bool_]
) -> RegionGraph:
    """The graph of what regions were joined to, of which some stay.

    Args:
        graph: the graph.
        joined: of each region, the place of what it is now part of.
        stays: which of these there are to be; edges of others go with them.
    """
    stays = stays & (joined == np.arange(len(joined)))
    places = np.cumsum(stays) - 1
    pairs = joined[graph.pairs]
    left = stays[pairs].all(axis=1) & (pairs[:, 0] != pairs[:, 1])
    names = graph.names[stays]
    edges = sum_edges(names, places[pairs[left]], graph.sums[left], graph.counts[left])
    return RegionGraph(names, sum_records(graph, joined)[stays], *edges)
