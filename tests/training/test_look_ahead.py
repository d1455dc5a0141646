"""Items made ahead: in order, of the wanted depth, and never more than asked for."""

import threading
import time

import pytest

from beam_inference.training.look_ahead import LookAhead, make_one_ahead


def test_items_come_in_order_whatever_they_take():
    delays = [0.03, 0, 0.01, 0, 0.02, 0]

    def make(number):
        time.sleep(delays[number % 6])
        return number

    assert list(LookAhead(make, 4).items(range(20))) == list(range(20))


def test_what_takes_long_is_made_further_ahead():
    ahead = LookAhead(lambda number: time.sleep(0.08) or number, 32)
    waited = 0.0
    begun = time.monotonic()
    for number in ahead.items(range(40)):
        if number >= 20:
            waited += time.monotonic() - begun
        time.sleep(0.01)
        begun = time.monotonic()
    assert ahead.depth > 8
    assert waited < 0.5 * 20 * 0.01


def test_what_is_made_quickly_is_not_hoarded():
    ahead = LookAhead(lambda number: number, 32)
    for _ in ahead.items(range(20)):
        time.sleep(0.002)
    assert ahead.depth <= 4


def test_an_error_comes_when_it_is_its_turn():
    def make(number):
        if number == 2:
            raise OSError("torn")
        return number

    items = LookAhead(make, 4).items(range(5))
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="torn"):
        next(items)


def test_closing_leaves_no_thread_behind():
    before = threading.active_count()
    items = LookAhead(lambda number: number, 4).items(range(10**9))
    assert next(items) == 0
    items.close()
    assert threading.active_count() == before


def test_one_is_made_while_the_one_before_is_used():
    made = []

    def items():
        for number in range(3):
            made.append(number)
            yield number

    ahead = make_one_ahead(items(), threading.Event())
    assert next(ahead) == 0
    deadline = time.monotonic() + 10
    while made != [0, 1] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert made == [0, 1]
    assert list(ahead) == [1, 2]


def test_an_error_of_one_made_ahead_comes_when_it_is_its_turn():
    def items():
        yield 0
        raise OSError("torn")

    before = threading.active_count()
    ahead = make_one_ahead(items(), threading.Event())
    assert next(ahead) == 0
    with pytest.raises(OSError, match="torn"):
        next(ahead)
    assert threading.active_count() == before


def test_closing_waits_for_the_one_that_is_being_made():
    before = threading.active_count()
    is_closed = threading.Event()
    ahead = make_one_ahead(iter(range(10**9)), is_closed)
    assert next(ahead) == 0
    assert not is_closed.is_set()
    ahead.close()
    assert threading.active_count() == before
    assert is_closed.is_set()
