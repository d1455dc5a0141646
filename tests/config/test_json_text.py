"""JSON that cannot be parsed."""

import pytest

from beam_inference.config.json_text import parse_json


def test_values():
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, b"\xff\xfe\xfd", "1" * 5000])
def test_what_cannot_be_parsed(text):
    with pytest.raises(ValueError, match="."):
        parse_json(text)
