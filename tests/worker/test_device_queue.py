"""Threads take turns on the device in the order in which they come."""

import threading
import time

import pytest

from beam_inference.worker.device_queue import DeviceQueue


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_comes_first_has_the_first_turn_and_sees_who_waits():
    queue = DeviceQueue()
    turns = []

    def take(chunk):
        with queue.turn(chunk):
            turns.append((chunk, queue.waiting()))

    threads = []
    with queue.turn():
        assert queue.waiting() == []
        for number, chunk in enumerate(["a", None, "b", "c"], 1):
            threads.append(threading.Thread(target=take, args=(chunk,)))
            threads[-1].start()
            wait_until(lambda number=number: len(queue._places) == 1 + number)
        assert queue.waiting() == ["a", "b", "c"]
    for thread in threads:
        thread.join(10)
    assert turns == [("a", ["b", "c"]), (None, ["b", "c"]), ("b", ["c"]), ("c", [])]


def test_a_turn_that_fails_is_over():
    queue = DeviceQueue()
    with pytest.raises(OSError, match="lost"), queue.turn():
        raise OSError("lost")
    with queue.turn():
        assert queue.waiting() == []
