"""How many are under way, by what was measured."""

import time

import pytest

from beam_inference.worker.pace import Pace


@pytest.mark.parametrize(
    ("claim", "infer", "length", "stretches"),
    [
        (0.0, 1.0, 1, 0),  # nothing to wait for
        (0.1, 30.0, 1, 0),  # not worth it
        (0.1, 0.1, 1, 5),  # three requests of a claim take as long as three chunks
        (0.1, 0.1, 10, 1),
        (10.0, 0.1, 1, 32),
    ],
)
def test_as_many_stretches_are_begun_as_hide_their_claims(
    claim, infer, length, stretches, monkeypatch
):
    pace = Pace(8)
    assert pace.suitable_stretches(3) == 1, "nothing is measured"
    clock = iter([0.0, claim, 0.0, infer, 0.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for stage in ("claim", "infer", "read", "write"):
        pace.measure(stage, lambda: None)
    assert pace.suitable_stretches(length) == stretches


@pytest.mark.parametrize(
    ("claim", "chunk_seconds", "stretches"),
    [(0.001, 60.0, 0), (0.001, 0.05, 1), (0.1, 0.05, 15), (0.1, 60.0, 0), (0.1, 0.0, 1)],
)
def test_before_a_chunk_was_computed_no_more_is_claimed_than_is_expected_to_be_needed(
    claim, chunk_seconds, stretches, monkeypatch
):
    """Other workers could do it meanwhile."""
    pace = Pace(8, chunk_seconds)
    clock = iter([0.0, claim])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    pace.measure("claim", lambda: None)
    assert pace.suitable_stretches(1) == stretches


@pytest.mark.parametrize(
    ("seconds", "needed"), [(0.0, 1), (0.5, 1), (1.0, 2), (3.0, 5), (100.0, 8)]
)
def test_half_as_much_again_is_covered(seconds, needed, monkeypatch):
    pace = Pace(8)
    clock = iter([0.0, seconds, 0.0, 1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    pace.measure("read", lambda: None)
    pace.measure("infer", lambda: None)
    assert pace.suitable_depth("read") == needed


@pytest.mark.parametrize(("postprocess", "stretches"), [(0.0, 15), (0.9, 2)])
def test_operators_after_the_network_are_computed_meanwhile(postprocess, stretches, monkeypatch):
    """Else a worker would claim what others could do."""
    pace = Pace(8)
    clock = iter([0.0, 0.2, 0.0, 0.1, 0.0, postprocess])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for stage in ("claim", "infer", "postprocess"):
        pace.measure(stage, lambda: None)
    assert pace.suitable_stretches(1) == stretches
