"""``--json`` of run, status and verify: one object and nothing else, with what people are told."""

import json
from datetime import datetime

import pytest
from helpers import truncated

from beam_inference.cli.main import main
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job


@pytest.fixture
def told(capsys):
    """What a command prints, and its exit code: as people see it, and as one JSON value."""

    def tell(*words):
        capsys.readouterr()
        codes = main([*words]), None if words[0] == "run" else main([*words, "--json"])
        out = capsys.readouterr().out
        if codes[1] is None:
            return codes[0], out
        assert codes[0] == codes[1]
        text, brace, value = out.partition("{\n")
        return codes[0], text, json.loads(brace + value)

    return tell


NOISY = """
import torch

class Noisy(torch.nn.Module):
    def forward(self, x):
        print("a patch")
        return x

def network():
    print("a network")
    return Noisy()
"""


def test_a_job_with_a_quarantined_chunk(job, tmp_path, told):
    (tmp_path / "noisy.py").write_text(NOISY)
    model = {"path": f"{tmp_path}/noisy.py:network"}
    path = job(model=model, output={"pyramid": True}, inference={"threads": 1})
    with truncated(next((tmp_path / "in").rglob("34-52_59-65_35-43"))):
        code, out = told("run", path, "--json")
    assert code == 3
    ran = json.loads(out)
    state = State(default_state_url(load_job(path)))
    resolved = state.load_job()
    records = list(state.of(resolved).read_quarantined(0, 18))
    assert (ran["chunks"], ran["done"], ran["quarantined"]) == (
        18,
        18 - len(records),
        len(records),
    )
    assert (ran["missing"], ran["missing_of_job"], ran["done_by_this_launch"]) == (
        0,
        len(records),
        ran["done"],
    )
    assert [each["chunk"] for each in ran["quarantine"]] == [each.chunk for each in records]
    first = ran["quarantine"][0]
    assert first["box"] == {"start": list(records[0].box.start), "stop": list(records[0].box.stop)}
    assert "cannot read" in first["cause"]
    assert (ran["error"], ran["staged_at"]) == (None, None)
    assert (ran["output"], ran["state"]) == (resolved.config.output.path, state.url)
    waiting = {
        "complete": False,
        "waits": True,
        "listed": False,
        "method": "mean",
        "done": 0,
        "failures": [],
    }
    assert waiting.items() <= ran["pyramid"].items()
    assert ran["seconds"] > 0

    code, text, status = told("status", path)
    assert code == 0
    assert f"{status['done']} of {status['chunks']} chunks done" in text
    assert f"{status['missing']} missing, {status['quarantined']} quarantined" in text
    assert {key: status[key] for key in ("chunks", "done", "missing", "quarantined")} == {
        key: ran[key] for key in ("chunks", "done", "missing", "quarantined")
    }
    assert status["voxels_per_second"] == pytest.approx(
        status["chunks_per_second"] * 40 * 70 * 50 / 18
    )
    assert status["seconds_left"] == 0
    assert (status["workers"], status["patches_computed"], status["pyramid"]) == (
        1,
        None,
        ran["pyramid"],
    )
    assert datetime.fromisoformat(status["latest"]).tzinfo is not None

    missing = sorted(set(range(18)) - {each.chunk for each in records})[0]
    (receipt,) = (tmp_path / "out").rglob(f"receipts/*/*/{missing:012}.json")
    receipt.unlink()
    code, text, verified = told("verify", path, "--deep")
    assert code == 1
    assert f"missing: 1 chunks: {missing}\n" in text
    assert (
        verified["complete"],
        verified["deep"],
        verified["missing"],
        verified["first_missing"],
    ) == (
        *(False, True, 1),
        [missing],
    )
    assert (verified["done"], verified["wrong"]) == (ran["done"] - 1, [])
    assert verified["quarantine"] == ran["quarantine"]
    assert verified["pyramid"] == ran["pyramid"]


@pytest.mark.slow
def test_the_report_says_that_the_pyramid_waits(job, tmp_path):
    path = job(output={"pyramid": True})
    page = tmp_path / "report.html"
    (tmp_path / "some").write_text("3\n")
    assert main(["run", path, "--chunks", str(tmp_path / "some")]) == 0
    assert main(["report", path, "--to", str(page)]) == 0
    assert "Pyramid of the output: not made yet, because" in page.read_text()
    assert main(["report", path, "--to", str(page), "--set", "output.pyramid=false"]) == 0
    assert "Pyramid" not in page.read_text()


@pytest.mark.slow
def test_a_job_that_is_complete(job, told, tmp_path):
    path = job(output={"pyramid": True}, inference={"seams": "exchange"})
    owners = plan_job(load_job(path)).plan.totals.owners
    code, out = told("run", path, "--json")
    assert code == 0
    ran = json.loads(out)
    assert (ran["done"], ran["missing_of_job"], ran["quarantine"]) == (18, 0, [])
    assert (ran["pyramid"]["complete"], ran["pyramid"]["waits"]) == (True, False)
    assert ran["pyramid"]["done"] == ran["pyramid"]["chunks"] > 0
    code, _, status = told("status", path)
    assert (code, status["patches_computed"], status["pyramid"]) == (0, owners, ran["pyramid"])
    code, text, verified = told("verify", path, "--deep")
    assert (code, verified["complete"], verified["wrong"], verified["pyramid"]) == (
        0,
        True,
        [],
        ran["pyramid"],
    )
    assert "reads back as it was written" in text
    assert main(["report", path, "--to", str(tmp_path / "report.html")]) == 0
    levels = ran["pyramid"]["levels"]
    assert (
        f"Pyramid of the output: complete, {levels} scales by mean."
        in (tmp_path / "report.html").read_text()
    )
    code, out = told("run", path, "--json", "--set", "output.pyramid=false")  # nothing to do
    assert (code, json.loads(out)["done_by_this_launch"], json.loads(out)["pyramid"]) == (
        0,
        0,
        None,
    )


def test_bad_input_leaves_standard_output_empty(job, capsys):
    for command in ("run", "status", "verify"):
        assert main([command, job(), "--json", "--set", "input.path=nowhere"]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("error: ")
    with pytest.raises(SystemExit, match="2"):
        main(["status", job(), "--json", "--watch"])
