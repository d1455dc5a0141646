"""Targets, voxel by voxel, and under every flip, transpose and offset."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import ndimage

from beam_inference.config.network import Channel
from beam_inference.engines.augmented import symmetries
from beam_inference.training.symmetry import map_array, map_channels
from beam_inference.training.targets import Affinities, Boundaries, Classes, Distance, Stored

ALL = symmetries("zyx", transpose=True)
offsets = st.lists(
    st.tuples(*[st.integers(-6, 6)] * 3).filter(any), min_size=1, max_size=6, unique=True
)
seeds = st.integers(0, 2**32 - 1)


def random_labels(seed, shape=(4, 6, 6)):
    random = np.random.default_rng(seed)
    return random.integers(0, 3, shape), random.random(shape) < 0.9


@settings(max_examples=20)
@given(seeds, offsets)
def test_affinities_are_of_pairs(seed, offsets):
    labels, valid = random_labels(seed)
    target = Affinities(offsets=offsets, unlabelled=2).compute(labels, valid)
    for voxel in product(*map(range, labels.shape)):
        for channel, offset in enumerate(offsets):
            other = tuple(a + b for a, b in zip(voxel, offset, strict=True))
            is_inside = all(0 <= a < n for a, n in zip(other, labels.shape, strict=True))
            pair = (voxel, other)
            known = is_inside and all(valid[each] and labels[each] != 2 for each in pair)
            assert target.known[(channel, *voxel)] == known
            if known:
                joined = labels[voxel] == labels[other] != 0
                assert target.values[(channel, *voxel)] == joined


@pytest.mark.parametrize("symmetry", ALL, ids=str)
@settings(max_examples=20)
@given(seeds, offsets)
def test_mapped_affinities_are_those_of_mapped_labels(symmetry, seed, offsets):
    labels, valid = random_labels(seed)
    config = Affinities(offsets=offsets)
    target = config.compute(labels, valid)
    mapped_labels, mapped_valid = (map_array(each[None], symmetry)[0] for each in (labels, valid))
    expected = config.compute(mapped_labels, mapped_valid)
    values, known = map_channels(target.values, target.known, symmetry, config.channel_offsets)
    np.testing.assert_array_equal(values[known], expected.values[known])
    for channel, offset in enumerate(offsets):
        back = symmetry.maps_back(offset)
        if back in offsets or tuple(-n for n in back) in offsets:
            np.testing.assert_array_equal(known[channel], expected.known[channel])
        else:
            assert not known[channel].any()


@pytest.mark.parametrize("target", [Boundaries(unlabelled=2), Classes(count=3)], ids=str)
@pytest.mark.parametrize("symmetry", ALL, ids=str)
def test_other_targets_move_with_their_voxels(symmetry, target):
    labels, valid = random_labels(7)
    plain = target.compute(labels, valid)
    mapped = target.compute(*(map_array(each[None], symmetry)[0] for each in (labels, valid)))
    values, known = map_channels(plain.values, plain.known, symmetry, [None])
    np.testing.assert_array_equal(mapped.values, values)
    np.testing.assert_array_equal(mapped.known, known)


def test_boundaries_are_known_where_no_hidden_neighbour_matters():
    labels = np.ones((3, 5, 5), int)
    labels[:, :, 3:] = 2
    target = Boundaries().compute(labels, np.ones(labels.shape, bool))
    np.testing.assert_array_equal(target.values[0, 1, 2], [0, 0, 1, 1, 0])
    np.testing.assert_array_equal(target.known[0, 1, 2], [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(target.known[0, 0, 2], [0, 0, 1, 1, 0])


def test_distances_are_in_nanometres_and_known_where_nothing_nearer_is_hidden():
    labels = np.ones((21, 21, 21), int)
    labels[:, :, 10:] = 0
    target = Distance(voxel_size_nm=(40, 8, 8), scale_nm=16).compute(
        labels, np.ones(labels.shape, bool)
    )
    expected = np.tanh((9 - np.arange(10)) / 2)
    np.testing.assert_allclose(target.values[0, 10, 10, :10], expected, rtol=1e-6)
    assert target.known[0, 10, 10].tolist() == [False] * 5 + [True] * 16
    assert not target.values[0, :, :, 10:].any()


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1.0, 1.0, 1.0), (40.0, 8.0, 8.0), (5.0, 9.0, 2.0)]),
    st.booleans(),
)
def test_known_distances_are_those_of_the_whole_volume(seed, size, has_gaps):
    """Of an object's volume cut to a patch, as of all of it."""
    random = np.random.default_rng(seed)
    points = random.integers(0, 20, (9, 3))
    places = np.stack(np.indices((20, 20, 20)), -1)
    nearest = np.linalg.norm(places[..., None, :] - points, axis=-1).argmin(-1)
    labels = nearest % 8  # one of them is 0
    valid = random.random(labels.shape) > 0.01 * has_gaps
    target = Distance(voxel_size_nm=size, scale_nm=2 * max(size))
    everywhere = np.ones(labels.shape, bool)
    edges = Boundaries().compute(labels, everywhere).values[0] > 0
    to_edge = ndimage.distance_transform_edt(~edges, sampling=size)
    truth = np.tanh(to_edge / target.scale_nm) * (labels != 0)
    patch = (slice(3, 13), slice(2, 17), slice(4, 16))
    found = target.compute(labels[patch], valid[patch])
    known = found.known[0]
    np.testing.assert_allclose(found.values[0][known], truth[patch][known], rtol=0, atol=1e-6)
    assert known.any()


@pytest.mark.parametrize("unlabelled", [2**64 - 1, 2**63, -1])
@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.uint8])
def test_any_label_may_be_the_one_of_what_is_unknown(unlabelled, dtype):
    labels = np.ones((3, 3, 3), dtype)
    info = np.iinfo(dtype)
    is_label = info.min <= unlabelled <= info.max
    labels[1, 1, 1] = unlabelled if is_label else 2
    found = Classes(count=3, unlabelled=unlabelled).compute(labels, np.ones(labels.shape, bool))
    assert found.known[0, 1, 1, 1] == (not is_label)


def test_classes_beyond_the_count_are_unknown():
    labels = np.array([0, 1, 2, 7])[None, None]
    target = Classes(count=3, unlabelled=1).compute(labels, np.ones(labels.shape, bool))
    assert target.known.ravel().tolist() == [True, False, True, False]


def test_offsets_that_say_nothing_are_refused():
    with pytest.raises(ValidationError, match="an offset of its own"):
        Affinities(offsets=[(0, 0, 1), (0, 0, 1)])
    with pytest.raises(ValidationError, match="an offset of its own"):
        Affinities(offsets=[(0, 0, 0)])


def stored(values, valid=None, **keys):
    values = np.asarray(values)[None, None, None]
    valid = np.ones((1, *values.shape[1:]), bool) if valid is None else np.array(valid)[None, None]
    target = Stored(channels=[Channel()], **keys).compute(values, valid.reshape(values.shape))
    return target.values.ravel().tolist()


def test_stored_values_between_0_and_1_are_taken_as_they_are():
    assert stored(np.float32([0, 0.25, 1])) == [0, 0.25, 1]
    assert stored(np.array([0, 1, 1], np.uint8)) == [0, 1, 1]
    assert stored(np.array([False, True])) == [0, 1]
    assert stored(np.float64([-1e-9, 1 + 1e-7])) == [0, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.uint64])
def test_the_range_of_integers_stands_for_what_is_said(dtype):
    info = np.iinfo(dtype)
    values = np.array([info.min, info.max], dtype)
    assert stored(values, value_range=(0, 1)) == [0, 1]
    assert stored(values, value_range=(0.25, 0.75)) == [0.25, 0.75]
    if dtype == np.uint8:
        assert stored(np.uint8([51]), value_range=(0, 1)) == [np.float32(0.2)]


@pytest.mark.parametrize(
    ("values", "keys", "message"),
    [
        (np.uint8([0, 255]), {}, r"from 0 to 255; .* write target.value_range: \[0, 1\]"),
        (np.float32([0, 1.01]), {}, "from 0 to 1.01"),
        (np.float32([-0.5, 1]), {}, "from -0.5 to 1"),
        (np.float32([0, np.nan]), {}, "values are NaN"),
        (np.float32([np.inf, -np.inf]), {}, "from -inf to inf"),
        (np.float64([1e300, 0]), {}, "from 0 to inf"),
        (np.float32([0, 1]), {"value_range": (0, 1)}, "they are float32, .* remove it"),
        (np.uint8([0, 255]), {"value_range": (-1, 1)}, "from -1 to 1"),
    ],
)
def test_stored_values_that_cannot_be_learnt_are_refused(values, keys, message):
    with pytest.raises(ValueError, match=message):
        stored(values, **keys)


def test_stored_values_that_are_unknown_may_be_anything():
    values = np.float32([np.nan, 0.5, 300])
    assert stored(values, [False, True, False]) == [0, 0.5, 0]
    with pytest.raises(ValidationError, match="low < high"):
        Stored(channels=[Channel()], value_range=(1, 0))
