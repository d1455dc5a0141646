"""Text and values of others in messages: clean, short, and soon at hand."""

import time

import pytest

from beam_inference.errors import BeamInferenceError, ChunkFault
from beam_inference.foreign_text import (
    clean_text,
    describe_error,
    escape_controls,
    holds_credentials,
    remove_colours,
    shorten_text,
    shorten_value,
)

SECRETS = [
    "https://user:planted@host/em",
    "https://user:plan/planted@host/em",
    "https://user:p@planted@host/em",
    "https://planted@host/em",
    "https://host/em?X-Amz-Signature=planted&x=1",
    "https://host/em#token=planted",
    "https://host/em#access_token=planted",
    "https://user%3Aplanted@host/em",
    "https://user:planted%40host/em",
    "https://user%253Aplanted%2540host/em",
    "https://host/em%3Ftoken%3Dplanted",
    "https://host/em%253Ftoken%253Dplanted",
    "https://host/em%25253Ftoken%25253Dplanted",
    "https://user%20name:planted@host/em",
    "https://user:p@x@planted@host/em",
    "https://user:p%40x%40planted%40host/em",
    "https://user:p@x/planted@host/em",
    "https://user:x\u2028planted@host/em",
    "https://host/em?token=x\x85planted",
]
TRACED = """The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__/net.py", line 14, in forward
    return (_2).forward(input1, )
            ~~~~~~~~~~~ <--- HERE

Traceback of TorchScript (most recent call last):
/home/net.py(730): forward
RuntimeError: expected 1: found 2
"""
PLAIN = [
    "http://localhost:8080/a@b",
    "gs://bucket/net.py:factory",
    "the key 'mask' is unknown; did you mean 'mask'? A note of 3 @ 5 nm = 15",
    "/data/100%/em",
    "https://host/em?version=3#part",
    "line one\nline two\tend",
    "µm, 40 × 4 × 4, ä, 電子",
]


@pytest.mark.parametrize("text", SECRETS)
def test_credentials_are_found_and_removed_wherever_they_stand(text):
    assert holds_credentials(text)
    for sentence in (text, f"cannot read '{text}': no answer", f'{{"url":"{text}"}}'):
        assert "planted" not in clean_text(sentence)
        assert clean_text(clean_text(sentence)) == clean_text(sentence)
    assert "planted" not in shorten_value({"a": [text], text: 1})
    assert "planted" not in shorten_text(text)
    assert "planted" not in str(BeamInferenceError(f"cannot open {text}"))


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer planted-abc.def",
        "password=planted",
        "AWS_SECRET_ACCESS_KEY=planted",
        "--set=storage.s3.secret_key=planted",
        "access_key=planted",
        "passw%6Frd=x%0Aplanted",
        "password=x\x85planted",
        "https://u:p%40bearer planted-abc",
    ],
)
def test_credentials_outside_of_urls_are_removed(text):
    assert "planted" not in clean_text(f"it failed with {text}")


@pytest.mark.parametrize("text", PLAIN)
def test_other_text_stays_as_it_is(text):
    assert clean_text(text) == text
    assert not holds_credentials(text)


def test_control_characters_are_written_out():
    assert escape_controls("a\x1b[2Jb\x9b\r\u202e\udcff\x00") == (
        r"a\x1b[2Jb\x9b\r\u202e\udcff\x00"
    )
    assert escape_controls("a\nb\tc") == "a\nb\tc"


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, ["a"] * 10**6, {str(n): n for n in range(10**5)}, 10**100_000, b"\x00" * 10**6],
    ids=["string", "list", "mapping", "integer", "bytes"],
)
def test_large_values_are_short(value):
    start = time.process_time()
    assert len(shorten_value(value)) <= 220
    assert time.process_time() - start < 20


def test_values_that_repeat_themselves_are_short():
    value = ["lol"] * 9
    for _ in range(50):
        value = [value] * 9
    assert len(shorten_value(value)) <= 220
    value = {}
    value["self"] = value
    assert len(shorten_value(value)) <= 220


def test_small_values_are_shown_as_they_are():
    for value in (1, 2.5, None, "a", [1, 2, 3], {"a": [1], "b": "c"}, -(2**100)):
        assert shorten_value(value) == repr(value)
    assert shorten_value({"secret": "planted"}) == "{'secret': …}"


@pytest.mark.parametrize(
    "text", ["://:" * 10**6, "?a" * 10**6, "%25" * 10**6, "token=" * 10**6], ids=len
)
def test_no_text_takes_long(text):
    start = time.process_time()
    clean_text(text)
    assert time.process_time() - start < 20


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def test_colours_of_a_library_are_left_out():
    assert remove_colours("\x1b[96mThis is step\x1b[0m 3/3") == "This is step 3/3"
    assert remove_colours("\x1b[2J") == "\x1b[2J"


def test_errors_of_others_become_one_clean_line():
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert describe_error(ValueError("a"), with_type=False) == "a"
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(Unspeakable()) == "Unspeakable"
    assert describe_error(ValueError("\x1b[2J")) == r"ValueError: \x1b[2J"
    assert describe_error(ValueError(TRACED)) == "ValueError: expected 1: found 2"
    assert "Traceback of" in describe_error(ValueError(TRACED.partition("Runtime")[0]))
    assert len(describe_error(ValueError("x" * 10**6))) < 600


def test_every_error_of_ours_is_clean():
    assert str(ChunkFault("\x1b]0;title\x07", "infer", 1)) == r"\x1b]0;title\x07"
