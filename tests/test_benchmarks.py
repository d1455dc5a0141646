"""The page of figures says what was measured."""

from benchmarks.page import PAGE, page


def test_the_page_is_made_of_the_committed_results():
    assert PAGE.read_text() == page(), "run python -m benchmarks.page"
