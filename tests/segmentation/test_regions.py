"""Graphs of fragments as files have them: what joins regions looks at no bounds."""

import numpy as np
import pytest

from beam_inference.errors import StateError
from beam_inference.segmentation.records import RECORD, add_parts, no_records
from beam_inference.segmentation.regions import SIDES, as_arrays, from_arrays

GRAPH = {
    "names": np.array([3, 5, 8]),
    "records": np.zeros(3, RECORD),
    "pairs": np.array([[0, 1], [1, 2]]),
    "sums": np.array([9, 4]),
    "counts": np.array([2, 1]),
} | {f"open{number}": np.zeros(0, np.int64) for number in range(len(SIDES))}


def test_a_graph_comes_back_as_it_was():
    part = from_arrays(GRAPH)
    assert as_arrays(part).keys() == GRAPH.keys()
    for name, array in as_arrays(part).items():
        np.testing.assert_array_equal(array, GRAPH[name])


@pytest.mark.parametrize(
    "changed",
    [
        {"pairs": np.array([[0, 1], [1, 3]])},
        {"pairs": np.array([[0, 1], [0, 10**9]])},
        {"pairs": np.array([[-1, 1], [1, 2]])},
        {"pairs": np.array([[0, 1], [0, 1]])},
        {"pairs": np.array([[1, 2], [0, 1]])},
        {"pairs": np.array([[1, 0], [1, 2]])},
        {"pairs": np.array([[0, 1]])},
        {"pairs": np.array([[0.0, 1.0], [1.0, 2.0]])},
        {"names": np.array([3, 8, 5])},
        {"names": np.array([3, 5])},
        {"counts": np.array([2, 0])},
        {"sums": np.array([9])},
        {"records": np.zeros(2, RECORD)},
        {"records": np.zeros(3)},
    ],
)
def test_what_is_no_graph_is_refused(changed):
    with pytest.raises(StateError, match="is not as an earlier stage wrote it"):
        from_arrays(GRAPH | changed)


@pytest.mark.parametrize(
    ("which", "parts"),
    [
        (np.array([0, 3]), np.zeros(2, RECORD)),
        (np.array([-1, 0]), np.zeros(2, RECORD)),
        (np.array([0]), np.zeros(2, RECORD)),
        (np.array([0, 1]), np.zeros(2)),
    ],
)
def test_records_beyond_their_objects_are_refused(which, parts):
    with pytest.raises(StateError, match="do not fit each other"):
        add_parts(no_records(3), which, parts)
