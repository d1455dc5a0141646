"""Pickles are followed without making anything of them."""

import io
import pickle
import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.models.pickle_bounds import (
    DEEPEST,
    NotFollowed,
    PickleOutOfBounds,
    check_pickle,
    check_saved,
)

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_ordinary_values_are_within_bounds(value):
    names = check_pickle(pickle.dumps(value, protocol=2))
    assert set(names) <= {"collections OrderedDict", "_codecs encode", "__builtin__ bytes"}


def nested(levels):
    value = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_levels_are_counted():
    check_pickle(pickle.dumps(nested(DEEPEST), protocol=2))
    with pytest.raises(PickleOutOfBounds, match=f"more than {DEEPEST} levels"):
        check_pickle(pickle.dumps(nested(DEEPEST + 1), protocol=2))


def test_levels_are_counted_whatever_the_order_in_which_containers_are_filled():
    containers = [f"]q{chr(n)}".encode() for n in range(120)]
    order = random.Random(0).sample(range(119), 119)
    fills = [b"h" + bytes([n]) + b"h" + bytes([n + 1]) + b"a0" for n in order]
    with pytest.raises(PickleOutOfBounds, match=f"more than {DEEPEST} levels"):
        check_pickle(b"\x80\x02" + b"".join(containers) + b"".join(fills) + b".")


@pytest.mark.parametrize("content", [b"]q\x00h\x00a.", b"]q\x00]q\x01h\x00a0h\x00h\x01a."])
def test_a_value_that_holds_itself_is_refused(content):
    with pytest.raises(PickleOutOfBounds, match="holds itself"):
        check_pickle(content)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        b"\x80\x02h\x07.",
        b"\x80\x02a.",
        b"(q\x00.",
        b"\x80\x02K\x01K\x01a.",
        pickle.dumps(OrderedDict(), protocol=4),
    ],
)
def test_what_is_no_pickle_of_pytorch_s_is_not_followed(content):
    with pytest.raises(NotFollowed):
        check_pickle(content)
    with pytest.raises(NotFollowed):
        check_saved(io.BytesIO(content))
