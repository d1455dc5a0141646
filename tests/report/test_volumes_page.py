"""The page about a job of several volumes: what each stands at, and which come first."""

import shutil
from datetime import UTC, datetime
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers import job_values, truncated, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.report.volumes_page import VolumeRow, render_volumes

NAMES = ("a<b>", "broken", "gone", "whole")


class Cells(HTMLParser):
    """The text of each row of the tables."""

    def __init__(self, text):
        super().__init__()
        self.rows = []
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1] += data


@pytest.fixture
def cohort(tmp_path):
    """A job file of four volumes of two chunks each."""
    rng = np.random.default_rng(0)
    for name in NAMES:
        array = rng.integers(0, 256, (32, 32, 32), dtype=np.uint8)
        write_volume(tmp_path / "in" / name, array, block_shape=(16, 32, 32))
    values = job_values("unused", "out/{name}", job={"state_path": "state"})
    del values["input"]
    rows = [{"name": f"v{k}", "input": f"in/{name}"} for k, name in enumerate(NAMES)]
    return str(write_job(tmp_path / "job.yaml", {**values, "volumes": rows}))


def test_it_tells_of_each_volume_and_begins_with_what_is_wrong(cohort, tmp_path, capsys):
    shutil.rmtree(tmp_path / "in" / "gone")
    with truncated(next((tmp_path / "in" / "broken").rglob("*_16-32"))):
        assert main(["run", cohort]) == 3
    to = str(tmp_path / "page.html")
    capsys.readouterr()
    assert main(["report", cohort, "--to", to, "--worker-price", "3600"]) == 0
    assert "2 of 4 volumes complete" in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text()
    page = Cells(text)
    assert "script" not in page.tags
    head, *rows = page.rows
    assert "chunks done" in head
    assert [row[:2] for row in rows] == ["v1", "v2", "v0", "v3"]
    assert "finished, with quarantine" in rows[0]
    assert "0 of 2" in rows[0]
    assert "cannot be opened" in rows[1]
    assert "no volume at" in rows[1]
    assert "2 of 2" in rows[2]
    assert "2 of 4 volumes complete" in text
    assert "4</b><span>of 6 chunks done" in text
    assert main(["report", cohort, "--to", to, "--volume", "v0"]) == 0
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert main(["report", cohort, "--to", str(tmp_path / "x" / "page.html")]) == 2


def test_a_job_that_was_not_run_is_told(cohort, tmp_path, capsys):
    assert main(["report", cohort, "--to", str(tmp_path / "page.html")]) == 2
    assert "nothing to report" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_names_are_escaped_and_sums_are_of_all():
    when = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        VolumeRow("z", ("good", "complete", ""), 4, 4, 0, 2e6, 0.5),
        VolumeRow("<script>", ("busy", "not launched", "")),
    ]
    page = render_volumes("<b>", rows, when, 2.0)
    assert "<script>" not in page
    assert "<b></h1>" not in page
    assert "4</b><span>of 4 chunks done" in page
    assert "1.00</b><span>so far, at 2 an hour" in page
    assert "1 of 2 volumes complete" in page
    assert page.index("not launched") < page.index("complete</span></td>")
