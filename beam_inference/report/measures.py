"""Figures from receipts: channels, stages, retries, throughput and worker hours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import Stage
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.job.records import ChannelStatistics, Receipt

STAGES: tuple[Stage, ...] = ("read", "infer", "merge", "write")
_BINS = 80
_CHUNKS_IN_BIN = 3
_PAUSE_SECONDS = 60.0
_PAUSE_IN_CHUNKS = 10


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a stage: total, and median, 5th and 95th percentile and maximum per chunk."""

    stage: Stage
    total: float
    median: float
    low: float
    high: float
    most: float


@dataclass(frozen=True, slots=True)
class Pause:
    """An interval in which nothing was done.

    Attributes:
        at: seconds of work before it.
        seconds: its length.
    """

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rate at which voxels were finished over the time of work; pauses are cut out.

    Attributes:
        edges: of equal intervals, in seconds of work since the first chunk was begun.
        rates: for each series, voxels a second in each interval.
        pauses: what was cut out.
    """

    edges: NDArray[np.float64]
    rates: dict[str, NDArray[np.float64]]
    pauses: list[Pause]


def start_seconds(receipt: Receipt) -> float:
    """When the work behind a receipt began, in seconds since 1970: the merge, if it was merged."""
    seconds = _seconds_by_stage(receipt)
    spent = seconds["merge"] if "merge" in seconds else sum(seconds.values())
    return receipt.finished_at.timestamp() - spent


def _seconds_by_stage(receipt: Receipt) -> dict[Stage, float]:
    """Seconds of a chunk by stage; none where a clock was set back meanwhile."""
    return {stage: max(0.0, spent) for stage, spent in receipt.seconds.items()}


def retries(receipt: Receipt) -> int:
    """Attempts beyond the first, over all stages."""
    return sum(receipt.attempts.values()) - len(receipt.attempts)


def channel_statistics(receipts: Sequence[Receipt]) -> list[ChannelStatistics]:
    """Statistics of each output channel over all voxels of some chunks."""
    if not receipts:
        return []
    sizes = [part.box.size for receipt in receipts for part in receipt.parts]
    channels = zip(*(part.channels for receipt in receipts for part in receipt.parts), strict=True)
    return [
        ChannelStatistics(
            min=min(part.min for part in parts),
            max=max(part.max for part in parts),
            mean=float(np.average([part.mean for part in parts], weights=sizes)),
            zeros=sum(part.zeros for part in parts),
            nans=sum(part.nans for part in parts),
        )
        for parts in channels
    ]


def stage_times(receipts: Sequence[Receipt]) -> list[StageTime]:
    """Times of each stage that some chunk went through, in order."""
    times = []
    for stage in STAGES:
        by_stage = map(_seconds_by_stage, receipts)
        seconds = [spent[stage] for spent in by_stage if stage in spent]
        if seconds:
            low, median, high = np.percentile(seconds, (5, 50, 95))
            times.append(
                StageTime(stage, sum(seconds), float(median), float(low), float(high), max(seconds))
            )
    return times


def worker_hours(receipts: Sequence[Receipt], finished: int) -> float:
    """Hours of worker processes, each from the start of its first chunk to the end of its last.

    ``receipts`` are some of all that were ``finished``. Of n values drawn from a span, first and
    last are on average (n - 1) / (n + 1) of it apart; what that misses is added.
    """
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    first: dict[tuple[str, str], float] = {}
    for receipt in receipts:
        worker = (receipt.launch, receipt.worker)
        times[worker].append(receipt.finished_at.timestamp())
        first[worker] = min(start_seconds(receipt), first.get(worker, np.inf))
    share = len(receipts) / max(1, finished)
    seconds = 0.0
    for worker, ends in times.items():
        sampled = len(ends)
        total = sampled / share
        missed = (sampled + 1) / (sampled - 1) * (total - 1) / (total + 1) if sampled > 1 else 1.0
        seconds += (max(ends) - first[worker]) * max(1.0, missed)
    return seconds / 3600


def timeline(
    series: Mapping[str, tuple[Sequence[Receipt], int]], grid: ChunkGrid
) -> Timeline | None:
    """Voxels per second over time; None without receipts.

    Each series has some receipts, and the number that there are in all.
    """
    receipts = [receipt for some, _ in series.values() for receipt in some]
    if not receipts:
        return None
    begins = np.array([start_seconds(receipt) for receipt in receipts])
    ends = np.array([receipt.finished_at.timestamp() for receipt in receipts])
    scale = max(finished / max(1, len(some)) for some, finished in series.values())
    longest = max(_PAUSE_SECONDS, _PAUSE_IN_CHUNKS * scale * float(np.median(ends - begins)))
    order = np.argsort(begins)
    reached = np.maximum.accumulate(ends[order])
    gaps = begins[order][1:] - reached[:-1]
    cuts = [(float(reached[k]), float(gaps[k])) for k in np.flatnonzero(gaps > longest)]
    start = float(begins.min())

    def working(moment: float) -> float:
        return moment - start - sum(gap for end, gap in cuts if end < moment)

    bins = min(_BINS, max(1, len(receipts) // len(series) // _CHUNKS_IN_BIN))
    edges = np.linspace(0, max(1e-3, working(float(ends.max()))), bins + 1)
    rates = {}
    for name, (some, finished) in series.items():
        moments = [
            min(float(edges[-1]), working(receipt.finished_at.timestamp())) for receipt in some
        ]
        voxels = [grid.core_box(receipt.chunk).size * finished / len(some) for receipt in some]
        rates[name] = np.histogram(moments, edges, weights=voxels)[0] / np.diff(edges)
    return Timeline(edges, rates, [Pause(working(end), gap) for end, gap in cuts])
