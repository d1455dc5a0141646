"""Agglomeration of fragments by mean affinity, exact in parts: pure.

Two regions are joined whose **mean affinity**, over all edges between a voxel of one and a voxel of the other, is the
greatest of all, again and again, until none is as great as the threshold (Lee et al., *Superhuman Accuracy on the
SNEMI3D Connectomics Challenge*, 2017; Funke et al., *Large Scale Image Segmentation with Structured Loss*, 2018).

The mean of a join lies between the means of what it is made of: a join is never a better partner than the better of
its parts was. Such a linkage is *reducible* (Bruynooghe 1978), and then it does not matter which of two pairs is joined
first, if both are the best partner of one another. So whatever can be decided within a part of the volume is decided
there, and **the result is that of the whole volume, for all chunk shapes**: see :func:`agglomerate`.

For this, partners must be ranked without ties, and the rank of a join must not exceed that of its parts either where
means are equal. A region's name is the least id of its fragments; of equal means, the pair with the greater of its two
greater names, then of its two lesser names, comes first. Sums are integers; a float64 quotient of two of them is
rounded monotonically, which is all that is needed.
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


def summed(
    names: NDArray[np.int64], pairs: NDArray[np.int64], sums: NDArray[np.int64], counts: NDArray[np.int64]
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


def combined(graphs: Sequence[RegionGraph]) -> RegionGraph:
    """Parts of a volume's graph as one: what several of them know of a region or an edge adds up."""
    names = np.unique(np.concatenate([graph.names for graph in graphs]))
    records = no_records(len(names))
    pairs = []
    for graph in graphs:
        places = np.searchsorted(names, graph.names)
        add_parts(records, places, graph.records)
        pairs.append(places[graph.pairs])
    sums, counts = (np.concatenate([getattr(graph, part) for graph in graphs]) for part in ("sums", "counts"))
    return RegionGraph(names, records, *summed(names, np.concatenate(pairs), sums, counts))


def agglomerate(
    graph: RegionGraph, known: NDArray[np.bool_], threshold: float
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Join what can be joined for certain.

    The best pair comes first. If all edges of both its regions are known, they are joined. If those of one are not,
    it may have better partners elsewhere, so what becomes of the other is not known here either: it waits, and so does
    what would be joined to it. All that is not waiting at the end is final: it has no partner left.

    Args:
        graph: of a part of the volume.
        known: of each region, whether all its edges are in ``graph``.
        threshold: the least mean affinity of a pair that is joined, in the unit of the sums.

    Returns:
        Of each region, the place of the region that it is now part of, which is the least of its parts; and which
        regions are waiting, meaningful for those that are no part of another.
    """
    sums, counts = array("q", graph.sums.tobytes()), array("q", graph.counts.tobytes())
    neighbours: list[dict[int, int]] = [{} for _ in range(len(graph.names))]  # and the edge that leads there
    queue: list[tuple[float, int, int, int, int, int]] = []
    parent = list(range(len(graph.names)))
    name = list(parent)  # of the region in a slot: a join keeps the slot of the part that has more neighbours
    waiting = (~known).tolist()

    def entry(mean: float, edge: int, one: int, other: int) -> tuple[float, int, int, int, int, int]:
        first, second = name[one], name[other]
        return (-mean, -max(first, second), -min(first, second), edge, one, other)

    for edge, (one, other) in enumerate(graph.pairs.tolist()):
        neighbours[one][other] = neighbours[other][one] = edge
        if (mean := sums[edge] / counts[edge]) >= threshold:
            queue.append(entry(mean, edge, one, other))
    heapq.heapify(queue)
    while queue:
        best = heapq.heappop(queue)
        _, _, _, edge, one, other = best
        if neighbours[one].get(other) != edge or sums[edge] / counts[edge] != -best[0]:
            continue  # it is no more, or has another mean, with which it was queued again
        if (now := entry(-best[0], edge, one, other)) != best:
            heapq.heappush(queue, now)  # by its names it comes later now
            continue
        if waiting[one] or waiting[other]:
            waiting[one] = waiting[other] = True
            continue
        if len(neighbours[one]) < len(neighbours[other]):
            one, other = other, one
        mine, gone = neighbours[one], neighbours[other]
        parent[other], neighbours[other] = one, {}
        name[one] = min(name[one], name[other])
        del mine[other], gone[one]
        for third, theirs in gone.items():
            del neighbours[third][other]
            both = mine.setdefault(third, theirs)
            if both == theirs:
                neighbours[third][one] = theirs
            else:
                sums[both] += sums[theirs]
                counts[both] += counts[theirs]
            if (mean := sums[both] / counts[both]) >= threshold:
                heapq.heappush(queue, entry(mean, both, one, third))
    roots = np.array(parent, np.int64)
    while not np.array_equal(above := roots[roots], roots):
        roots = above
    names = np.array(name, np.int64)[roots]
    waits = np.zeros(len(names), bool)
    waits[names] = np.array(waiting, bool)[roots]
    return names, waits


def contracted(graph: RegionGraph, joined: NDArray[np.int64], stays: NDArray[np.bool_]) -> RegionGraph:
    """The graph of what regions were joined to, of which some stay.

    Args:
        graph: the graph.
        joined: of each region, the place of what it is now part of.
        stays: which of these there are to be; edges of others go with them.
    """
    records = no_records(len(graph.names))
    add_parts(records, joined, graph.records)
    stays = stays & (joined == np.arange(len(joined)))
    places = np.cumsum(stays) - 1
    pairs = joined[graph.pairs]
    left = stays[pairs].all(axis=1) & (pairs[:, 0] != pairs[:, 1])
    names = graph.names[stays]
    edges = summed(names, places[pairs[left]], graph.sums[left], graph.counts[left])
    return RegionGraph(names, records[stays], *edges)
