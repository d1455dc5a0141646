from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from beam_inference.geometry.partition import index_ranges
from beam_inference.job.runs import default_run_length


@given(st.integers(1, 10_000), st.integers(1, 600), st.integers(1, 100))
def test_index_ranges_cover_all_chunks_once(count, workers, run_length):
    ranges = index_ranges(count, workers, run_length)
    assert len(ranges) == min(-(-count // run_length), max(512, 8 * workers))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_run_length():
    assert default_run_length(10, 2) == 1
    assert default_run_length(100, 2) == 3
    assert default_run_length(10**9, 100) == 8


def test_runs_of_quick_chunks_are_longer_and_each_thread_has_one():
    assert default_run_length(64, 2, chunk_seconds=0.15) == 32
    assert default_run_length(8, 2, chunk_seconds=0.15) == 4
    assert default_run_length(10**6, 10, chunk_seconds=0.1) == 300
    assert default_run_length(64, 1, chunk_seconds=60.0) == 4
    assert default_run_length(1, 4, chunk_seconds=0.1) == 1
