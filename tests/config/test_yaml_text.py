"""YAML within bounds."""

import pytest

from beam_inference.config.yaml_text import DEEPEST, MOST_CHARACTERS, MOST_VALUES, parse_yaml
from beam_inference.errors import ConfigError


def nested(levels):
    return "[" * levels + "]" * levels


def test_what_lies_within_the_bounds_is_read():
    assert parse_yaml("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}
    assert parse_yaml(f"[{', '.join(['1'] * 1000)}]") == [1] * 1000
    assert parse_yaml("") is None
    assert parse_yaml(nested(DEEPEST))


def repeated(times):
    items = ", ".join(["*a"] * times)
    return f"a: &a [{', '.join(['1'] * 100)}]\nb: [{items}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (nested(DEEPEST + 1), f"more than {DEEPEST} levels"),
        ("a: &a [*a]", "line 1: a value holds itself"),
        ("a: &a {b: *a}", "line 1: a value holds itself"),
        ("a: &a [1]\n" + "b: *a\nb: *a\n", r"'b' is given twice \(line 3\)"),
        ("a: 1\n1152921504606846976: 1", "line 2: 1152921504606846976 is no key"),
        ("-0x1000000000000000: 1", "line 1: -1152921504606846976 is no key"),
        (repeated(MOST_VALUES // 100), f"line 2: it holds more than {MOST_VALUES:,} values"),
        ("#" * (MOST_CHARACTERS + 1), "1,048,577 characters"),
        ("a: " + "9" * 5000, "line 1: a number of 5,000 characters"),
        ("a: 1" + ":10" * 300_000, "line 1: a number of 900,001 characters"),
        ("a: 2001-99-99", "line 1: '2001-99-99' cannot be read as timestamp"),
        ("a: !!bool b", "line 1: 'b' cannot be read as bool"),
        ("a: [", "not valid YAML"),
    ],
)
def test_what_lies_beyond_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text)


def test_chains_of_aliases_count_as_deep():
    text = "".join(f"a{n}: &a{n} [{f'*a{n - 1}' if n else 1}]\n" for n in range(2 * DEEPEST))
    with pytest.raises(ConfigError, match="levels"):
        parse_yaml(text)
