"""Pickles are followed without making anything of them."""

import pickle
import random
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.models.pickle_bounds import (
    DEEPEST,
    LATIN1,
    METADATA,
    NotFollowed,
    PickleOutOfBounds,
    check_pickle,
)

KEYS = st.integers(1 - (1 << 60), (1 << 60) - 1) | st.text(max_size=9) | st.none() | st.booleans()
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_ordinary_values_are_within_bounds(value):
    followed = check_pickle(pickle.dumps(value, protocol=2))
    assert set(followed.names) <= {"collections OrderedDict", "_codecs encode", "__builtin__ bytes"}


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


@pytest.mark.parametrize("protocol", [1, 2, 3])
@pytest.mark.parametrize(
    "value",
    [{1 << 60: 0}, {0: 0, -(1 << 60): 0}, {(): 0}, {0.5: 0}, {b"": 0}, {"a": {(1, 2): 3}}],
    ids=str,
)
def test_keys_whose_hashes_could_be_equal_are_refused(value, protocol):
    with pytest.raises(PickleOutOfBounds, match="keys other than texts"):
        check_pickle(pickle.dumps(value, protocol=protocol))


def test_a_value_that_refers_twice_to_another_on_sixty_levels_is_refused():
    with pytest.raises(PickleOutOfBounds, match="holds more than 16,777,216 values"):
        check_pickle(b"\x80\x02)q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b".")


def test_what_is_called_and_filled_is_told():
    value = OrderedDict(a=1)
    value._metadata = {}
    followed = check_pickle(pickle.dumps([value, b"\x80", Path("a")], protocol=2))
    assert [call.name for call in followed.calls] == [
        "collections OrderedDict",
        "_codecs encode",
        "pathlib PosixPath",
    ]
    assert followed.calls[1].arguments.parts[1] is LATIN1
    assert [name for name, _ in followed.filled] == ["collections OrderedDict()"]
    assert followed.filled[0][1].parts[0] is METADATA


def test_objects_of_old_classes_are_calls():
    assert check_pickle(b"(imodule\nname\n.").calls[0].name == "new module name"
    assert check_pickle(b"(cmodule\nname\no.").calls[0].name == "new module name"
    assert check_pickle(b"cmodule\nname\n)\x81.").calls[0].name == "new module name"
    assert check_pickle(b"K\x01)R.").calls[0].name == ""
