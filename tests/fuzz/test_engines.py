"""A minute of what ``make fuzz`` does, with the engine that needs no extra."""

from __future__ import annotations

import pytest

from fuzz.parsers import PARSERS
from fuzz.run import run_engine

SECONDS = 1.0
"""For each parser; with the start of its process that is about a minute in all."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_hypothesis_finds_nothing(parser, tmp_path):
    tally = run_engine("hypothesis", parser.name, SECONDS, 0, tmp_path)
    assert tally.tried > len(parser.seeds())
    assert not tally.found
