"""When a job will be finished, with stragglers and interrupted workers: a discrete-event simulation, pure.

Workers take chunks from one queue. A chunk's seconds are gamma-distributed; a worker is lost after
an exponential time, perhaps while it starts, and with it what it was computing; another takes its
place after its start-up. Near the end single chunks are handed out, before that shares of what is
left, whose sums are drawn at once (gamma variables of one
scale add to a gamma variable): so 10^7 chunks take milliseconds.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

HOPELESS = 1e-6
"""Chunks that are finished less often than this before their worker is lost are never finished."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be done, and by whom.

    Attributes:
        chunks: to do.
        seconds_per_chunk: on average, on one worker.
        variation: standard deviation of a chunk's seconds, over their mean.
        workers: that work at a time.
        startup_seconds: before a worker's first chunk, also of one that replaces a lost one.
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
    """How one simulated job went.

    Attributes:
        seconds: from the start to the last chunk.
        worker_seconds: paid for: each worker from its start until no chunk is left for it.
        interruptions: workers lost.
    """

    seconds: float
    worker_seconds: float
    interruptions: int


def simulate(work: Workload, random: np.random.Generator) -> Finish:
    """One run of a job."""
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
    """So many runs, the quickest first."""
    random = np.random.default_rng(seed)
    return sorted((simulate(work, random) for _ in range(runs)), key=lambda finish: finish.seconds)


def _attempts(
    work: Workload, chunks: int, rate: float, random: np.random.Generator
) -> tuple[float, int]:
    """Seconds that one worker, or those that replace it, takes for some chunks; how often it is lost meanwhile.

    An attempt of T seconds succeeds with probability exp(-rate T), else the chunk is begun anew.
    For T of a gamma distribution the attempts that succeed are gamma-distributed, too, and those
    that fail are counted by a negative binomial one; what a failed one wasted is about uniform, up
    to twice its mean.
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
    wasted = ((1 - succeeds) / rate - within) / (1 - succeeds)
    wasted *= 2 * float(random.random(min(lost, 1000)).mean() if lost else 0) * lost
    starting, lost_again = _starts(work, lost, rate, random)
    return seconds + wasted + starting, lost + lost_again


def _starts(
    work: Workload, count: int, rate: float, random: np.random.Generator
) -> tuple[float, int]:
    """Seconds until so many workers have started, one after the other; how many are lost before they have.

    One that is lost has taken, on average, the mean of an exponential time that is cut off at the
    start-up's.
    """
    startup = work.startup_seconds
    if not (rate and startup and count):
        return count * startup, 0
    succeeds = float(np.exp(-rate * startup))
    if succeeds < HOPELESS:
        return float("inf"), 0
    lost = int(random.negative_binomial(count, succeeds))
    return (
        count * startup + lost * (1 / rate - startup * succeeds / -math.expm1(-rate * startup)),
        lost,
    )
