"""Sets of blocks: apart, steady as volumes grow, and of the shares that were asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.training.split import SUBSETS, Split, subset_sizes

points = st.tuples(*[st.integers(-500, 500)] * 3)
shapes = st.tuples(*[st.integers(1, 20)] * 3)
splits = st.builds(
    Split,
    shapes,
    st.floats(0, 0.5),
    st.floats(0, 0.4),
    st.integers(0, 2**64 - 1),
)


@settings(max_examples=40)
@given(splits, points, points, shapes, st.text(max_size=5))
def test_boxes_of_two_sets_share_no_voxel(split, first, second, shape, name):
    boxes = [BoundingBox(start, zyx.add(start, shape)) for start in (first, second)]
    sets = [[each for each in SUBSETS if split.contains(each, box, name)] for box in boxes]
    assert all(len(each) <= 1 for each in sets)
    if sets[0] and sets[1] and sets[0] != sets[1]:
        assert boxes[0].intersection(boxes[1]).size == 0


@settings(max_examples=40)
@given(splits, points, shapes, shapes, shapes)
def test_no_block_changes_sides_when_a_volume_grows(split, start, shape, before, after):
    small = BoundingBox(start, zyx.add(start, shape))
    large = BoundingBox(zyx.subtract(start, before), zyx.add(small.stop, after))
    inside = small.slices_in(large)
    np.testing.assert_array_equal(split.subsets(small), split.subsets(large)[inside])


@settings(max_examples=40)
@given(splits, points, shapes)
def test_sizes_are_those_that_are_counted_voxel_by_voxel(split, start, shape):
    bounds = BoundingBox(start, zyx.add(start, zyx.minimum(shape, (9, 9, 9))))
    blocks = bounds.coarsen(split.block_shape)
    each = split.subsets(blocks)
    index = np.meshgrid(
        *(
            np.arange(a, b) // n - first
            for a, b, n, first in zip(
                bounds.start, bounds.stop, split.block_shape, blocks.start, strict=True
            )
        ),
        indexing="ij",
    )
    counts = np.bincount(each[tuple(index)].ravel(), minlength=3)
    sizes = subset_sizes(split, bounds)
    assert [sizes[subset].voxels for subset in SUBSETS] == counts.tolist()
    assert sum(size.blocks for size in sizes.values()) == blocks.size


def test_shares_are_about_what_was_asked_for():
    split = Split((8, 8, 8), validation=0.2, test=0.1)
    sizes = subset_sizes(split, BoundingBox((0, 0, 0), (400, 400, 400)))
    shares = [sizes[subset].blocks / 50**3 for subset in SUBSETS]
    np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=0.005)


def test_the_split_is_the_same_in_every_version():
    # Networks are recorded with their split: what was held out stays held out.
    found = Split((1, 1, 1), 0.3, 0.3, seed=5).subsets(BoundingBox((-2, 0, 7), (0, 2, 12)), "em")
    assert "".join(map(str, found.ravel())) == "00200210122210100220"


def test_seed_and_name_give_other_splits():
    blocks = BoundingBox((0, 0, 0), (8, 8, 8))
    first = Split((1, 1, 1)).subsets(blocks)
    assert (first != Split((1, 1, 1), seed=1).subsets(blocks)).any()
    assert (first != Split((1, 1, 1)).subsets(blocks, "other")).any()


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0.1), (0.5, 0.5), (0.2, 1.5)])
def test_impossible_shares_are_refused(validation, test):
    with pytest.raises(ConfigError, match="whose sum is below 1"):
        Split((8, 8, 8), validation, test)


def test_an_empty_block_is_refused():
    with pytest.raises(ConfigError, match="block_shape"):
        Split((8, 0, 8))
