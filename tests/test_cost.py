"""Hours and money, by hand."""

import pytest

from beam_inference.cost import Measured, Prices, Totals, chunk_seconds, estimates

TOTALS = Totals(
    chunks=1000,
    patches=50_000,
    calls=50_000,
    voxels=2 * 10**9,
    read_bytes=3e9,
    written_bytes=6e9,
    stored_bytes=6 * 2**30,
    read_requests=2_000_000,
    write_requests=1_000_000,
)


def test_a_chunk_takes_the_longer_of_computing_and_moving():
    assert chunk_seconds(Measured(0.1, 1e-9, 1e-9), TOTALS) == pytest.approx(5.0)
    assert chunk_seconds(Measured(0.0001, 1e-6, 2e-6), TOTALS) == pytest.approx(15.0)


def test_money_by_hand():
    prices = Prices(worker_hour=3.6, startup_seconds=0, million_writes=5, million_reads=0.5, gib_month=0.02)
    (expected,) = estimates(Measured(0.1, 0, 0), TOTALS, prices, workers=10, variation=0.0)
    assert expected.hours * 3600 == pytest.approx(500)
    assert expected.money == pytest.approx(5000 * 3.6 / 3600 + 5 + 1)
    assert expected.money_per_billion_voxels == pytest.approx(expected.money / 2)
    assert expected.money_per_month == pytest.approx(0.12)


def test_interruptible_workers_are_slower_and_may_be_cheaper():
    prices = Prices(worker_hour=1.0, interruptible_worker_hour=0.3, interruptions_per_hour=2.0, startup_seconds=100)
    steady, spot = estimates(Measured(0.1, 0, 0), TOTALS, prices, workers=10, variation=0.3)
    assert (steady.kind, spot.kind) == ("on demand", "interruptible")
    assert spot.hours > steady.hours
    assert spot.interruptions > 1
    assert spot.money < steady.money
