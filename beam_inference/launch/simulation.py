"""A discrete-event simulation of a job with stragglers and interrupted workers.

Workers take chunks from one queue. A chunk's seconds are gamma-distributed. A worker is lost after
an exponentially distributed time, perhaps while it starts, and with it what it was computing;
another takes its place after its start-up. Near the end single chunks are handed out, before that
shares of what is left, whose sums are drawn at once (gamma variables of one scale add to a gamma
variable): so the time for it grows with the workers, and hardly with the chunks.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from statistics import mean

import numpy as np

HOPELESS = 1e-6
"""Chunks that finish with less than this probability before their worker is lost never finish."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The chunks to do, and the workers that do them.

    Attributes:
        chunks: number of chunks to do.
        seconds_per_chunk: mean of a chunk's seconds on one worker.
        variation: standard deviation of a chunk's seconds, relative to their mean.
        workers: number of workers at a time.
        startup_seconds: time before a worker's first chunk, also if it replaces a lost one.
        interruptions_per_hour: how often a worker is lost.
    """

    chunks: int
    seconds_per_chunk: float
    variation: float
    workers: int
    startup_seconds: float
    interruptions_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """The outcome of one simulated job.

    Attributes:
        seconds: from the start to the last chunk.
        worker_seconds: time that is paid for, of each worker from its start until no chunk is left
            for it.
        interruptions: number of workers that were lost.
    """

    seconds: float
    worker_seconds: float
    interruptions: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Summary of many simulated runs of a job.

    Attributes:
        seconds: median of their durations.
        seconds_at_worst: duration that 95 % of them do not exceed.
        worker_seconds: mean of the seconds that workers are paid for.
        interruptions: mean of the number of lost workers.
    """

    seconds: float
    seconds_at_worst: float
    worker_seconds: float
    interruptions: float


def simulate(work: Workload, random: np.random.Generator) -> Finish:
    """Simulate one run of a job."""
    rate = work.interruptions_per_hour / 3600
    starts = [_starts(work, 1, rate, random) for _ in range(min(work.workers, work.chunks))]
    free = [seconds for seconds, _ in starts]  # when each worker is next free
    heapq.heapify(free)
    left = work.chunks
    interruptions = sum(lost for _, lost in starts)
    last = 0.0
    while left:
        start = heapq.heappop(free)
        share = max(1, left // (4 * work.workers))
        left -= share
        seconds, lost = _attempts(work, share, rate, random)
        interruptions += lost
        last = max(last, start + seconds)
        heapq.heappush(free, start + seconds)
    return Finish(last, sum(free), interruptions)


def simulate_many(work: Workload, runs: int = 200, seed: int = 0) -> list[Finish]:
    """Simulate several runs of a job, sorted by the seconds that they take."""
    random = np.random.default_rng(seed)
    return sorted((simulate(work, random) for _ in range(runs)), key=lambda finish: finish.seconds)


def forecast(work: Workload) -> Forecast:
    """Simulate a job many times, and summarise the runs."""
    runs = simulate_many(work)
    return Forecast(
        seconds=runs[len(runs) // 2].seconds,
        seconds_at_worst=runs[len(runs) * 95 // 100].seconds,
        worker_seconds=mean(run.worker_seconds for run in runs),
        interruptions=mean(run.interruptions for run in runs),
    )


def _attempts(
    work: Workload, chunks: int, rate: float, random: np.random.Generator
) -> tuple[float, int]:
    """Draw the time that one worker, or those that replace it, takes for some chunks.

    An attempt of T seconds succeeds with probability exp(-rate T), else the chunk is begun anew.
    For T of a gamma distribution the attempts that succeed are gamma-distributed, too, and those
    that fail are counted by a negative binomial one; what a failed one wasted is about uniform, up
    to twice its mean.

    Returns:
        The seconds, and how many workers are lost meanwhile.
    """
    mean = work.seconds_per_chunk
    variance = (work.variation * work.seconds_per_chunk) ** 2
    if variance:
        shape = mean**2 / variance
        scale = variance / mean
        succeeds = (1 + rate * scale) ** -shape
        within = shape * scale * (1 + rate * scale) ** -(shape + 1)  # E[T exp(-rate T)]
        seconds = float(random.gamma(chunks * shape, scale / (1 + rate * scale)))
    else:
        succeeds = float(np.exp(-rate * mean))
        within = mean * succeeds
        seconds = chunks * mean
    if not rate:
        return seconds, 0
    if succeeds < HOPELESS:
        return float("inf"), 0
    lost = int(random.negative_binomial(chunks, succeeds))
    if not lost:  # the rate may be too small to divide by
        return seconds, 0
    wasted = ((1 - succeeds) / rate - within) / (1 - succeeds)
    wasted *= 2 * float(random.random(min(lost, 1000)).mean()) * lost
    starting, lost_again = _starts(work, lost, rate, random)
    return seconds + wasted + starting, lost + lost_again


def _starts(
    work: Workload, count: int, rate: float, random: np.random.Generator
) -> tuple[float, int]:
    """Draw the time that several workers take to start, one after the other.

    A lost one has taken, on average, the mean of an exponential time that is cut off at the
    start-up time.

    Returns:
        The seconds, and how many workers are lost meanwhile.
    """
    startup = work.startup_seconds
    if not (rate and startup and count):
        return count * startup, 0
    succeeds = float(np.exp(-rate * startup))
    if succeeds < HOPELESS:
        return float("inf"), 0
    lost = int(random.negative_binomial(count, succeeds))
    if not lost:
        return count * startup, 0
    wasted = 1 / rate - startup * succeeds / -math.expm1(-rate * startup)
    return count * startup + lost * wasted, lost
