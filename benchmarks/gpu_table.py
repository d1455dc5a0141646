"""The results of ``make bench-gpu`` as a table: a row for each figure, a column for each card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_ABOUT = ("machine", "cut", "failed", "seconds")
"""Keys of results that are no section."""


def tabulate(cards: Sequence[dict[str, Any]]) -> str:
    """Results of several cards in Markdown, rows in the order of the card that has most of them."""
    columns = [_figures(results) for results in cards]
    rows = dict.fromkeys(row for column in sorted(columns, key=len, reverse=True) for row in column)
    names = [f"{card['machine']['gpu']}, torch {card['machine']['torch']}" for card in cards]
    lines = [_line("", names), _line("---", ["---"] * len(cards))]
    lines += [_line(row, [column.get(row, "") for column in columns]) for row in rows]
    return "\n".join(lines)


def _figures(results: dict[str, Any]) -> dict[str, str]:
    """Every figure by the way to it, and what was left out or failed."""
    sections = {name: value for name, value in results.items() if name not in _ABOUT}
    figures = {"seconds that the measuring took": str(results["seconds"])}
    figures |= _flatten(sections)
    for name, what in results["cut"].items():
        figures[f"{name}, left out for want of time"] = "; ".join(what)
    for name, error in results["failed"].items():
        figures[f"{name}, **failed**"] = " ".join(error.split())
    return figures


def _flatten(values: dict[str, Any], before: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{before}, {key}" if before else key
        flat |= _flatten(value, name) if isinstance(value, dict) else {name: str(value)}
    return flat


def _line(first: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join((first, *cells))} |"
