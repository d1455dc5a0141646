"""The page of figures says what was measured."""

from benchmarks.bench import receipts_per_second
from benchmarks.page import PAGE, page


def test_the_page_is_made_of_the_committed_results():
    assert PAGE.read_text() == page(), "run python -m benchmarks.page"


def test_receipts_are_timed_as_they_are_now():
    found = receipts_per_second(20)
    assert found["written_per_second"] > 0
    assert found["listed_per_second"] > 0
