"""Drafts of killed processes are removed by ``clean``, and when a job is complete."""

import os
import shutil
import time

import pytest
from helpers import job_values, write_job

from beam_inference.cli.main import main


@pytest.fixture
def places(volume_in, tmp_path):
    """A complete job whose state lies elsewhere, and a draft in each of its folders."""
    state = tmp_path / "state"
    values = job_values(volume_in, tmp_path / "out", job={"state_path": str(state)})
    job = write_job(tmp_path / "job.yaml", values)
    assert main(["run", str(job)]) == 0
    block = next(path for path in (tmp_path / "out").rglob("*-*_*-*_*-*"))
    receipt = next((state / "receipts").rglob("*.json"))
    drafts = [path.with_name(f"{path.name}_0123456789abcdef.__lock") for path in (block, receipt)]
    for draft in drafts:
        draft.write_bytes(b"half")
    return job, drafts, receipt


def age(paths):
    moment = time.time() - 7200
    for path in paths:
        os.utime(path, (moment, moment))


def test_clean_removes_drafts_of_the_output_and_of_its_state(places, capsys):
    job, drafts, _ = places
    assert main(["clean", str(job)]) == 0
    assert all(draft.exists() for draft in drafts), "somebody may be writing them"
    age(drafts)
    capsys.readouterr()
    assert main(["clean", str(job)]) == 0
    assert "2 drafts of killed processes removed" in capsys.readouterr().out
    assert not any(draft.exists() for draft in drafts)


def test_a_launch_that_completes_the_job_removes_them(places):
    job, drafts, receipt = places
    age(drafts)
    receipt.unlink()
    assert main(["run", str(job)]) == 0
    assert not any(draft.exists() for draft in drafts)


def test_so_does_a_stage_that_completes_a_volume(volume_in, tmp_path):
    shutil.copytree(volume_in, tmp_path / "v")
    draft = tmp_path / "v" / "info_0123456789abcdef.__lock"
    draft.write_bytes(b"half")
    age([draft])
    assert main(["pyramid", str(tmp_path / "v"), "--levels=1"]) == 0
    assert not draft.exists()


def test_levels_leave_no_draft_of_their_file(volume_in, tmp_path):
    draft = tmp_path / "levels.json_0123456789abcdef.__lock"
    draft.write_bytes(b"half")
    age([draft])
    assert main(["levels", str(volume_in), "--to", str(tmp_path / "levels.json")]) == 0
    assert not draft.exists()
