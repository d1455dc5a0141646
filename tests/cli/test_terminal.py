"""What is printed and logged cannot steer a terminal."""

import io
import json
import logging
import sys
import warnings

import pytest

from beam_inference.cli.logs import configure
from beam_inference.cli.main import main
from beam_inference.cli.terminal import EscapingStream, escape_output, print_to_stderr

HOSTILE = "\x1b]0;title\x07 https://user:planted@host/em"


def test_printed_text_is_escaped(capsys):
    with escape_output():
        print("a\x1b[2Jb\tc")
        print("d", end="", flush=True)
        assert sys.stdout.isatty() is False
    assert capsys.readouterr().out == "a\\x1b[2Jb\tc\nd"


def test_warnings_are_escaped(capsys):
    with escape_output():
        warnings.simplefilter("always")
        warnings.warn("a\x1b[2Jb", stacklevel=1)
    assert "UserWarning: a\\x1b[2Jb" in capsys.readouterr().err


def test_the_stream_behind_answers_everything_else():
    behind = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    stream = EscapingStream(behind)
    assert stream.encoding == "latin-1"
    assert stream.buffer is behind.buffer


@pytest.mark.parametrize("structured", [False, True])
def test_logged_text_is_clean(capsys, structured):
    logging.getLogger().handlers[:] = []
    configure(debug=False, structured=structured)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("beam_inference").exception("it failed: %s", HOSTILE)
    told = capsys.readouterr().err
    assert "planted" not in told
    assert "\x1b" not in told
    assert "ValueError" in told
    if structured:
        assert json.loads(told)["message"].startswith(r"it failed: \x1b]0;title\x07")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("pln", "plan"), ("runn", "run"), ("verfiy", "verify")],
)
def test_a_misspelt_command_is_told_the_nearest_one(capsys, word, meant):
    with pytest.raises(SystemExit, match="2"):
        main([word, "job.yaml"])
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


def test_a_misspelt_choice_is_told_the_nearest_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "job.yaml", "--log_format=jsn"])
    assert "did you mean 'json'?" in capsys.readouterr().err


def test_a_command_unlike_any_other_is_told_all(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["\x1b[2J", "job.yaml"])
    told = capsys.readouterr().err
    assert "choose from" in told
    assert "\x1b" not in told


def test_an_option_takes_no_dashes_for_a_value(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "job.yaml", "--set=--"])
    assert "argument --set: expected a value, found --" in capsys.readouterr().err


def test_what_is_printed_beside_an_object_has_no_control_characters(capsys):
    with print_to_stderr():
        print("a \x1b[31mred\x07 name")
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "a \\x1b[31mred\\x07 name\n"
