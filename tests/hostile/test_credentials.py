"""Credentials in job files, and in errors of users' code: never repeated, wherever text goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hostile.conftest import run_words

from beam_inference.cli.main import main

SECRET = "pl4nted"
OVERRIDES = {
    101: f"input.path=https://user:{SECRET}@localhost:1/em",
    407: f"input.path=https://user:{SECRET}@127.0.0.1:1/em",
    408: f"input.path=https://127.0.0.1:1/em?X-Amz-Signature={SECRET}",
    410: f"output.path=s3://user:{SECRET}@bucket/em",
    411: f"storage.s3.secret_key={SECRET}",
    412: f"storage.s3.endpoint=http://user:{SECRET}@127.0.0.1:1",
    414: f"model.path=https://user:{SECRET}@127.0.0.1:1/net.pt",
    415: f"input.path=https://127.0.0.1:1/em#token={SECRET}",
    419: f"input.path=https://user%3A{SECRET}@127.0.0.1:1/em",
    420: f"input.path=https://user%253A{SECRET}%2540127.0.0.1:1/em",
    "420: parameter": f"input.path=https://127.0.0.1:1/em%253Ftoken%253D{SECRET}",
    421: f'input={{spec: {{driver: zarr3, headers: ["Authorization: {SECRET}"]}}}}',
    423: f"input={{spec: {{driver: zarr3, kvstore: 'https://user:{SECRET}@127.0.0.1:1/em'}}}}",
    424: f"job.state_path=gs://bucket/state?token={SECRET}",
    425: f"https://user:{SECRET}@host=1",
    "425: as a value": f"input.secret_key={SECRET}",
    "no such type": f"inference.batch_size=https://user:{SECRET}@host",
}


@pytest.mark.parametrize("row", OVERRIDES)
def test_credentials_in_a_job_are_refused_and_not_repeated(refused, job, row):
    assert SECRET not in refused(["plan", job(), "--set", OVERRIDES[row]])


@pytest.mark.parametrize("row", [101, 408, 415, 420])
def test_nor_are_those_of_volumes_on_the_command_line(refused, tmp_path, row):
    url = OVERRIDES[row].partition("=")[2]
    assert SECRET not in refused(["convert", url, tmp_path / "out"])


def test_a_path_that_holds_a_word_like_token_is_not_found(refused, job):  # 417
    refused(["plan", job(), "--set", "input.path=/nowhere/token/em"])


OPERATOR = f"""
def fail(values):
    raise ValueError(
        "\\x1b]0;owned\\x07 <script>alert(1)</script> cannot reach https://user:{SECRET}@host/x "
        "and https://host/y?token={SECRET} and https://host/z#token={SECRET}"
    )
"""


@pytest.fixture
def failed_job(job, tmp_path):
    """A job whose operator has failed everywhere, with a hostile text; in a folder of its own."""
    (tmp_path / "<b>op").mkdir()
    function = tmp_path / "<b>op" / "operator.py"
    function.write_text(OPERATOR)
    own = {"operator": "own", "function": f"{function}:fail", "output_channels": 1}
    path = Path(job())
    path.write_text(path.read_text() + f"postprocess: [{json.dumps(own)}]\n")
    return path.rename(tmp_path / "<script>job.yaml")


def test_errors_of_users_code_are_clean_wherever_they_go(failed_job, tmp_path, capsys):  # 350, 351
    page = tmp_path / "report.html"
    assert run_words(["run", failed_job]) in (1, 3)
    for words in (
        ["status", failed_job],
        ["verify", failed_job],
        ["report", failed_job, "--to", page],
        ["status", failed_job, "--json"],
    ):
        run_words(words)
    told = "".join(capsys.readouterr())
    assert "cannot reach" in told
    assert SECRET not in told
    assert "\x1b" not in told
    assert "\x07" not in told
    state = tmp_path / "out" / "_beam_inference"
    records = [file.read_text() for file in state.rglob("*") if file.is_file()]
    assert any("cannot reach" in text for text in records)
    assert not any(SECRET in text or "\x1b" in text or "u001b" in text for text in records)
    html = page.read_text()  # 349
    assert SECRET not in html
    assert "<script>alert(1)" not in html
    assert "<script>job" not in html


def test_records_of_others_are_cleaned_as_they_are_read(failed_job, tmp_path, capsys):  # 351
    run_words(["run", failed_job])
    state = tmp_path / "out" / "_beam_inference"
    for file in [*state.rglob("quarantine/**/*.json"), state / "quarantine.jsonl"]:
        text = file.read_text().replace("cannot reach", f"\\u001b[2J https://u:{SECRET}@h")
        file.write_text(text)
    capsys.readouterr()
    for words in (["status", failed_job], ["verify", failed_job]):
        run_words(words)
    told = "".join(capsys.readouterr())
    assert "\x1b" not in told
    assert SECRET not in told


def test_errors_of_a_factory_are_clean(job, tmp_path, capsys):
    factory = tmp_path / "net.py"
    factory.write_text(OPERATOR.replace("fail(values)", "make()"))
    assert main(["run", job(model={"path": f"{factory}:make"})]) == 2
    told = "".join(capsys.readouterr())
    assert "the factory failed" in told
    assert SECRET not in told
    assert "\x1b" not in told
