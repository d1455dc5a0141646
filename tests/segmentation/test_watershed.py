"""Fragments of one chunk, by hand; against all of a volume they are held in test_segmentation."""

import numpy as np
import pytest
from oracles.label_volumes import write

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.segmentation.affinities import as_limit, as_summands, read_links
from beam_inference.segmentation.watershed import find_fragments, fragment_pairs, no_link
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume


def line(*values):
    """Links of voxels in a line along x: one more than there are voxels."""
    shape = (1, 1, len(values) - 1)
    links = [
        np.full((*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]), -1, np.int32)
        for axis in range(2)
    ]
    return *links, np.array(values, np.int32).reshape(1, 1, -1)


@pytest.mark.parametrize(
    ("links", "labels"),
    [
        ((-1, 9, 5, 8, -1), [1, 1, 2, 2]),
        ((-1, 5, 6, 7, 8, -1), [1, 1, 1, 1, 1]),  # all of them downhill
        ((-1, 9, 3, 9, -1), [1, 1, 2, 2]),  # 3 is nobody's best, but it is high enough below
        ((-1, 9, 7, 9, -1), [1, 1, 1, 1]),
        ((-1, 2, 1, 9, -1), [0, 0, 1, 1]),  # too low for anyone
        ((-1, 5, 5, 5, -1), [1, 1, 1, 1]),  # of equal ones the next voxel
        ((9, 3, 4, 9, -1), [1, 2, 2, 2]),  # the first has its partner before the chunk
        ((-1, -1, -1), [0, 0]),
    ],
)
def test_lines(links, labels):
    found, count, joined = find_fragments(line(*links), 3, 7)
    assert found.ravel().tolist() == labels
    assert count == max(labels)
    assert joined["joined_first2"].all() == (links[0] >= 3)


def test_sides_that_want_to_be_joined():
    own = {
        "last0": np.zeros(0),
        "last1": np.zeros(0),
        "last2": np.array([[[1], [2]], [[3], [4]]], np.uint32),
    }
    own["joined_last2"] = np.array([[[True], [False]], [[False], [False]]])
    other = {"first2": np.array([[[5], [6]], [[7], [6]]], np.uint32)}
    other["joined_first2"] = np.array([[[True], [True]], [[False], [True]]])
    pairs = fragment_pairs({(0, 0, 0): own, (0, 0, 1): other})
    assert pairs.tolist() == [[1, 5 | 1 << 32], [2, 6 | 1 << 32], [4, 6 | 1 << 32]]


@pytest.mark.parametrize("to_next", [False, True])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_links_of_a_chunk_are_those_of_the_volume(to_next, dtype):
    random = np.random.default_rng(0)
    values = random.integers(0, 60000, (3, 6, 7, 8)).astype(dtype)
    volume = open_volume(write(values), channel=[0, 1, 2], storage=LOCAL)
    whole = read_links(volume, volume.bounds, to_next=to_next)
    for axis, links in enumerate(whole):
        planes = np.moveaxis(links, axis, 0)
        stored = np.moveaxis(values[axis], axis, 0)
        assert (planes[[0, -1]] == no_link(links.dtype)).all()
        np.testing.assert_array_equal(planes[1:-1], stored[:-1] if to_next else stored[1:])
    box = BoundingBox((5, -5, 4), (8, -1, 10))
    for axis, links in enumerate(read_links(volume, box, to_next=to_next)):
        grown = tuple(
            slice(a - first, b - first + (number == axis))
            for number, (a, b, first) in enumerate(
                zip(box.start, box.stop, volume.bounds.start, strict=True)
            )
        )
        np.testing.assert_array_equal(links, whole[axis][grown])


def test_what_is_no_number_is_no_link_and_the_least_affinity_is_one():
    values = np.full((3, 1, 1, 5), 0.5, np.float32)
    values[2, 0, 0, 2:4] = np.nan, -np.inf
    volume = open_volume(write(values), channel=[0, 1, 2], storage=LOCAL)
    _, _, along_x = read_links(volume, volume.bounds, to_next=False)
    none = no_link(along_x.dtype)
    least = np.finfo(np.float32).min
    assert along_x.ravel().tolist() == [none, 0.5, none, least, 0.5, none]


def test_summands_are_exact():
    tiny = np.array([0.1, 1 / 3, -5000, np.inf, 1], np.float32)
    assert as_summands(tiny).tolist() == [104858, 349525, -(2**30), 2**30, 2**20]
    assert as_summands(np.array([0, 65535], np.int32)).tolist() == [0, 65535]


def test_a_threshold_includes_its_own_value():
    for value in (0.1, 0.6, 0.7, 1 / 3, 100.7, -3.3):
        beyond = as_summands(np.array([value], np.float32))[0] - as_limit(value, floats=True)
        assert 0 <= beyond < 1
    assert as_limit(127.5, floats=False) == 127.5
