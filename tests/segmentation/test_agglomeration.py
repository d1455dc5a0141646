"""Agglomeration, whole and in parts, against joining the best pair of all again and again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.segmentation.agglomeration import (
    RegionGraph,
    agglomerate,
    combine_graphs,
    contract,
    sum_edges,
)
from beam_inference.segmentation.records import no_records


def random_graph(random, regions, edges, most):
    names = np.sort(random.choice(1000, regions, replace=False))
    pairs = random.integers(0, regions, (edges, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    sums = random.integers(0, most, len(pairs))
    counts = random.integers(1, 3, len(pairs))
    records = no_records(regions)
    records["voxels"] = random.integers(1, 9, regions)
    return RegionGraph(names, records, *sum_edges(names, pairs, sums, counts))


def by_brute_force(graph, threshold):
    """The place of the least region that each region is now part of."""
    part = np.arange(len(graph.names))
    while True:
        edges = {}
        for (one, other), total, count in zip(graph.pairs, graph.sums, graph.counts, strict=True):
            pair = (min(part[one], part[other]), max(part[one], part[other]))
            if pair[0] != pair[1]:
                before = edges.get(pair, (0, 0))
                edges[pair] = (before[0] + int(total), before[1] + int(count))
        best = max(
            ((total / count, *pair) for pair, (total, count) in edges.items()), default=(-1.0,)
        )
        if best[0] < threshold:
            return part
        part[part == best[2]] = best[1]


graphs = {
    "regions": st.integers(1, 30),
    "edges": st.integers(0, 80),
    "most": st.sampled_from([2, 5, 1000]),  # few values: many equal means
    "share": st.floats(0, 0.9),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(deadline=None, max_examples=150)
@given(**graphs)
def test_all_at_once_and_what_is_known_first_give_the_same(regions, edges, most, share, seed):
    random = np.random.default_rng(seed)
    graph = random_graph(random, regions, edges, most)
    threshold = share * most
    expected = by_brute_force(graph, threshold)
    joined, waits = agglomerate(graph, np.ones(regions, bool), threshold)
    np.testing.assert_array_equal(joined, expected)
    assert not waits.any()

    is_complete = random.random(regions) < 0.6
    joined, waits = agglomerate(graph, is_complete, threshold)
    assert (joined[~is_complete] == np.flatnonzero(~is_complete)).all(), (
        "regions that are not complete are not joined"
    )
    final = ~waits[joined]
    np.testing.assert_array_equal(joined[final], expected[final])
    rest = contract(graph, joined, waits)
    assert rest.names.tolist() == graph.names[waits].tolist()
    later, waits = agglomerate(rest, np.ones(len(rest.names), bool), threshold)
    assert not waits.any()
    names = graph.names[joined]
    names[~final] = rest.names[later][np.searchsorted(rest.names, names[~final])]
    np.testing.assert_array_equal(names, graph.names[expected])
    assert rest.records["voxels"].sum() == graph.records["voxels"][~final].sum()


@settings(deadline=None, max_examples=60)
@given(**graphs)
def test_a_graph_is_the_sum_of_its_parts(regions, edges, most, share, seed):
    random = np.random.default_rng(seed)
    graph = random_graph(random, regions, edges, most)
    parts = []
    for rounded_up, (low, high) in enumerate(((0, share * most), (share * most, np.inf))):
        some = (graph.sums >= low) & (graph.sums < high)
        records = graph.records.copy()
        records["voxels"] = (records["voxels"] + rounded_up) // 2
        parts.append(
            RegionGraph(
                graph.names, records, graph.pairs[some], graph.sums[some], graph.counts[some]
            )
        )
    whole = combine_graphs(parts)
    for name in ("names", "pairs", "sums", "counts"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(graph, name))
    np.testing.assert_array_equal(whole.records["voxels"], graph.records["voxels"])


@pytest.mark.timeout(60)
def test_a_body_that_takes_in_thousands_one_by_one():
    """The neighbours of the smaller part are what is gone through: else this would take minutes."""
    count = 20_000
    names = np.arange(1, count + 2)
    pairs = np.stack([np.arange(count), np.full(count, count)], axis=1)
    # in equal means it must not sink each time
    for sums in (np.arange(count) + count, np.full(count, count)):
        graph = RegionGraph(names, no_records(count + 1), pairs, sums, np.ones(count, np.int64))
        joined, waits = agglomerate(graph, np.ones(count + 1, bool), 1.0)
        assert not joined.any()
        assert not waits.any()
