"""A pipeline is given up whose cluster has had no workers for long."""

import logging
import time

from beam_inference.beam.idle_cluster import IdleCluster


class Cluster:
    """A cluster, and a clock that is set by hand."""

    def __init__(self):
        self.is_empty = False
        self.now = 0.0
        self.looks = 0
        self.idle = IdleCluster(self.has_no_workers, clock=lambda: self.now)

    def has_no_workers(self):
        self.looks += 1
        return self.is_empty

    def is_given_up_at(self, now):
        self.now = now
        looks = self.looks
        given_up = self.idle.are_given_up()
        deadline = time.monotonic() + 5
        while self.looks == looks and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)  # what the look found is noted after it
        return given_up


def test_a_cluster_without_workers_is_told_and_given_up(caplog):
    cluster = Cluster()
    cluster.is_empty = True
    assert not cluster.is_given_up_at(20)
    assert not cluster.is_given_up_at(50)
    assert "no workers" not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert not cluster.is_given_up_at(90)
        assert "for 9 more minutes" in caplog.text
    assert cluster.is_given_up_at(630)
    assert not cluster.is_given_up_at(660)


def test_workers_that_come_back_in_time_are_enough():
    cluster = Cluster()
    cluster.is_empty = True
    assert not cluster.is_given_up_at(20)
    cluster.is_empty = False
    assert not cluster.is_given_up_at(600)
    assert not cluster.is_given_up_at(1200)
    cluster.is_empty = True
    assert not cluster.is_given_up_at(1300)
    assert not cluster.is_given_up_at(1800)
    assert cluster.is_given_up_at(1901)
