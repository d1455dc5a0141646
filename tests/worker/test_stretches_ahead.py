"""Stretches that are begun before their turn: which, how many, and what their turn gets."""

import threading
import time
from collections import Counter

import pytest

from beam_inference.errors import WorkerFault
from beam_inference.job.messages import Record
from beam_inference.worker.stretches_ahead import StretchesAhead


class Stretches:
    """Stretches of one chunk each; a thread that does one waits until it may go on."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.may_go_on = threading.Event()
        self.done = Counter()
        self.under_way = 0
        self.most = 0
        self.wanted = 2
        self._lock = threading.Lock()

    def do(self, number):
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        assert self.may_go_on.wait(10)
        with self._lock:
            self.under_way -= 1
            self.done[number] += 1
        return [Record(number, "done")]

    def ahead(self):
        return StretchesAhead(iter(self.numbers), self.do, lambda: self.wanted)


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_as_many_as_wanted_are_under_way_and_their_turn_gets_their_records():
    stretches = Stretches(range(1, 9))
    ahead = stretches.ahead()
    ahead.top_up()
    ahead.top_up()
    wait_until(lambda: stretches.under_way == 2)
    assert ahead.take(0) is None
    stretches.may_go_on.set()
    wait_until(lambda: sum(stretches.done.values()) == 8)
    for number in range(1, 9):
        assert ahead.take(number) == [Record(number, "done")]
    assert stretches.most == 2
    assert set(stretches.done.values()) == {1}


def test_what_has_its_turn_now_is_not_begun_before_it():
    stretches = Stretches([0, 1, 2])
    stretches.may_go_on.set()
    ahead = stretches.ahead()
    assert ahead.take(1) is None
    ahead.top_up()
    wait_until(lambda: stretches.done.keys() >= {0, 2})
    assert 1 not in stretches.done


def test_what_was_listed_before_its_turn_is_not_begun_after_it():
    stretches = Stretches([])
    stretches.may_go_on.set()
    may_list = threading.Event()

    def list_free():
        assert may_list.wait(10)
        yield from [0, 1]

    ahead = StretchesAhead(list_free(), stretches.do, lambda: 1)
    ahead.top_up()
    assert ahead.take(0) is None
    may_list.set()
    wait_until(lambda: 1 in stretches.done)
    assert ahead.take(1) == [Record(1, "done")]
    assert 0 not in stretches.done


def test_no_more_are_begun_where_none_is_wanted():
    stretches = Stretches(range(5))
    stretches.may_go_on.set()
    stretches.wanted = 0
    ahead = stretches.ahead()
    ahead.top_up()
    assert ahead.take(0) is None
    assert not stretches.done


def test_a_stretch_of_another_worker_is_left_to_its_turn():
    ahead = StretchesAhead(iter([3]), lambda number: None, lambda: 1)
    ahead.top_up()
    wait_until(lambda: ahead.take(3) is None)


def test_a_failure_is_raised_at_the_turn_of_its_stretch_and_then_not_again(caplog):
    def fail(number):
        raise WorkerFault("the disk is full")

    ahead = StretchesAhead(iter([3]), fail, lambda: 1)
    ahead.top_up()
    wait_until(lambda: "begun before its turn" in caplog.text)
    with pytest.raises(WorkerFault, match="the disk is full"):
        ahead.take(3)
    assert ahead.take(3) is None  # a runner that tries again does it in its turn


def test_where_free_ones_cannot_be_found_none_is_begun(caplog):
    def find():
        raise WorkerFault("cannot list")
        yield 0

    ahead = StretchesAhead(find(), pytest.fail, lambda: 1)
    ahead.top_up()
    wait_until(lambda: "no stretches are begun before their turn" in caplog.text)
    assert ahead.take(0) is None
