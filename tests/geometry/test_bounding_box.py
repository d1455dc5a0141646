import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox, grown_shape

coordinates = st.tuples(*[st.integers(-6, 6)] * 3)
shapes = st.tuples(*[st.integers(0, 6)] * 3)


@st.composite
def boxes(draw):
    start = draw(coordinates)
    shape = draw(shapes)
    return BoundingBox(start, tuple(a + n for a, n in zip(start, shape, strict=True)))


def cube(start, stop):
    return BoundingBox((start,) * 3, (stop,) * 3)


def voxels(box):
    z0, y0, x0 = box.start
    z1, y1, x1 = box.stop
    return {(z, y, x) for z in range(z0, z1) for y in range(y0, y1) for x in range(x0, x1)}


@given(boxes(), boxes())
def test_intersection_contains_and_size_agree_with_voxel_sets(a, b):
    assert voxels(a.intersection(b)) == voxels(a) & voxels(b)
    assert a.size == len(voxels(a))
    if voxels(b):
        assert a.contains(b) == (voxels(b) <= voxels(a))


@given(boxes(), shapes)
def test_growing_adds_the_margin_on_both_sides(box, margin):
    grown = box.grow(margin)
    assert grown.shape == tuple(n + 2 * m for n, m in zip(box.shape, margin, strict=True))
    assert grown.contains(box)
    assert grown_shape(box.shape, margin) == grown.shape


def test_slices_are_relative_to_the_frame():
    frame = BoundingBox((-5, 0, 10), (5, 10, 20))
    assert BoundingBox((-5, 1, 12), (0, 2, 20)).slices_in(frame) == (
        slice(0, 5),
        slice(1, 2),
        slice(2, 10),
    )


def test_slices_outside_the_frame_are_refused():
    with pytest.raises(ValueError, match="is not inside"):
        BoundingBox((-1, 0, 0), (2, 2, 2)).slices_in(BoundingBox((0, 0, 0), (4, 4, 4)))


def test_a_box_that_stops_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="cannot stop"):
        BoundingBox((0, 0, 5), (1, 1, 4))


def test_a_short_box_grows_at_its_stop_then_its_start_then_beyond_on_both_sides():
    within = cube(0, 20)
    assert cube(4, 9).grow_to((8, 8, 8), within) == cube(4, 12)
    assert cube(15, 20).grow_to((8, 8, 8), within) == cube(12, 20)
    assert cube(14, 19).grow_to((8, 8, 8), within) == cube(12, 20)
    assert cube(5, 9).grow_to((30, 30, 30), within) == cube(-5, 25)
    assert cube(5, 9).grow_to((25, 25, 25), within) == cube(-2, 23)


@given(boxes(), coordinates)
def test_translate_moves_every_voxel(box, by):
    expected = {(z + by[0], y + by[1], x + by[2]) for z, y, x in voxels(box)}
    assert voxels(box.translate(by)) == expected
    assert box.translate(by).shape == box.shape


@given(boxes(), st.tuples(*[st.integers(1, 4)] * 3))
def test_coarsen_holds_the_cells_that_have_a_voxel_in_the_box(box, factor):
    expected = {tuple(n // f for n, f in zip(v, factor, strict=True)) for v in voxels(box)}
    coarse = box.coarsen(factor)
    if box.size:
        assert voxels(coarse) == expected
        assert coarse.refine(factor).contains(box)


@given(boxes(), st.tuples(*[st.integers(1, 4)] * 3))
def test_refine_holds_the_voxels_of_every_cell(box, factor):
    fine = box.refine(factor)
    assert fine.size == box.size * factor[0] * factor[1] * factor[2]
    assert fine.coarsen(factor) == box
