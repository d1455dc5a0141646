"""Union-find over arrays, against a search through the graph."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from beam_inference.segmentation.union import number_components, unite


def unite_in_batches(count, pairs, batch, **options):
    parent = np.arange(count)
    for start in range(0, len(pairs), batch):
        unite(parent, *pairs[start : start + batch].T)
    return number_components(parent, **options), parent


@settings(deadline=None)
@given(
    count=st.integers(1, 60),
    pairs=st.integers(0, 80),
    batch=st.integers(1, 50),
    seed=st.integers(0, 10**6),
)
def test_components_are_those_of_the_graph(count, pairs, batch, seed):
    edges = np.random.default_rng(seed).integers(0, count, (pairs, 2))
    number, numbers = unite_in_batches(count, edges, batch)
    graph = coo_array((np.ones(pairs), tuple(edges.T)), (count, count))
    expected, components = connected_components(graph, directed=False)
    assert number == expected
    _, first = np.unique(components, return_index=True)
    np.testing.assert_array_equal(numbers, np.argsort(np.argsort(first))[components])


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_long_chains_and_blocks(order):
    count = 20_000
    pairs = np.stack([np.arange(count - 1), np.arange(1, count)], axis=1)[
        np.arange(count - 1) % 5000 != 4999
    ]
    pairs = {
        "forward": pairs,
        "backward": pairs[::-1],
        "shuffled": np.random.default_rng(0).permutation(pairs),
    }[order]
    for batch in (500, count):
        number, numbers = unite_in_batches(count, pairs, batch, block_labels=1000)
        assert number == 4
        np.testing.assert_array_equal(numbers, np.arange(count) // 5000)


def test_nothing_is_no_component():
    assert number_components(np.arange(0)) == 0
