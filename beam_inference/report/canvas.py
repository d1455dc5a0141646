"""Style of all figures, and their conversion from matplotlib to SVG in the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 11.0
"""Width of a figure in inches: that of the page's text."""
INK = "#111213"
MUTED = "#777879"
LINE = "#cfd0d1"
ACCENT = "#2a6fdb"
SECOND = "#d9822b"
ALERT = "#d33f49"
_COLOURS = {
    INK: "ink",
    MUTED: "muted",
    LINE: "line",
    ACCENT: "accent",
    SECOND: "second",
    ALERT: "alert",
}

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "beam-inference",
    "font.size": 8.5,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "figure.facecolor": "none",
    "hatch.color": LINE,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


@contextmanager
def style() -> Iterator[None]:
    """Figures that are made and drawn in here look alike."""
    with matplotlib.rc_context(_STYLE):
        yield


def as_svg(figure: Figure, name: str, description: str) -> str:
    """Convert a figure to SVG for HTML, as wide as its place, with a text alternative.

    Its ids begin with ``name``, which is unique on the page. It names nothing that would be
    fetched.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", text)  # HTML knows
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    view = re.search(r'viewBox="([^"]*)"', text)
    assert view is not None
    opening = f'<svg viewBox="{view[1]}" role="img" aria-label="{description}"'
    return re.sub(r"<svg[^>]*", opening, text, count=1)


def bare(axes: Axes) -> None:
    """No grid: for axes that hold a picture; what it does not cover is hatched."""
    axes.grid(visible=False)
    axes.patch.set(hatch="/////", edgecolor=LINE, facecolor="none", linewidth=0)
    for spine in axes.spines.values():
        spine.set(visible=True, linewidth=0.6)
