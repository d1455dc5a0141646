"""The table of hostile cases, rows.txt, names a home for each, and that is there."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COUNT = 470


def homes() -> dict[str, set[int]]:
    """The rows of each home: a test as ``file::name``, or a program."""
    lines = (Path(__file__).parent / "rows.txt").read_text().splitlines()
    words = [line.split() for line in lines if not line.startswith("#")]
    return {home: set(map(int, rows)) for home, *rows in words}


def test_each_row_has_a_home():
    assert set().union(*homes().values()) == set(range(1, COUNT + 1))


def test_the_homes_are_there():
    names_by_file = defaultdict[str, set[str]](set)
    for home in homes():
        file, _, name = home.partition("::")
        names_by_file[file].update({name} if name else ())
    for file, names in names_by_file.items():
        tree = ast.parse((REPOSITORY / file).read_text())
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert names <= found, file
