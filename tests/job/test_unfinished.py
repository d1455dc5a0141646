"""Commands that read what a job writes say so where it is not done."""

import shutil

from helpers import job_values, write_job

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.job.unfinished import warn_if_unfinished


def test_chunks_that_are_missing_are_told(volume_in, tmp_path, caplog):
    job = write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out"))
    url = (tmp_path / "out").as_uri()
    assert main(["run", str(job), "--chunks", "0"]) == 0
    warn_if_unfinished(url, Storage())
    assert "17 of the 18 chunks of its job are not done, and read as zeros" in caplog.text
    caplog.clear()
    assert main(["run", str(job)]) == 0
    warn_if_unfinished(url, Storage())
    assert not caplog.records
    (tmp_path / "out" / "_beam_inference" / "job.json").write_text("{")
    warn_if_unfinished(url, Storage())
    assert "whether all of" in caplog.text
    caplog.clear()
    shutil.rmtree(tmp_path / "out" / "_beam_inference")
    warn_if_unfinished(url, Storage())
    warn_if_unfinished("https://example.invalid/out", Storage())
    assert not caplog.records


def test_commands_tell_it(volume_in, tmp_path, caplog):
    output = {"dtype": "uint8", "value_range": [0, 255]}
    values = job_values(volume_in, tmp_path / "out", output=output)
    job = write_job(tmp_path / "job.yaml", values)
    assert main(["run", str(job), "--chunks", "0"]) == 0
    assert main(["convert", str(tmp_path / "out"), str(tmp_path / "copy")]) == 0
    assert "17 of the 18 chunks of its job are not done" in caplog.text
