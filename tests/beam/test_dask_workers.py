"""Dask's workers, as they are set by the work that they do."""

import sys
import time

import pytest

from beam_inference.beam.dask_workers import stop_sampling

distributed = pytest.importorskip("distributed")


def is_sampling() -> bool:
    return bool(distributed.get_worker().periodic_callbacks["profile"].is_running())


def test_workers_are_not_sampled_where_that_may_lock_them_up():
    options = {"n_workers": 1, "processes": False, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        assert client.submit(is_sampling, pure=False).result()
        client.submit(stop_sampling).result()
        deadline = time.monotonic() + 5
        while sys.version_info < (3, 12) and client.submit(is_sampling, pure=False).result():
            assert time.monotonic() < deadline
        assert client.submit(is_sampling, pure=False).result() == (sys.version_info >= (3, 12))


def test_elsewhere_it_does_nothing():
    stop_sampling()
