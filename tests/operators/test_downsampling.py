"""Means and modes against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.downsampling import cells, exact_mean, exact_mode

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.operators.downsampling import downsample

INTEGERS = ["uint8", "int8", "uint16", "uint32", "int64", "uint64"]


@st.composite
def arrays(draw, dtypes):
    shape = draw(st.tuples(*[st.integers(1, 7)] * 3))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    if dtype.kind == "f":
        return random.normal(size=shape).astype(dtype)
    limits = np.iinfo(dtype)
    span = draw(st.sampled_from([1, 2, 100]))
    low = draw(st.sampled_from([limits.min, 0, limits.max - span]))
    return (random.integers(0, span + 1, shape).astype(object) + low).astype(dtype)


factors = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)) | st.sampled_from(
    [(1, 2, 2), (2, 2, 2)]
)
starts = st.tuples(*[st.integers(-9, 9)] * 3)


@given(arrays([*INTEGERS, "float32", "float64"]), starts, factors)
@settings(deadline=None, max_examples=40)
def test_means_are_exact(array, start, factor):
    result = downsample(array[None], start, factor, "mean")[0]
    assert result.dtype == array.dtype
    for index, values in cells(array, start, factor):
        assert result[index] == exact_mean(values)


@given(arrays([*INTEGERS, "float32"]), starts, factors)
@settings(deadline=None, max_examples=40)
def test_modes_are_exact_and_ties_are_as_said(array, start, factor):
    result = downsample(array[None], start, factor, "mode")[0]
    assert result.dtype == array.dtype
    for index, values in cells(array, start, factor):
        assert result[index] == exact_mode(values, factor)


@pytest.mark.parametrize("method", ["mean", "mode"])
@given(arrays(["uint8", "float32"]), starts, factors, st.data())
@settings(deadline=None, max_examples=40)
def test_a_part_by_itself_gives_the_same_bits(method, array, start, factor, data):
    """Whatever a chunk reads: so results cannot depend on chunks."""
    box = BoundingBox(start, tuple(a + n for a, n in zip(start, array.shape, strict=True)))
    above = box.coarsen(factor)
    low = tuple(
        data.draw(st.integers(a, b - 1)) for a, b in zip(above.start, above.stop, strict=True)
    )
    high = tuple(data.draw(st.integers(a + 1, b)) for a, b in zip(low, above.stop, strict=True))
    some = BoundingBox(low, high)
    read = some.refine(factor).intersection(box)
    whole = downsample(array[None], start, factor, method)
    part = downsample(array[(None, *read.slices_in(box))], read.start, factor, method)
    np.testing.assert_array_equal(part, whole[(slice(None), *some.slices_in(above))])


@pytest.mark.parametrize("method", ["mean", "mode"])
def test_channels_are_apart(method):
    array = np.random.default_rng(0).integers(0, 4, (3, 5, 6, 7)).astype(np.uint16)
    together = downsample(array, (1, 0, 3), (2, 2, 2), method)
    for channel in range(3):
        alone = downsample(array[channel : channel + 1], (1, 0, 3), (2, 2, 2), method)
        np.testing.assert_array_equal(together[channel], alone[0])


def test_cells_of_many_voxels_are_counted_right():
    array = np.zeros((1, 1, 16, 16), np.uint64)
    array[0, 0, :, 8:] = 2**64 - 1  # 128 of each: the first wins
    assert downsample(array, (0, 0, 0), (1, 16, 16), "mode").item() == 0
    array[0, 0, 3, 3] = 2**64 - 1
    assert downsample(array, (0, 0, 0), (1, 16, 16), "mode").item() == 2**64 - 1
