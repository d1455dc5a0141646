"""Where a volume's index zero lies: whole voxels, and the rest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import NO_REST, Origin, origin_at, pad_to_zero

COORDINATE = st.integers(-(2**40), 2**40)


@given(st.tuples(*[COORDINATE] * 3), st.floats(-9e-4, 9e-4))
def test_a_rounded_position_is_whole(voxel, error):
    z, y, x = (n + error if abs(n) < 2**40 else n for n in voxel)
    assert origin_at((z, y, x)) == Origin(voxel)


@given(st.tuples(*[st.floats(-1e9, 1e9)] * 3))
def test_whole_and_rest_make_up_the_position(position):
    origin = origin_at(position)
    for coordinate, whole, rest in zip(position, origin.voxel, origin.rest, strict=True):
        assert -0.5 <= rest <= 0.5
        assert abs(whole + rest - coordinate) <= 1e-3


@pytest.mark.parametrize("coordinate", [math.nan, math.inf, -math.inf, 2.0**41, -(2.0**41)])
def test_what_cannot_be_counted_is_refused(coordinate):
    with pytest.raises(ValueError, match="cannot begin at the voxel"):
        origin_at((0, coordinate, 0))


def test_half_a_voxel_belongs_to_the_next():
    assert origin_at((0.5, -0.5, 1.25)) == Origin((1, 0, 1), (-0.5, -0.5, 0.25))
    assert origin_at((3, 0, -7)) == Origin((3, 0, -7), NO_REST)


def test_a_box_is_padded_to_voxel_zero_if_it_lies_beyond():
    assert pad_to_zero(BoundingBox((1, 0, 3), (2, 4, 5))) == BoundingBox((0, 0, 0), (2, 4, 5))
    assert pad_to_zero(BoundingBox((1, -1, 3), (2, 4, 5))) is None
