"""The page about a job: what it shows is what was written, whatever became of the job."""

import json
import re
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser

import numpy as np
import pytest
from fakes.receipts import receipt, resolved
from helpers import job_values, read_volume, toy, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.report.facts import gather_facts
from beam_inference.report.page import make_report, render
from beam_inference.report.slices import PIXELS, Plane, place_to_show, window
from beam_inference.report.volume_figures import draw_planes

NOW = datetime(2026, 1, 1, tzinfo=UTC)
START = (3, -5, 2)


class Page(HTMLParser):
    """Text, ids, and whatever could make a browser fetch or run something."""

    def __init__(self, text):
        super().__init__()
        self.words = []
        self.tags = []
        self.references = []
        self.ids = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), f"{tag} {name}"
            if name.split(":")[-1] in ("href", "src", "srcset", "action", "data", "poster"):
                self.references.append(value)
            self.ids += [value] if name == "id" else []

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def checked(path):
    """The page, which stands for itself."""
    text = path.read_text()
    assert len(text) < 3_000_000
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "base"} & {*page.tags}
    assert all(
        reference.startswith(("data:image/png;base64,", "#")) for reference in page.references
    )
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    assert len(page.ids) == len({*page.ids}), "ids are unique"
    assert {r[1:] for r in page.references if r[0] == "#"} <= {*page.ids}, (
        "what is referred to is there"
    )
    return page


def report_of(tmp_path, **keys):
    state = State(f"file://{tmp_path}/out/_beam_inference")
    job = state.load_job()
    return make_report(job, state, gather_facts(job, state, **keys), NOW)


@pytest.fixture
def nasty(tmp_path):
    """A job of 18 chunks, some not done; its input has a corrupt block and a hostile name."""
    array = np.random.default_rng(0).integers(0, 256, (40, 70, 50), dtype=np.uint8)
    folder = tmp_path / "<img src=x onerror=alert(1)>&amp;"
    folder.mkdir()
    write_volume(folder / "in", array, START)
    block = min((folder / "in").glob("*/*_*-*_*"))
    block.write_bytes(block.read_bytes()[:10])
    values = job_values(folder / "in", tmp_path / "out", model=toy("position", output_channels=2))
    return str(write_job(tmp_path / "job.yaml", values)), array


def test_a_job_with_quarantined_and_missing_chunks(nasty, tmp_path, capsys):
    job, array = nasty
    (tmp_path / "some").write_text("".join(f"{chunk}\n" for chunk in range(14)))
    assert main(["run", job, "--chunks", str(tmp_path / "some")]) == 3
    assert main(["report", job, "--to", str(tmp_path / "r.html"), "--worker-price", "3600000"]) == 0
    assert "of 18 chunks done" in capsys.readouterr().out
    page = checked(tmp_path / "r.html")
    report = report_of(tmp_path)
    facts = report.facts
    done = {r.chunk for r in facts.receipts}
    assert (facts.done, facts.missing, facts.is_sampled) == (len(done), 4, False)
    assert {*facts.quarantined} == {*range(14)} - done
    assert len(facts.quarantined) == len(facts.records) > 0
    assert "4 chunks missing" in page.text
    assert f"{facts.done} of 18 chunks done" in page.text
    assert "not finished (" in page.text
    for record in facts.records:
        assert " ".join(record.cause.split()) in page.text, "as text, tags and all"
    money = float(
        re.search(r"([\d.,e-]+) so far, at 3,600,000 an hour", page.text)[1].replace(",", "")
    )
    assert money == pytest.approx(3_600_000 * report.worker_hours, abs=0.006)

    grid = report.job.plan.chunks
    output = read_volume(tmp_path / "out")
    finished = np.zeros(array.shape, bool)
    for chunk in done:
        finished[grid.core_box(chunk).slices_in(grid.roi)] = True
    for plane in report.planes:
        where = plane.box.slices_in(grid.roi)
        there = np.squeeze(finished[where], plane.axis)
        assert plane.steps == (1, 1)
        np.testing.assert_array_equal(~np.isnan(plane.output).any(axis=0), there)
        expected = np.squeeze(output[(slice(None), *where)], plane.axis + 1)
        np.testing.assert_array_equal(plane.output[:, there], expected[:, there])
        seen = ~np.isnan(plane.source)
        np.testing.assert_array_equal(
            plane.source[seen], np.squeeze(array[where], plane.axis)[seen]
        )
    assert np.isnan(report.planes[0].source).any(), "the corrupt block"
    for channel, found in zip(output, report.statistics, strict=True):
        values = channel[finished]
        assert (found.min, found.max) == (values.min(), values.max())
        assert found.mean == pytest.approx(values.mean(dtype=np.float64))
        assert found.zeros == (values == 0).sum()
    read = sum(r.seconds["read"] for r in facts.receipts)
    assert report.stages[0].total == pytest.approx(read)
    in_cells = np.zeros(grid.shape[1:], int)
    for chunk in done:
        in_cells[grid.position(chunk)[1:]] += 1
    np.testing.assert_array_equal(facts.done_in_cells, in_cells)
    assert [note.launch for note in facts.launches] == [facts.receipts[0].launch]
    assert facts.launches[0].summary.done == len(done)


@pytest.mark.slow
def test_of_many_receipts_some_are_read_and_it_is_said(job, tmp_path):
    path = job()
    assert main(["run", path]) == 0
    report = report_of(tmp_path, receipts_read=5)
    assert (report.facts.done, len(report.facts.receipts), report.facts.is_sampled) == (18, 5, True)
    text = Page(render(report)).text
    assert "18 chunks have a receipt; 5 of these receipts, drawn by lot" in text


def test_what_is_gone_or_damaged_is_said(job, tmp_path):
    path = job()
    assert main(["run", path]) == 0
    some = min((tmp_path / "out" / "_beam_inference" / "receipts").rglob("*.json"))
    some.write_text("{")
    (tmp_path / "in").rename(tmp_path / "moved")
    (tmp_path / "out" / "info").unlink()
    assert main(["report", path, "--to", str(tmp_path / "r.html")]) == 0
    text = checked(tmp_path / "r.html").text
    assert "The input cannot be opened: no volume at" in text
    assert "The output is gone." in text
    assert "1 receipts cannot be believed" in text
    assert "17 of 18 chunks done" in text
    assert "The result" not in text


def test_a_job_of_which_nothing_is_done(job, tmp_path):
    path = job()
    (tmp_path / "some").write_text("0\n")
    assert main(["run", path, "--chunks", str(tmp_path / "some")]) == 0
    for file in (tmp_path / "out" / "_beam_inference" / "receipts").rglob("*.json"):
        file.unlink()
    for file in (tmp_path / "out" / "_beam_inference" / "launches").glob("*.json"):
        file.unlink()
    assert main(["report", path, "--to", str(tmp_path / "r.html")]) == 0
    page = checked(tmp_path / "r.html")
    assert "0 of 18 chunks done" in page.text
    assert "No chunk has a receipt yet." in page.text
    assert "no end is recorded" in page.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", ["one chunk", "one slice", "many channels", "classes", "exchange", "integers"]
)
def test_jobs_of_all_shapes(tmp_path, which):
    shape = (16, 32, 32)
    sections = {}
    if which == "one slice":
        shape = (1, 120, 900)
        sections = {
            "inference": {
                "patch_shape": [1, 32, 32],
                "patch_overlap": [0, 8, 8],
                "chunk_shape": [1, 64, 64],
            },
            "output": {"block_shape": [1, 32, 32]},
        }
    elif which == "many channels":
        (tmp_path / "network.py").write_text(
            "import torch\n\ndef many():\n    torch.manual_seed(0)\n    return torch.nn.Conv3d(1, "
            "40, 1)\n"
        )
        network = {
            "path": f"{tmp_path}/network.py:many",
            "output_channels": 40,
            "activation": "softmax",
        }
        sections = {"model": network | {"normalize": "unit"}}
        shape = (20, 40, 40)
    elif which == "classes":
        sections = {
            "model": {**toy("three"), "output_channels": 3},
            "output": {"dtype": "uint8"},
        }
    elif which == "exchange":
        shape = (40, 70, 50)
        sections = {"inference": {"seams": "exchange"}}
    elif which == "integers":
        sections = {
            "output": {"dtype": "uint8", "value_range": [0, 1]},
            "model": {"normalize": "unit"},
        }
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    write_volume(tmp_path / "in", array, START)
    operators = [{"operator": "argmax"}] if which == "classes" else []
    values = job_values(tmp_path / "in", tmp_path / "out", **sections) | {"postprocess": operators}
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 0
    assert main(["report", job, "--to", str(tmp_path / "r.html")]) == 0
    page = checked(tmp_path / "r.html")
    report = report_of(tmp_path)
    assert "every chunk has a receipt" in page.text
    output = read_volume(tmp_path / "out")
    for plane in report.planes:
        assert len(plane.output) == min(12, len(output))
        rows, columns = plane.axes
        steps = plane.steps
        assert max(plane.output.shape[1:]) <= PIXELS
        strides = [slice(None)] * 4
        strides[rows + 1] = slice(None, None, steps[0])
        strides[columns + 1] = slice(None, None, steps[1])
        where = plane.box.slices_in(report.job.plan.chunks.roi)
        expected = np.squeeze(output[(slice(None), *where)][tuple(strides)], plane.axis + 1)[
            : len(plane.output)
        ]
        np.testing.assert_array_equal(plane.output, expected)
        np.testing.assert_array_equal(
            plane.source, np.squeeze(array[where][tuple(strides[1:])], plane.axis)
        )
    assert max(max(plane.steps) for plane in report.planes) == (3 if which == "one slice" else 1)
    if which == "one chunk":
        assert "Seams" not in page.text
    if which == "many channels":
        assert "The first 12 of 40 channels are looked at." in page.text
        assert len(report.statistics) == 40
    if which == "exchange":
        assert [stage.stage for stage in report.stages] == ["read", "infer", "merge", "write"]
        assert {*report.speed.rates} == {"patches computed", "finished"}
        assert report.facts.summed == len(report.facts.sums) == report.job.plan.totals.owners


def test_a_place_with_contents():
    grid = ChunkGrid(BoundingBox((0, 0, 0), (30, 30, 30)), (10, 10, 10))
    plain = np.zeros((1, 10, 10, 10), np.uint8)
    contents = np.arange(1000, dtype=np.uint16).reshape(1, 10, 10, 10)
    middle = grid.index((1, 1, 1))
    corner = grid.index((0, 0, 0))
    near = grid.index((1, 1, 2))

    def of(chunk, array):
        return receipt(chunk, array, grid=grid)

    assert place_to_show(grid, []) == (15, 15, 15)
    assert place_to_show(grid, [of(middle, contents), of(corner, contents)]) == (15, 15, 15)
    assert place_to_show(grid, [of(middle, plain), of(corner, contents), of(near, contents)]) == (
        15,
        15,
        25,
    )
    assert place_to_show(grid, [of(corner, plain)]) == (5, 5, 5)


def test_what_is_read_is_bounded_however_large_the_volume():
    small = resolved()
    values = json.loads(small.model_dump_json())
    for key in ("input_bounds", "roi", "output_bounds"):
        values[key] = {"start": [0, 0, 0], "stop": [10_000, 400_000, 500_000]}
    large = ResolvedJob.model_validate(values)
    place = (5_000, 399_999, 3)
    for axis in range(3):
        box = window(large, axis, place)
        assert large.plan.chunks.roi.contains(box)
        assert all(a <= p < b for a, p, b in zip(box.start, place, box.stop, strict=True))
        assert box.shape[axis] == 1
        assert box.size < 2_000_000
        assert window(small, axis, (32, 32, 32)).size == 64 * 64, "a small plane is read whole"


def test_what_is_wrong_with_the_words_is_said(job, tmp_path, capsys, monkeypatch):
    path = job()
    for words, told in (
        (["--to", str(tmp_path / "r.pdf")], "ends with .html"),
        (["--to", str(tmp_path / "nowhere" / "r.html")], "there is no folder"),
        (["--to", str(tmp_path / "r.html")], "nothing to report"),
    ):
        assert main(["report", path, *words]) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", path]) == 2
    assert "pip install 'beam-inference[report]'" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


@pytest.mark.slow
def test_planes_of_noise_leave_room_on_the_page():
    random = np.random.default_rng(0)
    planes = []
    for axis in range(3):
        shape = [PIXELS] * 3
        shape[axis] = 1
        arrays = random.random((4, PIXELS, PIXELS)).astype(np.float32)
        planes.append(
            Plane(axis, BoundingBox((0, 0, 0), tuple(shape)), (1, 1), arrays[0], arrays[1:])
        )
    grid = ChunkGrid(BoundingBox((0, 0, 0), (PIXELS,) * 3), (64, 64, 64))
    assert len(draw_planes(planes, grid, [0, 1, 2], [(0, 1)] * 3, (8.0, 8.0, 8.0))) < 2_600_000
