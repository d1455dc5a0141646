"""Test what ``plan`` says of a job whose workers are elsewhere."""

import json

import pytest
from helpers import DATAFLOW

from beam_inference.cli.main import main

ELSEWHERE = ["--runner=PortableRunner", "--job_endpoint=localhost:1"]
"""Nobody listens there."""
OPEN = {"device": "auto", "engine": "auto", "batch_size": "auto", "chunk_shape": "auto"}


def text_of(capsys):
    return " ".join(capsys.readouterr().out.split())


def test_what_a_worker_is_to_decide_is_told_and_no_runner_is_asked(job, capsys, tmp_path):
    assert main(["plan", job(inference=OPEN), *ELSEWHERE]) == 0
    told = text_of(capsys)
    assert "network device, engine, batch_size: to be decided on a worker, by the first" in told
    assert "figures here are those of the CPU and PyTorch and batches of 1" in told
    assert not (tmp_path / "out").exists()


def test_what_is_stated_is_not_told(job, capsys):
    assert main(["plan", job(inference={"device": "cuda", "engine": "auto"}), *ELSEWHERE]) == 0
    assert "to be decided" not in text_of(capsys)
    assert main(["plan", job(inference=OPEN)]) == 0
    assert "to be decided" not in text_of(capsys)


def test_programs_are_told_too(job, capsys):
    path = job(inference=OPEN | {"batch_size": 2})
    assert main(["plan", path, "--json", *ELSEWHERE]) == 0
    assert json.loads(capsys.readouterr().out)["decided_on_worker"] == ["device", "engine"]
    assert main(["plan", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decided_on_worker"] == []


def test_once_a_launch_has_decided_nothing_is_to_be(job, capsys):
    path = job(inference=OPEN)
    assert main(["run", path]) == 0
    capsys.readouterr()
    assert main(["plan", path, *ELSEWHERE]) == 0
    assert "to be decided" not in text_of(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suggest", *ELSEWHERE], "count for this machine"),
        (["--calibrate", *ELSEWHERE], "count for this machine"),
        (["--runer=DaskRunner"], "unknown flag --runer"),
        (["--chunks=3"], "--chunks is no flag of this command"),
        (DATAFLOW, "is on this machine, which remote workers cannot reach"),
    ],
)
def test_flags_that_fit_nothing_are_refused(job, capsys, words, message):
    assert main(["plan", job(inference=OPEN), *words]) == 2
    assert message in capsys.readouterr().err
