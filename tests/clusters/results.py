"""Seconds and outcomes of what was run on real clusters, kept and shown in the documentation."""

from __future__ import annotations

import json
import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FILE = _ROOT / "benchmarks" / "results" / "engines.json"
_PAGE = _ROOT / "docs" / "flink-spark.md"
_BEGIN = "<!-- written by make flink-test and make spark-test -->\n"
_END = "<!-- end -->\n"


def keep_result(engine: str, row: str, seconds: float, outcome: str) -> None:
    """Keep one result and write the page's table anew, where KEEP_RESULTS is set.

    Args:
        engine: such as "Flink 1.19.3, two hosts".
        row: what was run.
        seconds: how long it took, from start to end.
        outcome: what came of it.
    """
    if not os.environ.get("KEEP_RESULTS"):
        return
    found: dict[str, dict[str, str]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    found.setdefault(row, {})[engine] = f"{outcome}, {seconds:.0f} s"
    _FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    page = _PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    _PAGE.write_text(f"{before}{_BEGIN}{table_of(found)}{_END}{after}")


def table_of(results: dict[str, dict[str, str]]) -> str:
    """The results as a table in Markdown, one column for each engine."""
    engines = sorted({engine for row in results.values() for engine in row})
    lines = [f"| | {' | '.join(engines)} |", f"|---|{'---|' * len(engines)}"]
    for row, cells in results.items():
        lines.append(f"| {row} | {' | '.join(cells.get(e, '') for e in engines)} |")
    return "\n".join(lines) + "\n"
