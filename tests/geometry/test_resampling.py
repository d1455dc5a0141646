import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.resampling import (
    Grid,
    Resampling,
    coarse_axis,
    make_resampling,
)

SIZES = (4.0, 5.0, 6.0)
SHAPES = st.tuples(*[st.integers(1, 24)] * 3)
FACTORS = st.tuples(*[st.floats(0.3, 4)] * 3)
STARTS = st.tuples(*[st.integers(-50, 50)] * 3)
ORDERS = st.sampled_from([0, 1, 3])


def box_of(start, shape):
    return BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True)))


def a_resampling(shape, factors, start, orders):
    target = tuple(max(1, round(n * f)) for n, f in zip(shape, factors, strict=True))
    return Resampling(box_of(start, shape), box_of((7, -3, 0), target), orders)


def whole(array, resampling):
    """What scipy makes of the whole array, in float64, axis by axis where orders differ."""
    result = array.astype(np.float64)
    for axis, order in enumerate(resampling.orders):
        factors = [1.0] * 4
        factors[axis + 1] = resampling.target.shape[axis] / array.shape[axis + 1]
        if factors[axis + 1] != 1:
            result = ndimage.zoom(result, factors, order=order, mode="nearest", grid_mode=True)
    return result


def resampled(array, resampling, box):
    source = resampling.source_box(box)
    part = array[(slice(None), *source.slices_in(resampling.source))]
    return resampling.resample(part, source, box)


@settings(deadline=None, max_examples=40)
@given(SHAPES, FACTORS, STARTS, st.tuples(ORDERS, ORDERS, ORDERS))
def test_a_volume_is_resampled_as_by_scipy(shape, factors, start, orders):
    resampling = a_resampling(shape, factors, start, orders)
    array = np.random.default_rng(0).random((2, *shape), np.float32)
    found = resampled(array, resampling, resampling.target)
    expected = whole(array, resampling)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if set(orders) == {0} else 5e-6)


@settings(deadline=None, max_examples=60)
@given(SHAPES, FACTORS, STARTS, st.tuples(ORDERS, ORDERS, ORDERS), st.data())
def test_every_box_has_the_bits_of_the_whole(shape, factors, start, orders, data):
    resampling = a_resampling(shape, factors, start, orders)
    array = np.random.default_rng(0).random((1, *shape), np.float32)
    expected = resampled(array, resampling, resampling.target)
    corners = [
        sorted(data.draw(st.tuples(st.integers(a, b - 1), st.integers(a, b - 1))))
        for a, b in zip(resampling.target.start, resampling.target.stop, strict=True)
    ]
    box = BoundingBox(tuple(a for a, _ in corners), tuple(b + 1 for _, b in corners))
    assert resampling.source.contains(resampling.source_box(box))
    found = resampled(array, resampling, box)
    np.testing.assert_array_equal(found, expected[(slice(None), *box.slices_in(resampling.target))])


def test_a_large_box_has_the_bits_of_its_parts():
    shape = (5, 40, 130)
    resampling = Resampling(box_of((0, 0, 0), shape), box_of((0, 0, 0), (9, 103, 91)), (3, 3, 3))
    array = np.random.default_rng(0).random((3, *shape), np.float32)
    expected = resampled(array, resampling, resampling.target)
    for axis in range(3):
        for place in range(resampling.target.shape[axis]):
            start = tuple(place if k == axis else 0 for k in range(3))
            stop = tuple(
                place + 1 if k == axis else n for k, n in enumerate(resampling.target.shape)
            )
            box = BoundingBox(start, stop)
            np.testing.assert_array_equal(
                resampled(array, resampling, box),
                expected[(slice(None), *box.slices_in(resampling.target))],
            )


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_constant_remains_exactly_what_it_is(order):
    resampling = a_resampling((9, 8, 7), (0.7, 2.3, 1.9), (0, 0, 0), (order,) * 3)
    array = np.full((1, 9, 8, 7), 0.1, np.float32)
    assert set(resampled(array, resampling, resampling.target).ravel()) == {np.float32(0.1)}


def test_names_of_objects_stay_what_they_are():
    resampling = a_resampling((3, 4, 5), (2.1, 0.7, 3.3), (1, 2, 3), (0, 0, 0))
    names = np.arange(2**60, 2**60 + 60, dtype=np.uint64).reshape(1, 3, 4, 5)
    found = resampled(names, resampling, resampling.target)
    assert found.dtype == np.uint64
    assert set(found.ravel()) <= set(names.ravel())


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(*[st.floats(0.3, 2.5)] * 3),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.tuples(ORDERS, ORDERS, ORDERS),
    st.data(),
)
def test_voxels_that_are_repeated_have_the_values_of_one(shape, factors, repeat, orders, data):
    once = a_resampling(shape, factors, (1, -2, 3), orders)
    target = once.target.refine(repeat)
    often = Resampling(once.source, target, orders, repeat)
    array = np.random.default_rng(0).random((1, *shape), np.float32)
    expected = resampled(array, once, once.target)
    for axis, n in enumerate(repeat):
        expected = expected.repeat(n, axis + 1)
    whole = resampled(array, often, target)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-6)  # axes in another order
    corners = [
        sorted(data.draw(st.tuples(st.integers(a, b - 1), st.integers(a, b - 1))))
        for a, b in zip(target.start, target.stop, strict=True)
    ]
    box = BoundingBox(tuple(a for a, _ in corners), tuple(b + 1 for _, b in corners))
    found = resampled(array, often, box)
    np.testing.assert_array_equal(found, whole[(slice(None), *box.slices_in(target))])
    needed = often.source_box(box).shape
    assert all(n <= most for n, most in zip(needed, often.source_shape(box.shape), strict=True))


@given(SHAPES, FACTORS, STARTS, st.data())
def test_a_box_of_the_source_is_covered_and_no_more(shape, factors, start, data):
    resampling = a_resampling(shape, factors, start, (1, 1, 1))
    for number, axis in enumerate(resampling.axes):
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, shape[number])] * 2)))
        if a == b:
            continue
        first, last = axis.target_interval(axis.start + a, axis.start + b)
        ratio = axis.target_length / axis.length
        assert first - axis.target_start <= a * ratio + 1e-9
        assert a * ratio - 1 < first - axis.target_start + 1e-9
        assert b * ratio - 1e-9 <= last - axis.target_start < b * ratio + 1 + 1e-9
    assert resampling.target_box(resampling.source) == resampling.target


@given(SHAPES, FACTORS, st.tuples(ORDERS, ORDERS, ORDERS), st.data())
def test_no_box_needs_more_than_is_projected(shape, factors, orders, data):
    resampling = a_resampling(shape, factors, (0, 0, 0), orders)
    for axis in resampling.axes:
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, axis.target_length - 1)] * 2)))
        first, last = axis.source_interval(axis.target_start + a, axis.target_start + b + 1)
        assert last - first <= axis.source_length(b + 1 - a)
        lengths = axis.source_length(np.array([b + 1 - a, 1]))
        assert lengths[0] == axis.source_length(b + 1 - a)


def test_a_grid_of_another_voxel_size_covers_the_same_space():
    grid = Grid(BoundingBox((3, 0, -8), (13, 1001, 12)), (40.0, 4.0, 4.0), (0.25, 0.0, 0.0))
    other = grid.with_voxel_size((20.0, 8.0, 8.0))
    # 1001 voxels of 4 nm are 500.5 of 8: halves are rounded to even, and 500 voxels are 8.008 nm.
    assert other.bounds.shape == (20, 500, 10)
    assert other.bounds.start == (7, 0, -4)
    assert other.rest == (-0.5, 0.0, 0.0)
    assert other.voxel_size_nm == (20.0, 4004 / 500, 8.0)
    assert grid.with_voxel_size((41.0, 4.001, 4.0)) == grid
    assert grid.with_voxel_size((1e9, 4.0, 4.0)).bounds.shape == (1, 1001, 20)


@pytest.mark.parametrize(
    ("size", "other"), [(1e300, 4.0), (4.0, 1e-12), (0.0, 4.0), (4.0, 0.0), (float("nan"), 4.0)]
)
def test_voxels_that_cannot_be_counted_are_refused(size, other):
    grid = Grid(BoundingBox((0, 0, 0), (4, 4, 4)), (8.0, size, 8.0), (0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="cannot be made into voxels"):
        grid.with_voxel_size((8.0, other, 8.0))


@pytest.mark.parametrize(
    ("size", "other", "separate_z", "axis"),
    [
        ((40.0, 4.0, 4.0), (8.0, 8.0, 8.0), "auto", 0),
        ((8.0, 8.0, 8.0), (4.0, 40.0, 4.0), "auto", 1),
        ((12.0, 4.0, 4.0), (8.0, 8.0, 8.0), "auto", None),  # three times is not more than that
        ((40.0, 40.0, 4.0), (8.0, 8.0, 8.0), "auto", None),  # two are longest
        ((40.0, 4.0, 4.0), (8.0, 8.0, 8.0), False, None),
        ((5.0, 4.0, 4.0), (8.0, 8.0, 8.0), True, 0),
        ((4.0, 4.0, 4.0), (8.0, 1.0, 1.0), True, None),
    ],
)
def test_the_coarse_axis_is_that_of_nnunet(size, other, separate_z, axis):
    assert coarse_axis(size, other, separate_z) == axis
    box = BoundingBox((0, 0, 0), (4, 4, 4))
    rest = (0.0, 0.0, 0.0)
    resampling = make_resampling(Grid(box, size, rest), Grid(box, other, rest), 3, axis)
    assert resampling.orders == tuple(0 if k == axis else 3 for k in range(3))
