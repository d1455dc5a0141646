import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import ConfigError
from beam_inference.job.runs import chunks_of_file, missing_runs, runs_of_file


@given(st.integers(0, 9000), st.integers(0, 50), st.integers(1, 8))
def test_without_a_state_all_chunks_of_the_range_are_in_runs_once(start, length, run):
    runs = list(missing_runs((start, start + length), None, run))
    assert [index for r in runs for index in r] == list(range(start, start + length))
    assert all(len(r) <= run for r in runs)


def test_chunks_files(tmp_path):
    path = tmp_path / "chunks"
    path.write_text("5\n3\n\n5\n" + json.dumps({"chunk": 4, "fingerprint": "f"}) + "\n")
    assert chunks_of_file(f"file://{path}", "f", 10) == [3, 4, 5]
    assert list(runs_of_file(f"file://{path}", "f", 10, 2)) == [(3, 4), (5,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\n", "there is no chunk 12, only 0 … 9"),
        ("-1\n", "there is no chunk -1"),
        ("three\n", "line 1 .* neither a chunk index nor a quarantine record"),
        ("1\ntrue\n", "line 2 .* neither"),
        ('{"box": 3}\n', "line 1 .* neither"),
        ('{"chunk": 3, "fingerprint": "other"}\n', "belongs to another job"),
        ("\n", "names no chunk"),
    ],
)
def test_what_is_no_chunks_file(tmp_path, text, message):
    path = tmp_path / "chunks"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        chunks_of_file(f"file://{path}", "f", 10)


def test_an_absent_chunks_file(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        chunks_of_file(f"file://{tmp_path}/nope", "f", 10)
