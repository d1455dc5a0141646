"""The page of figures says what was measured."""

import json
import shutil

from benchmarks import page as page_module
from benchmarks.bench import receipts_per_second
from benchmarks.page import PAGE, RESULTS, page


def test_the_page_is_made_of_the_committed_results():
    assert PAGE.read_text() == page(), "run python -m benchmarks.page"


def test_a_gpus_figures_have_a_place_on_it(tmp_path, monkeypatch):
    shutil.copytree(RESULTS, tmp_path / "results")
    results = {"loop / forward": {"ratio": 1.01}, "job": {"idle share": 0.02}}
    (tmp_path / "results" / "gpu.json").write_text(json.dumps(results))
    (tmp_path / "results" / "gpu.md").write_text("A sample, torch 2.\n\n| | |\n|---|---|\n")
    monkeypatch.setattr(page_module, "RESULTS", tmp_path / "results")
    assert "A sample, torch 2." in page()
    assert "| 1.010 | met |" in page()
    assert "not measured" not in page().partition("## Against the bare network")[0]


def test_receipts_are_timed_as_they_are_now():
    found = receipts_per_second(20)
    assert found["written_per_second"] > 0
    assert found["listed_per_second"] > 0
