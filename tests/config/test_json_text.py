"""JSON that cannot be parsed."""

import pytest

from beam_inference.config.json_text import parse_json


def test_values():
    assert parse_json(b'{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, b"\xff\xfe\xfd", "1" * 5000])
def test_what_cannot_be_parsed(text):
    with pytest.raises(ValueError, match="."):
        parse_json(text)


@pytest.mark.parametrize("text", ['"\\ud800"', '{"a": ["\\uDFFF"]}', '{"\\udc00": 1}'])
def test_halves_of_characters_are_refused(text):
    for each in (text, text.encode()):
        with pytest.raises(ValueError, match="halves of characters"):
            parse_json(each)


def test_characters_that_are_written_as_two_halves_are_read():
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"
    assert parse_json('"\\\\ud800"') == "\\ud800", "this is a backslash and letters"
