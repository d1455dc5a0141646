"""Hours and money, by hand."""

from dataclasses import replace

import pytest

from beam_inference.launch.cost import Measured, Prices, Totals, chunk_seconds, estimates

TOTALS = Totals(
    chunks=1000,
    patches=50_000,
    calls=50_000,
    voxels=2 * 10**9,
    read_bytes=3e9,
    written_bytes=6e9,
    shared_bytes=0,
    seam_bytes=0,
    stored_bytes=6 * 2**30,
    read_requests=2_000_000,
    write_requests=1_000_000,
)


def test_a_chunk_takes_the_longer_of_computing_and_moving():
    assert chunk_seconds(Measured(0.1, 1e-9, 1e-9), TOTALS) == pytest.approx(5.0)
    assert chunk_seconds(Measured(0.0001, 1e-6, 2e-6), TOTALS) == pytest.approx(15.0)


def test_on_the_cpu_moving_takes_its_part_of_the_cores():
    moved = 3 + 2 * 6.0
    assert chunk_seconds(Measured(0.1, 1e-6, 2e-6, cores=4), TOTALS) == pytest.approx(
        max(5 + moved / 4, moved)
    )
    assert chunk_seconds(Measured(0.4, 1e-6, 2e-6, cores=4), TOTALS) == pytest.approx(
        20 + moved / 4
    )


def test_the_second_stage_of_an_exchange_comes_after_the_first():
    totals = replace(TOTALS, shared_bytes=2e9, seam_bytes=5e9)
    first = 3 + 2 * 4 + 0.5 * 5
    second = 0.25 * 5 + 2 * 2
    measured = Measured(0.0001, 1e-6, 2e-6, seam_write_seconds=0.5e-6, seam_read_seconds=0.25e-6)
    assert chunk_seconds(measured, totals) == pytest.approx(first + second)


def test_money_by_hand():
    prices = Prices(
        worker_hour=3.6, startup_seconds=0, million_writes=5, million_reads=0.5, gib_month=0.02
    )
    (expected,) = estimates(Measured(0.1, 0, 0), TOTALS, prices, workers=10, variation=0.0)
    assert expected.hours * 3600 == pytest.approx(500)
    assert expected.money == pytest.approx(5000 * 3.6 / 3600 + 5 + 1)
    assert expected.money_per_billion_voxels == pytest.approx(expected.money / 2)
    assert expected.money_per_month == pytest.approx(0.12)


def test_interruptible_workers_are_slower_and_may_be_cheaper():
    prices = Prices(
        worker_hour=1.0,
        interruptible_worker_hour=0.3,
        interruptions_per_hour=2.0,
        startup_seconds=100,
    )
    steady, spot = estimates(Measured(0.1, 0, 0), TOTALS, prices, workers=10, variation=0.3)
    assert (steady.kind, spot.kind) == ("on demand", "interruptible")
    assert spot.hours > steady.hours
    assert spot.interruptions > 1
    assert spot.money < steady.money
