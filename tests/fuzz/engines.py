"""Two ways to try many contents on a parser: hypothesis, and libFuzzer by way of atheris.

Each runs in a process of its own, which a defect in a library may end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.property import Case, Parser, Violation, limit_memory

NATIVE_SECONDS = 20
"""How long libFuzzer lets a content take, by the clock; machines of tests are busy."""

_INSTRUMENTED = ["beam_inference", "nrrd", "nibabel", "mrcfile", "tifffile", "yaml", "zipfile"]


@dataclass
class Tally:
    """What became of the contents that a parser was given.

    Attributes:
        tried: how many they were.
        kinds: how many got an answer, and how many were refused, by class of error.
        slowest: seconds of the slowest.
        found: messages of violations, each with the name of a file that has the content.
    """

    tried: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    found: dict[str, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Count another tally of the same parser in."""
        self.tried += other.tried
        self.kinds.update(other.kinds)
        self.slowest = max(self.slowest, other.slowest)
        self.found |= other.found


def read_tally(path: Path) -> Tally:
    """Read a tally that a process wrote; an empty one if there is none."""
    if not path.exists():
        return Tally()
    values = json.loads(path.read_text())
    return Tally(**values | {"kinds": Counter(values["kinds"])})


class Attempts:
    """Tries contents on a parser, and keeps a tally and the contents that violate.

    Args:
        parser: the parser.
        root: an empty folder to try them in.
        found: a folder for contents.
    """

    def __init__(self, parser: Parser, root: Path, found: Path) -> None:
        self.tally = Tally()
        self._parser = parser
        self._case = Case(root)
        self._found = found

    def __call__(self, content: bytes) -> None:
        """Try one content."""
        self.tally.tried += 1
        try:
            outcome = self._case.attempt(self._parser, content)
        except Violation as violation:
            self._keep(content, str(violation))
            return
        self.tally.kinds[outcome.kind] += 1
        self.tally.slowest = max(self.tally.slowest, outcome.seconds)

    def _keep(self, content: bytes, message: str) -> None:
        """Keep the shortest content for each kind of message."""
        self.tally.kinds["violation"] += 1
        key = message.partition(": ")[0][:120]
        path = self._found / f"{self._parser.name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
        if key not in self.tally.found or len(content) < path.stat().st_size:
            path.write_bytes(content)
            self.tally.found[key] = f"{path.name}: {message[:300]}"


def try_with_hypothesis(parser: Parser, attempts: Attempts, seconds: float, seed: int) -> None:
    """Try contents that Hypothesis draws, for some seconds."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed

    from fuzz.mutations import hostile_contents

    seeds = parser.seeds()
    for content in seeds:
        attempts(content)
    # only now: the first content waits for what is imported where it is used
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:

        @with_seed(seed)
        @settings(
            max_examples=50,  # drawing goes on after the deadline
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(hostile_contents(seeds, parser.words))
        def attempt(content: bytes) -> None:
            if time.monotonic() < deadline:
                attempts(content)

        attempt()
        seed += 1


def try_with_atheris(
    parser: Parser, attempts: Attempts, seconds: float, seed: int, report: Path, found: Path
) -> None:
    """Try contents that libFuzzer makes, guided by coverage; ends the process."""
    import atheris

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        seeds = parser.seeds()
        for number, content in enumerate(seeds):
            (folder / "corpus" / str(number)).write_bytes(content)
        words = "".join(
            '"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in parser.words
        )
        # libFuzzer refuses an empty dictionary
        (folder / "words").write_text(words or '"a"\n')
        with atheris.instrument_imports(include=_INSTRUMENTED):
            for content in seeds:
                attempts(content)
        written = time.monotonic()

        def attempt(content: bytes) -> None:
            nonlocal written
            attempts(content)
            if time.monotonic() > written + 0.5:
                written = time.monotonic()
                _write(report, attempts.tally)

        atheris.Setup(
            [
                sys.argv[0],
                f"-max_total_time={int(seconds)}",
                f"-seed={seed + 1}",
                f"-timeout={NATIVE_SECONDS}",
                "-rss_limit_mb=0",
                f"-max_len={max(4096, 2 * max(map(len, seeds)))}",
                f"-dict={folder / 'words'}",
                f"-artifact_prefix={found}/{parser.name}-native-",
                "-verbosity=0",
                str(folder / "corpus"),
            ],
            attempt,
        )
        atheris.Fuzz()


def _write(report: Path, tally: Tally) -> None:
    partial = report.with_suffix(".partial")
    partial.write_text(json.dumps(vars(tally)))
    partial.replace(report)


def run_child(words: Sequence[str]) -> None:
    """Try contents on one parser, and write the tally: the work of a process of its own."""
    options = _options(words)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    # what the engines import besides is not instrumented; what is to be must not be there before
    if options.engine == "atheris":
        import atheris

        with atheris.instrument_imports(include=_INSTRUMENTED):
            from fuzz.parsers import parser_of
    else:
        from fuzz.parsers import parser_of
    parser = parser_of(options.parser)
    limit_memory()
    with tempfile.TemporaryDirectory(dir=_fast_folder()) as root:
        attempts = Attempts(parser, Path(root), options.found)
        if options.engine == "atheris":
            try_with_atheris(
                parser, attempts, options.seconds, options.seed, options.report, options.found
            )
        else:
            try_with_hypothesis(parser, attempts, options.seconds, options.seed)
        _write(options.report, attempts.tally)


def _fast_folder() -> str | None:
    """A folder in memory, where there is one: files of cases are many and short-lived."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _options(words: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("hypothesis", "atheris"))
    parser.add_argument("parser")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--found", type=Path)
    return parser.parse_args(words)


if __name__ == "__main__":
    run_child(sys.argv[1:])
