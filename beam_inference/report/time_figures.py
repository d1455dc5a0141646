"""Draw throughput over time, and seconds per stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from beam_inference.report.canvas import ACCENT, MUTED, SECOND, WIDTH, as_svg, style
from beam_inference.report.measures import StageTime, Timeline

_TOLD_PAUSES = 12
_SHORT = {"days": "days", "hours": "h", "minutes": "min", "seconds": "s"}


def draw_timeline(timeline: Timeline) -> str:
    """Draw Mvoxel/s of each series over the hours of work; dashed where a pause was cut out."""
    unit, name = time_unit(float(timeline.edges[-1]))
    with style():
        figure = Figure(figsize=(WIDTH, 2.3), layout="constrained")
        axes = figure.subplots()
        for (series, rates), colour in zip(timeline.rates.items(), (ACCENT, SECOND), strict=False):
            mean = float(np.average(rates, weights=np.diff(timeline.edges))) / 1e6
            label = f"{series}: {mean:.3g} Mvoxel/s on average"
            edges = timeline.edges / unit
            axes.stairs(rates / 1e6, edges, fill=True, color=colour, alpha=0.25, lw=0)
            axes.stairs(rates / 1e6, edges, color=colour, lw=1.4, label=label)
        for number, pause in enumerate(timeline.pauses):
            axes.axvline(pause.at / unit, color=MUTED, lw=0.8, ls=(0, (4, 3)))
            if number < _TOLD_PAUSES:
                axes.annotate(
                    f"paused {time_text(pause.seconds)}",
                    (pause.at / unit, 0.96),
                    (3, 0),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                    rotation=90,
                    va="top",
                    fontsize=7,
                    color=MUTED,
                )
        axes.set_xlim(0, timeline.edges[-1] / unit)
        axes.set_ylim(
            0, max(1e-9, 1.25 * max(float(rates.max()) for rates in timeline.rates.values()) / 1e6)
        )
        axes.set_xlabel(f"{name} of work since the first chunk was begun")
        axes.set_ylabel("Mvoxel/s")
        axes.legend(loc="upper right", ncols=2)
        return as_svg(figure, "timeline", "voxels finished per second over time")


def draw_stages(stages: Sequence[StageTime]) -> str:
    """Draw each stage's share of all seconds, and its seconds per chunk.

    Seconds per chunk are the median, and the 5th to 95th percentile.
    """
    whole = sum(stage.total for stage in stages) or 1.0
    unit, name = time_unit(max(stage.high for stage in stages))
    names = [stage.stage for stage in stages]
    places = np.arange(len(stages))
    with style():
        figure = Figure(figsize=(WIDTH, 0.34 * len(stages) + 0.75), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.barh(
            places,
            [100 * stage.total / whole for stage in stages],
            color=ACCENT,
            alpha=0.8,
            height=0.6,
        )
        for place, stage in zip(places, stages, strict=True):
            left.annotate(
                f"{100 * stage.total / whole:.3g} %",
                (100 * stage.total / whole, float(place)),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        left.set_xlim(0, 115)
        left.set_title("share of all seconds")
        left.set_xlabel("%")
        left.set_xticks(range(0, 101, 25))
        right.hlines(
            places,
            [s.low / unit for s in stages],
            [s.high / unit for s in stages],
            color=ACCENT,
            lw=5,
            alpha=0.35,
        )
        right.plot([s.median / unit for s in stages], places, "o", color=ACCENT, ms=5)
        right.set_xlim(left=0)
        right.set_title("of one chunk: median, and the middle 90 %")
        right.set_xlabel(name)
        right.xaxis.set_major_locator(MaxNLocator(6))
        left.set_yticks(places, names)
        left.invert_yaxis()
        for axes in (left, right):
            axes.grid(visible=False, axis="y")
        return as_svg(figure, "stages", "seconds of each stage")


def time_unit(seconds: float) -> tuple[float, str]:
    """A unit in which some seconds are a handy number: how many seconds it has, and its name."""
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
    return next(((unit, name) for unit, name in units if seconds >= 2 * unit), (1.0, "seconds"))


def time_text(seconds: float) -> str:
    """Seconds as a person would write them."""
    unit, name = time_unit(seconds)
    return f"{seconds / unit:.3g} {_SHORT[name]}"
