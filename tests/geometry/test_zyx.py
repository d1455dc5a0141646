import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry import zyx

numbers = st.integers(-(2**70), 2**70)
units = st.integers(1, 2**70)
threes = st.tuples(*[numbers] * 3)
shapes = st.tuples(*[units] * 3)


@given(numbers, units)
def test_ceil_div_is_the_exact_quotient_rounded_up(dividend, divisor):
    assert zyx.ceil_div(dividend, divisor) == math.ceil(Fraction(dividend, divisor))


@given(numbers, units)
def test_round_up_is_the_least_multiple_that_is_not_less(number, unit):
    rounded = zyx.round_up(number, unit)
    assert rounded % unit == 0
    assert number <= rounded < number + unit


@given(numbers, units)
def test_round_down_is_the_greatest_multiple_that_is_not_greater(number, unit):
    rounded = zyx.round_down(number, unit)
    assert rounded % unit == 0
    assert number - unit < rounded <= number


@given(threes, threes)
def test_each_axis_is_computed_for_itself(a, b):
    axes = range(3)
    assert zyx.add(a, b) == tuple(a[k] + b[k] for k in axes)
    assert zyx.subtract(a, b) == tuple(a[k] - b[k] for k in axes)
    assert zyx.multiply(a, b) == tuple(a[k] * b[k] for k in axes)
    assert zyx.negative(a) == tuple(-a[k] for k in axes)
    assert zyx.minimum(a, b) == tuple(min(a[k], b[k]) for k in axes)
    assert zyx.maximum(a, b) == tuple(max(a[k], b[k]) for k in axes)


@given(threes, shapes)
def test_division_on_each_axis_agrees_with_that_of_numbers(a, unit):
    axes = range(3)
    assert zyx.ceil_div_each(a, unit) == tuple(zyx.ceil_div(a[k], unit[k]) for k in axes)
    assert zyx.round_up_each(a, unit) == tuple(zyx.round_up(a[k], unit[k]) for k in axes)


@given(threes, st.integers(0, 2), numbers)
def test_with_axis_replaces_one_of_three(a, axis, value):
    changed = zyx.with_axis(a, axis, value)
    assert changed[axis] == value
    assert all(changed[k] == a[k] for k in range(3) if k != axis)


@pytest.mark.parametrize("values", [[1, 2], [1, 2, 3, 4]])
def test_a_triple_has_three_values(values):
    with pytest.raises(ValueError, match="unpack"):
        zyx.triple(values)
