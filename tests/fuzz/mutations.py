"""Contents that are nearly sound: of bytes changed anywhere, and of values changed in JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

HOSTILE_VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2, 3, 255, 2**31, 2**32, 2**40 + 1, 2**63, 2**64, -(2**63)),
    *(10**5000, 0.0, -0.0, 0.5, 1e-320, 1e300, float("inf"), float("nan")),
    *("", " ", "a", "0", "../outside.raw", "/etc/passwd", "x" * 5000, "\x1b[2J", "\0", "\ud800"),
    *("file:///etc/passwd", "s3://a:planted-5ecret@b/c", "uint8", "1x1x1", "%2e%2e", "…", "é"),
    *([], {}, [[]], [None], [1], [1, 1, 1], [-1, 0, 1], ["a"], {"": 1}, {"a": {}}, [0] * 1000),
)
"""Values that stand where others are expected."""

_INTEGERS = (b"\0" * 4, b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\0\1")
_TEXTS = (b"-1", b"0", b"1e999", b"99999999999999999999", b"nan", b"\0", b"\xff\xfe", b"[" * 200)


def hostile_contents(seeds: Sequence[bytes], words: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Contents made of sound ones.

    Args:
        seeds: the sound ones.
        words: texts to put into them.
    """
    ways = [_changed_bytes(seeds, words)]
    for load, dump in ((json.loads, _dump_json), (yaml.safe_load, _dump_yaml)):
        values = [value for seed in seeds if isinstance(value := _try(load, seed), dict | list)]
        if values:
            ways.append(_changed_values(values, dump))
            break
    return st.one_of(ways)


def _try(load: Callable[[bytes], Any], seed: bytes) -> Any:
    try:
        return load(seed)
    except (ValueError, yaml.YAMLError):
        return None


def _dump_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _dump_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value).encode(errors="surrogatepass")


@st.composite
def _changed_bytes(draw: DrawFn, seeds: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    content = bytearray(draw(st.sampled_from(seeds)))
    pieces = st.sampled_from([*words, *_TEXTS, *_INTEGERS]) | st.binary(max_size=8)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(("set", "insert", "delete", "cut", "repeat", "splice")))
        if kind == "cut":
            del content[start:]
        elif kind == "delete":
            del content[start : start + draw(st.integers(1, 40))]
        elif kind == "repeat":
            stop = start + draw(st.integers(1, 40))
            content[start:start] = content[start:stop] * draw(st.integers(1, 50))
        elif kind == "splice":
            other = draw(st.sampled_from(seeds))
            content[start:] = other[draw(st.integers(0, len(other))) :]
        else:
            piece = draw(pieces)
            content[start : start + (len(piece) if kind == "set" else 0)] = piece
    return bytes(content)


@st.composite
def _changed_values(draw: DrawFn, values: Sequence[Any], dump: Callable[[Any], bytes]) -> bytes:
    value = copy.deepcopy(draw(st.sampled_from(values)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from((*["replace", "resemble"] * 2, "delete", "add", "wrap")))
        if kind == "replace":
            container[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE_VALUES)))
        elif kind == "resemble":
            alike = _alike(container[key], [each[name] for each, name in places])
            container[key] = copy.deepcopy(draw(st.sampled_from(alike)))
        elif kind == "delete":
            del container[key]
        elif kind == "wrap":
            container[key] = [container[key]]
        elif isinstance(container, dict):
            name = draw(st.sampled_from([str(each) for _, each in places]) | st.text(max_size=5))
            container[name] = copy.deepcopy(draw(st.sampled_from(HOSTILE_VALUES)))
        else:
            container.append(copy.deepcopy(container[key]))
    try:
        return dump(value)
    except (ValueError, yaml.YAMLError):  # integers of 5000 digits, which Python does not print
        return b"{"


def _alike(value: Any, others: Sequence[Any]) -> list[Any]:
    """Values that may stand in a value's place, and mean something else there."""
    alike = [other for other in others if type(other) is type(value)]
    if isinstance(value, int | float) and not isinstance(value, bool):
        alike += [value + 1, value - 1, -value, 2 * value, value / 2 if value < 2**64 else 0]
    return alike


def _places(value: Any) -> Any:
    """Each value inside a value: the container, and its key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)
