"""Tries hostile contents on every parser for a given time, and prints what came of it.

python -m fuzz.run --seconds 3600        (with tests/ on the path; make fuzz does it)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz.engines import Tally, read_tally
from fuzz.parsers import PARSERS

START_SECONDS = 240.0
"""How long a process may take besides trying: to start, and over its last content."""

REPOSITORY = Path(__file__).parents[2]


def run_engine(engine: str, parser: str, seconds: float, seed: int, found: Path) -> Tally:
    """Let one engine try contents on one parser, in a process of its own.

    Args:
        engine: "hypothesis" or "atheris".
        parser: name of the parser.
        seconds: how long.
        seed: of all random choices.
        found: folder for contents that violate the property.

    Returns:
        What came of it. A process that ended before its time is a violation, too.
    """
    tally = Tally()
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(5):
            report = Path(folder) / f"{attempt}.json"
            left = max(1.0, deadline - time.monotonic())
            end = _run_child(engine, parser, left, seed + attempt, report, found)
            tally.add(read_tally(report))
            if end is None:
                break
            tally.found[f"the process ended: {end[-300:]}"] = end[-300:]
            if time.monotonic() > deadline:
                break
    return tally


def _run_child(
    engine: str, parser: str, seconds: float, seed: int, report: Path, found: Path
) -> str | None:
    """Run the process; returns the end of what it printed if it ended by anything but time."""
    command = [
        *(sys.executable, "-m", "fuzz.engines", engine, parser, f"--seconds={seconds}"),
        *(f"--seed={seed}", f"--report={report}", f"--found={found}"),
    ]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            capture_output=True,
            timeout=seconds + START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it did not end"
    if done.returncode == 0:
        return None
    return f"{done.returncode}: {done.stderr.decode(errors='replace')}"


def table_line(parser: str, tally: Tally) -> str:
    """One line of the table of results."""
    kinds = ", ".join(f"{name} {count:,}" for name, count in tally.kinds.most_common())
    return f"{parser:26} {tally.tried:>9,} {tally.slowest:7.2f} s {len(tally.found):>3}  {kinds}"


def run_all(
    seconds: float, seed: int, engines: Sequence[str], parsers: Sequence[str], found: Path
) -> int:
    """Try contents on parsers with engines, as long as given in all; print a table.

    Returns:
        An exit code: 1 if something was found.
    """
    found.mkdir(parents=True, exist_ok=True)
    share = seconds / (len(parsers) * len(engines))
    print(f"{'parser':26} {'tried':>9} {'slowest':>9} found  outcomes; seed {seed}", flush=True)
    total = Tally()
    for parser in parsers:
        tally = Tally()
        for engine in engines:
            tally.add(run_engine(engine, parser, share, seed, found))
        print(table_line(parser, tally), flush=True)
        for where in tally.found.values():
            print(f"    {where}", flush=True)
        total.add(tally)
    print(table_line("all", total))
    if total.found:
        print(f"Contents that were found lie in {found}.")
    return 1 if total.found else 0


def main() -> int:
    """Run the command."""
    names = [parser.name for parser in PARSERS]
    has_atheris = importlib.util.find_spec("atheris") is not None
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=600.0)
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    arguments.add_argument("--engine", choices=("hypothesis", "atheris"))
    arguments.add_argument("--parser", choices=names, action="append")
    arguments.add_argument("--found", type=Path, default=REPOSITORY / "build" / "fuzz")
    options = arguments.parse_args()
    engines = [options.engine] if options.engine else ["hypothesis"]
    if has_atheris and not options.engine:
        engines.append("atheris")
    return run_all(options.seconds, options.seed, engines, options.parser or names, options.found)


if __name__ == "__main__":
    sys.exit(main())
