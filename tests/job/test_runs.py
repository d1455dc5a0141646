import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import WorkerFault
from beam_inference.job.runs import missing_runs, read_chunk_list, runs_of_list


@given(st.integers(0, 9000), st.integers(0, 50), st.integers(1, 8))
def test_without_a_state_all_chunks_of_the_range_are_in_runs_once(start, length, run):
    runs = list(missing_runs((start, start + length), None, run))
    assert [index for r in runs for index in r] == list(range(start, start + length))
    assert all(len(r) <= run for r in runs)


def test_the_list_of_a_launch_is_read_in_runs(tmp_path):
    path = tmp_path / "a.chunks"
    path.write_text("3\n4\n5\n")
    assert read_chunk_list(f"file://{path}", 6) == [3, 4, 5]
    assert list(runs_of_list(f"file://{path}", 6, 2)) == [(3, 4), (5,)]


@pytest.mark.parametrize("text", ["", "3\n9\n", "-1\n", "three\n", None])
def test_a_list_that_is_not_as_it_was_written_is_a_fault_of_the_worker(tmp_path, text):
    path = tmp_path / "a.chunks"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WorkerFault, match="chunks"):
        read_chunk_list(f"file://{path}", 6)
