"""Which scales a pyramid has, and which voxels a voxel is made of."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.pyramid.scale_geometry import (
    grow_shape,
    isotropic_factor,
    scales_above,
    tiles,
)

boxes = st.tuples(st.tuples(*[st.integers(-20, 20)] * 3), st.tuples(*[st.integers(1, 9)] * 3)).map(
    lambda pair: BoundingBox(pair[0], tuple(a + n for a, n in zip(*pair, strict=True)))
)
factors = st.tuples(*[st.integers(1, 4)] * 3)


def test_voxels_become_isotropic_first():
    bounds = BoundingBox((0, 0, 0), (1000, 8000, 8000))
    levels = scales_above(bounds, (40, 4, 4), (64, 64, 64))
    assert [level.factor for level in levels] == [(1, 2, 2)] * 3 + [(2, 2, 2)] * 4
    assert levels[2].total == (1, 8, 8)
    assert levels[-1].bounds.shape == (63, 63, 63)
    assert [level.name for level in levels][:2] == ["level-1", "level-2"]
    assert isotropic_factor((30, 16, 16), (9, 9, 9)) == (1, 2, 2)
    assert isotropic_factor((30, 24, 24), (9, 9, 9)) == (2, 2, 2)
    assert isotropic_factor((4, 40, 40), (9, 9, 9)) == (2, 1, 1)
    assert isotropic_factor((1.0, 4.0, 4.0), (1, 9, 9)) == (
        1,
        2,
        2,
    ), "a plane has no depth to halve"
    assert isotropic_factor((1.0, 1.0, 1.0), (1, 1, 1)) == (1, 1, 1)


def test_levels_end_where_one_block_holds_the_volume_or_as_told():
    bounds = BoundingBox((3, -5, 2), (43, 65, 52))
    assert scales_above(bounds, (1, 1, 1), (64, 128, 64)) == []
    assert [level.number for level in scales_above(bounds, (1, 1, 1), (64, 128, 64), count=2)] == [
        1,
        2,
    ]
    assert [level.total for level in scales_above(bounds, (1, 1, 1), (64, 16, 16), (1, 3, 2))] == [
        (1, 3, 2),
        (1, 9, 4),
    ]
    assert scales_above(bounds, (1, 1, 1), (16, 16, 16), (1, 1, 1)) == []
    many = scales_above(bounds, (1, 1, 1), (16, 16, 16), count=99)
    assert len(many) < 10
    assert math.prod(many[-1].bounds.shape) <= 8, (
        "an interval around a multiple may stay two voxels long"
    )


@given(boxes, factors)
@settings(deadline=None, max_examples=50)
def test_each_voxel_below_is_in_exactly_one_cell(box, factor):
    above = box.coarsen(factor)
    owners = np.zeros(box.shape, int)
    for cell in tiles(above, (1, 1, 1)):
        voxels = cell.refine(factor).intersection(box)
        assert voxels.size > 0, "no voxel of a level is made of nothing"
        owners[voxels.slices_in(box)] += 1
    assert (owners == 1).all()


@given(boxes, factors, factors)
def test_two_steps_lead_where_one_leads(box, one, two):
    both = tuple(a * b for a, b in zip(one, two, strict=True))
    assert box.coarsen(one).coarsen(two) == box.coarsen(both)


@given(boxes, st.tuples(*[st.integers(1, 8)] * 3), st.integers(1, 5000))
def test_grown_shapes_are_whole_units_that_fit(box, unit, most):
    shape = grow_shape(unit, box.shape, lambda shape: math.prod(shape) <= most)
    assert all((n // u).bit_count() == 1 and n % u == 0 for n, u in zip(shape, unit, strict=True))
    assert shape == unit or math.prod(shape) <= most
    assert all(n < 2 * max(u, m) for n, u, m in zip(shape, unit, box.shape, strict=True))
    covers = all(n >= m for n, m in zip(shape, box.shape, strict=True))
    assert covers or 2 * math.prod(shape) > most
