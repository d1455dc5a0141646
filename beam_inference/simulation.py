"""When a job will be finished, with stragglers and interrupted workers: a discrete-event simulation, pure.

Workers take chunks from one queue. A chunk's seconds are gamma-distributed; a worker is lost after an exponential time,
and with it what it was computing; another takes its place after its start-up. Near the end single chunks are handed
out, before that shares of what is left, whose sums are drawn at once (gamma variables of one scale add to a gamma
variable): so 10^7 chunks take milliseconds.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


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
    free = [work.startup_seconds] * min(work.workers, work.chunks)  # when each worker is next free
    heapq.heapify(free)
    left, interruptions, last = work.chunks, 0, 0.0
    while left:
        start = heapq.heappop(free)
        share = max(1, left // (4 * work.workers))
        left -= share
        seconds = _seconds(work, share, random)
        lost = random.poisson(rate * seconds) if rate else 0
        while lost:  # part of a chunk is done again for each, and can be interrupted again
            again = sum(_seconds(work, 1, random) * random.random() for _ in range(lost))
            interruptions += lost
            seconds += again + lost * work.startup_seconds
            lost = random.poisson(rate * again)
        last = max(last, start + seconds)
        heapq.heappush(free, start + seconds)
    return Finish(last, sum(free), interruptions)


def simulate_many(work: Workload, runs: int = 200, seed: int = 0) -> list[Finish]:
    """So many runs, the quickest first."""
    random = np.random.default_rng(seed)
    return sorted((simulate(work, random) for _ in range(runs)), key=lambda finish: finish.seconds)


def _seconds(work: Workload, chunks: int, random: np.random.Generator) -> float:
    if not work.variation:
        return chunks * work.seconds_per_chunk
    shape = 1 / work.variation**2
    return float(random.gamma(chunks * shape, work.seconds_per_chunk / shape))
