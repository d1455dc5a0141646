"""The simulation against what can be said by hand, and against chunk-by-chunk drawing."""

import time

import numpy as np
import pytest

from beam_inference.launch.simulation import Workload, simulate, simulate_many


def seconds(**keys):
    work = Workload(
        **{
            "chunks": 100,
            "seconds_per_chunk": 10.0,
            "variation": 0.0,
            "workers": 4,
            "startup_seconds": 7.0,
        }
        | keys
    )
    return simulate(work, np.random.default_rng(0))


def test_without_chance_it_is_arithmetic():
    assert seconds().seconds == pytest.approx(7 + 25 * 10)
    assert seconds(chunks=101).seconds == pytest.approx(7 + 26 * 10)
    assert seconds(workers=1).seconds == pytest.approx(7 + 1000)
    assert seconds(chunks=2).seconds == pytest.approx(17), "more workers than chunks"
    assert seconds(chunks=2).worker_seconds == pytest.approx(34), (
        "of which those without a chunk cost nothing"
    )


def test_stragglers_make_the_end_later_and_not_the_work_more():
    work = Workload(2000, 10.0, 0.8, 50, 0.0)
    runs = simulate_many(work, 100)
    assert np.mean([run.worker_seconds for run in runs]) == pytest.approx(20_000, rel=0.02)
    assert 400 < np.mean([run.seconds for run in runs]) < 440
    assert runs[0].seconds <= runs[-1].seconds


def one_by_one(work, random):
    """Each chunk drawn by itself, each attempt ended by an exponential time: slow, and plain."""
    rate = work.interruptions_per_hour / 3600

    def start():
        seconds = 0.0
        while (lost := random.exponential(1 / rate)) < work.startup_seconds:
            seconds += lost
        return seconds + work.startup_seconds

    free = [start() for _ in range(work.workers)]
    last = 0.0
    for _ in range(work.chunks):
        worker = int(np.argmin(free))
        while True:
            shape = 1 / work.variation**2
            takes = random.gamma(shape, work.seconds_per_chunk / shape)
            lost = random.exponential(1 / rate)
            if takes <= lost:
                break
            free[worker] += lost + start()
        free[worker] += takes
        last = max(last, free[worker])
    return last


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-14])
@pytest.mark.parametrize("variation", [0.0, 0.4])
def test_interruptions_that_never_come_cost_nothing(variation, rate):
    found = seconds(variation=variation, interruptions_per_hour=rate)
    assert found.interruptions == 0
    assert found.seconds == pytest.approx(seconds(variation=variation).seconds, rel=0.1)


@pytest.mark.parametrize("chunks", [60, 600])
def test_interruptions_cost_what_drawing_chunk_by_chunk_says(chunks):
    work = Workload(chunks, 60.0, 0.4, 10, 120.0, interruptions_per_hour=4.0)
    random = np.random.default_rng(1)
    slow = np.mean([one_by_one(work, random) for _ in range(300)])
    quick = np.mean([run.seconds for run in simulate_many(work, 200)])
    assert quick == pytest.approx(slow, rel=0.05)


@pytest.mark.parametrize("seconds_per_chunk", [900.0, 3600.0])
def test_long_chunks_are_lost_again_and_again(seconds_per_chunk):
    work = Workload(30, seconds_per_chunk, 0.3, 10, 120.0, interruptions_per_hour=1.0)
    random = np.random.default_rng(1)
    slow = np.mean([one_by_one(work, random) for _ in range(300)])
    quick = np.mean([run.seconds for run in simulate_many(work, 300)])
    assert quick == pytest.approx(slow, rel=0.08)


def test_workers_are_lost_as_they_start_too():
    work = Workload(6, 10.0, 0.3, 1, 60.0, interruptions_per_hour=60.0)
    random = np.random.default_rng(1)
    slow = np.mean([one_by_one(work, random) for _ in range(2000)])
    runs = simulate_many(work, 2000)
    assert np.mean([run.seconds for run in runs]) == pytest.approx(slow, rel=0.05)
    undisturbed = 60 + 6 * 10
    assert slow > 2 * undisturbed
    assert np.mean([run.interruptions for run in runs]) > 2
    assert simulate_many(Workload(6, 10.0, 0.3, 1, 3600.0, 60.0), 1)[0].seconds == float("inf")


def test_chunks_that_no_worker_lives_to_finish_take_for_ever():
    assert simulate_many(Workload(30, 36_000.0, 0.1, 10, 1.0, 4.0), 3)[0].seconds == float("inf")


@pytest.mark.slow
def test_ten_million_chunks_take_no_time():
    start = time.monotonic()
    runs = simulate_many(Workload(10**7, 20.0, 0.3, 1000, 180.0, 0.05), 20)
    assert time.monotonic() - start < 20
    assert runs[10].seconds == pytest.approx(10**7 * 20 / 1000, rel=0.02)


def test_the_same_seed_is_the_same_future():
    work = Workload(100, 10.0, 0.5, 4, 1.0, 1.0)
    assert simulate_many(work, 5, seed=3) == simulate_many(work, 5, seed=3)
    assert simulate_many(work, 5, seed=3) != simulate_many(work, 5, seed=4)
