import gc
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

from beam_inference.errors import ChunkFault, WorkerFault
from beam_inference.worker.pace import Pace
from beam_inference.worker.read_infer_write import run_chunks


def never():
    return False


def no_fault(index, fault):
    raise AssertionError(f"chunk {index}: {fault}")


def test_results_come_in_order_once_written():
    written = []

    def write(index, result):
        time.sleep(0.01)
        written.append(index)
        return index, result

    outcomes = list(
        run_chunks(
            [4, 2, 9, 1],
            lambda i: i * 10,
            lambda i, cutout: cutout + 1,
            write,
            no_fault,
            never,
            Pace(1),
        )
    )
    assert outcomes == [(4, 41), (2, 21), (9, 91), (1, 11)]
    assert written == [4, 2, 9, 1]


def test_the_next_cutout_is_read_and_the_last_result_written_while_the_device_computes():
    reading = threading.Event()
    writing = threading.Event()
    proceed = threading.Event()

    def read(index):
        if index == 2:
            reading.set()
        return index

    def infer(index, cutout):
        if index == 1:  # chunk 2 is being read and chunk 0 written before this one is done
            assert reading.wait(5)
            assert writing.wait(5)
            proceed.set()
        return cutout

    def write(index, result):
        if index == 0:
            writing.set()
            assert proceed.wait(5)
        return index

    assert list(run_chunks([0, 1, 2], read, infer, write, no_fault, never, Pace(1))) == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 3])
def test_reads_ahead_and_trailing_writes_are_bounded(depth):
    alive = set()
    most = []
    lock = threading.Lock()

    def read(index):
        with lock:
            alive.add(index)
            most.append(len(alive))
        return index

    def write(index, result):
        time.sleep(0.005)
        with lock:
            alive.discard(index)
        return index

    pace = Pace(depth)
    list(run_chunks(range(30), read, lambda i, cutout: cutout, write, no_fault, never, pace))
    # One cutout in use and others read ahead; one result new and others being written, one more
    # just ended.
    assert depth < max(most) <= 1 + depth + 1 + depth


def test_as_many_are_read_at_once_as_hide_how_long_a_read_takes():
    """A read takes as long as six chunks are computed, and no chunk waits but the first."""
    waits = []
    under_way = []
    lock = threading.Lock()

    def read(index):
        with lock:
            under_way.append(index)
        time.sleep(0.12)
        return time.perf_counter()

    pace = Pace(16)

    def infer(index, arrived):
        waits.append(arrived)
        pace.measure("infer", time.sleep, 0.02)
        return index

    done = list(run_chunks(range(40), read, infer, lambda i, r: i, no_fault, never, pace))
    assert done == list(range(40))
    assert 6 <= pace.suitable_depth("read") <= 12
    assert pace.suitable_depth("write") == 1


def test_where_stores_are_fast_no_memory_is_taken_by_waiting_chunks():
    pace = Pace(8)
    assert (pace.suitable_depth("read"), pace.suitable_depth("write")) == (8, 8), (
        "nothing is measured"
    )
    alive = []

    def read(index):
        alive.append(index)
        return index

    def infer(index, cutout):
        pace.measure("infer", time.sleep, 0.01)
        ahead.append(max(alive) - index)
        return index

    ahead = []
    list(run_chunks(range(20), read, infer, lambda i, r: i, no_fault, never, pace))
    assert ahead[-8:][0] <= 1 + 1
    assert (pace.suitable_depth("read"), pace.suitable_depth("write")) == (1, 1)


def test_runs_at_a_time_hold_no_more_arrays_than_their_threads_may():
    """Five runs of two threads: so much memory was planned for two."""
    held = Counter()
    most = Counter()
    lock = threading.Lock()
    pace = Pace(2)

    def hold(kind, number):
        with lock:
            held[kind] += number
            most[kind] = max(most[kind], held[kind])

    def read(index):
        hold("inputs", 1)
        return index

    def infer(index, cutout):
        hold("computing", 1)
        hold("results", 1)
        time.sleep(0.001)
        hold("inputs", -1)
        hold("computing", -1)
        return index

    def write(index, result):
        time.sleep(0.004)
        hold("results", -1)
        return index

    def do(first):
        run = run_chunks(range(first, first + 20), read, infer, write, no_fault, never, pace)
        assert len(list(run)) == 20

    with pace.count_thread(), pace.count_thread(), ThreadPoolExecutor() as threads:
        list(threads.map(do, range(0, 100, 20)))
    assert 3 < most["inputs"] <= 2 * 3
    assert 3 < most["results"] <= 2 * 3
    assert most["computing"] == 2
    assert held == Counter(inputs=0, results=0, computing=0)


@pytest.mark.parametrize("stage", ["read", "infer", "write"])
def test_places_are_given_back_whatever_fails(stage):
    pace = Pace(1)

    def fail(index, *_):
        raise (ChunkFault("bad block", "read", 1) if index % 2 else WorkerFault("sick"))

    stages = {"read": lambda i: i, "infer": lambda i, c: c, "write": lambda i, r: i} | {stage: fail}
    for first in range(6):
        with suppress(WorkerFault):
            list(run_chunks([first, first + 1], *stages.values(), lambda i, f: i, never, pace))
    for slots in (pace.inputs, pace.results):
        assert [slots.take(wait=False) for _ in range(3)] == [True, True, False]
    assert [pace.computing.take(wait=False) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("stage", ["read", "infer", "write"])
def test_a_chunk_fault_is_quarantined_and_the_run_goes_on(stage):
    def fail(index, *_):
        if index % 3 == 1:
            raise ChunkFault("bad block", stage, 1)
        return index

    stages = {"read": lambda i: i, "infer": lambda i, c: c, "write": lambda i, r: i} | {stage: fail}
    outcomes = list(
        run_chunks(range(7), *stages.values(), lambda i, f: f"{i}: {f}", never, Pace(2))
    )
    assert sorted(map(str, outcomes)) == ["0", "1: bad block", "2", "3", "4: bad block", "5", "6"]


def test_the_arrays_of_a_chunk_whose_write_fails_are_let_go_of():
    made = []

    def infer(index, cutout):
        array = np.zeros(10)
        made.append(weakref.ref(array))
        return array

    def write(index, array):
        raise ChunkFault("postprocess", "postprocess", 1)

    gc.disable()
    try:
        outcomes = run_chunks(
            range(2), lambda i: i, infer, write, lambda i, fault: i, never, Pace(1)
        )
        assert list(outcomes) == [0, 1]
        assert [there() is None for there in made] == [True, True]
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", ["read", "infer", "write"])
def test_any_other_error_ends_the_run_after_the_writes_under_way(stage):
    written = []

    def step(name):
        def action(index, *_):
            if name == stage and index == 2:
                raise WorkerFault("sick")
            if name == "write":
                time.sleep(0.02)
                written.append(index)
            return index

        return action

    with pytest.raises(WorkerFault, match="sick"):
        list(
            run_chunks(
                range(6), step("read"), step("infer"), step("write"), no_fault, never, Pace(1)
            )
        )
    assert written[:2] == [0, 1]
    assert 2 not in written


def test_stopping_starts_no_further_chunk_and_finishes_writes():
    done = []
    stop = threading.Event()

    def infer(index, cutout):
        if index == 2:
            stop.set()
        return cutout

    done = list(
        run_chunks(range(100), lambda i: i, infer, lambda i, r: i, no_fault, stop.is_set, Pace(4))
    )
    assert done == [0, 1, 2]
