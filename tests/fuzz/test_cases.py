"""Contents that once broke a parser, and the sound ones that the others are made of."""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path

import pytest

from beam_inference.errors import VolumeError
from fuzz.parsers import PARSERS, parser_of
from fuzz.property import OUTSIDE_NAME, SECRET, Case, Parser, Violation

CASES = Path(__file__).parent / "cases"

# a command shows them too, before its message; they are not what is tested here
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=str(path.relative_to(CASES))) for path in sorted(CASES.glob("*/*"))],
)
def test_found_cases_stay_mended(path, tmp_path):
    Case(tmp_path).attempt(parser_of(path.parent.name), path.read_bytes())


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_sound_contents_are_read(parser, tmp_path):
    case = Case(tmp_path)
    kinds = [case.attempt(parser, seed).kind for seed in parser.seeds()]
    assert "answer" in kinds or parser.name == "job-file-with-a-secret"


def test_names_of_parsers_are_folders():
    names = [parser.name for parser in PARSERS]
    assert len(set(names)) == len(names)
    assert {path.name for path in CASES.iterdir()} <= set(names)


def read_outside(content: bytes, folder: Path) -> object:
    (folder.parent / OUTSIDE_NAME).read_bytes()
    raise VolumeError("no")


def write_outside(content: bytes, folder: Path) -> object:
    (folder.parent / "other").write_bytes(content)


def refuse(message: str):
    def parse(content: bytes, folder: Path) -> object:
        raise VolumeError(message)

    return parse


def burn_time(content: bytes, folder: Path) -> object:
    stop = time.process_time() + 5.1
    while time.process_time() < stop:
        pass


def run_program(content: bytes, folder: Path) -> object:
    subprocess.run(["true"], check=True)


def refuse_at_length(content: bytes, folder: Path) -> object:
    error = VolumeError("no")
    error.args = ("a" * 20_000,)  # as if it had not been shortened
    raise error


def crash(content: bytes, folder: Path) -> object:
    raise KeyError("a")


@pytest.mark.parametrize(
    ("parse", "what"),
    [
        (read_outside, "outside"),
        (write_outside, "outside"),
        (refuse(f"no {SECRET}"), "secret"),
        (refuse(" "), "characters"),
        (refuse_at_length, "characters"),
        (lambda content, folder: SECRET, "secret"),
        (run_program, "touched subprocess"),
        (crash, "KeyError at test_cases.py"),
        pytest.param(burn_time, "took", marks=pytest.mark.slow),
    ],
)
def test_violations_are_noticed(parse, what, tmp_path):
    with pytest.raises(Violation, match=what):
        Case(tmp_path).attempt(Parser("a", list, parse), b"a")
