"""Errors and exit codes: the documentation's table is the one home, and agrees with the code."""

import re
from pathlib import Path

from beam_inference import errors
from beam_inference.cli.command import EXIT_CODES
from beam_inference.errors import ConfigError

RUNNING = Path(__file__).parents[1] / "docs" / "running.md"


def test_the_table_of_exit_codes_is_that_of_the_code():
    section = RUNNING.read_text().partition("### Exit codes")[2].partition("\n## ")[0]
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    defined = {value for value in vars(errors).values() if isinstance(value, int)}
    assert documented == defined
    assert {int(code) for code in re.findall(r"\b\d+\b", EXIT_CODES)} == defined


def test_messages_are_short_and_keep_their_end():
    message = str(ConfigError("expected " + "x y " * 2_000 + ": mend it"))
    assert len(message) < 7000
    assert message.startswith("expected x y x y")
    assert message.endswith(": mend it")
