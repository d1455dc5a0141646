"""Test the DAGs by `airflow dags test` with stand-ins for Dataflow and Cloud Storage."""

import os
import re
import signal
import time

import numpy as np
import pytest
import yaml
from airflow_home import DATAFLOW_FIELDS, pipeline_of, put_folder, receipts_in, wait_until
from fakes.dataflow import CANCELLED, DONE, FAILED, LOST
from helpers import job_values, read_volume, toy, write_job, write_volume

from beam_inference.cli.main import main

COMPLETE = {**DATAFLOW_FIELDS, "output": "gs://bucket/complete"}


@pytest.fixture
def volume(tmp_path):
    write_volume(
        tmp_path / "in", np.random.default_rng(0).integers(1, 256, (32, 64, 64), dtype=np.uint8)
    )
    return tmp_path / "in"


def test_a_local_run_equals_a_plain_one_and_is_verified(airflow, volume, tmp_path):
    job = write_job(tmp_path / "job.yaml", job_values(volume, tmp_path / "plain"))
    assert main(["run", str(job)]) == 0

    fields = {
        "job": str(job),
        "output": str(tmp_path / "{{ ds }}"),
        "deep": True,
        "beam_flags": {"direct_num_workers": 1},
    }
    done = airflow.test("beam_inference_local", fields)

    assert done.code == 0, done.log
    assert done.states == {"run": "success", "verify": "success"}
    assert "--labels=airflow-version=" in done.log
    (output,) = tmp_path.glob("20??-??-??")
    np.testing.assert_array_equal(read_volume(output), read_volume(tmp_path / "plain"))


def test_a_local_run_of_steps_does_and_verifies_all_of_them(airflow, volume, tmp_path):
    model = {"normalize": {"levels": str(tmp_path / "levels.json")}}
    steps = {
        "levels": "levels in --to levels.json",
        "map": job_values(volume, tmp_path / "map", model=model),
        "coarse": "pyramid map --num-scales 1 --method mean",
    }
    file = tmp_path / "steps.yaml"
    file.write_text(yaml.safe_dump({"steps": steps}, sort_keys=False))

    done = airflow.test("beam_inference_local", {"job": str(file), "deep": True})

    assert done.code == 0, done.log
    assert done.states == {"run": "success", "verify": "success"}
    assert "3 of 3 steps complete" in done.log


def test_a_local_run_with_a_corrupt_block_fails_at_the_verification(airflow, volume, tmp_path):
    block = min(file for file in volume.rglob("*-*_*-*_*-*") if file.is_file())
    block.write_bytes(block.read_bytes()[:100])
    job = write_job(tmp_path / "job.yaml", job_values(volume, tmp_path / "out"))

    done = airflow.test("beam_inference_local", {"job": str(job)})

    assert done.code != 0
    assert done.states == {"run": "success", "verify": "failed"}
    assert "quarantined" in done.log


@pytest.mark.timeout(200)
def test_a_local_run_whose_pipeline_is_killed_is_resumed_by_a_retry(airflow, volume, tmp_path):
    job = write_job(tmp_path / "job.yaml", job_values(volume, tmp_path / "out", model=toy("slow")))
    process = airflow.start_test("beam_inference_local", {"job": str(job), "deep": True})
    wait_until(lambda: receipts_in(tmp_path / "out") >= 2)
    os.kill(pipeline_of(job), signal.SIGKILL)

    done = airflow.finish_test(process, "beam_inference_local")

    assert done.code == 0, done.log[-5000:]
    assert done.attempts["run"] == 2
    by_the_retry, total = re.search(
        r"8 of (8) chunks done.*\((\d+) by this launch\)", done.log
    ).group(2, 1)
    assert int(by_the_retry) <= int(total) - 2


def test_a_refused_local_job_is_not_tried_again(airflow, tmp_path):
    done = airflow.test("beam_inference_local", {"job": str(tmp_path / "absent.yaml")})
    assert done.states == {"run": "failed", "verify": "upstream_failed"}
    assert done.attempts["run"] == 1
    assert "a retry would not help" in done.log


@pytest.mark.timeout(200)
def test_a_dataflow_run_waits_for_its_input_runs_the_template_and_is_verified(
    airflow, gcs, dataflow, execute, tmp_path
):
    """The stand-in runs main.py; the input is written only when the sensor waits for it."""
    dataflow.work = execute
    write_volume(tmp_path / "in", np.ones((32, 64, 32), np.uint8))
    fields = {
        **DATAFLOW_FIELDS,
        "input": "gs://bucket/late",
        "output": "gs://bucket/out",
        "roi": "0x0x0:16x64x32",
    }
    asked = gcs.requests["GET object"]
    process = airflow.start_test("beam_inference_dataflow", fields, DATAFLOW_STANDIN=dataflow.url)
    # the sensor's own look, and the first of its trigger
    wait_until(lambda: gcs.requests["GET object"] >= asked + 2)
    assert not dataflow.launches
    put_folder(gcs, tmp_path / "in", "late")
    done = airflow.finish_test(process, "beam_inference_dataflow")

    assert done.code == 0, done.log[-5000:]
    assert done.states == {"wait_for_input": "success", "run": "success", "verify": "success"}
    (launch,) = dataflow.launches
    assert launch["parameters"]["roi"] == "0x0x0:16x64x32"
    assert launch["parameters"]["resume"] == "true"
    assert gcs.names("bucket", "out/")


def test_what_is_asked_of_dataflow(airflow, dataflow):
    fields = {
        **COMPLETE,
        "gpu": "l4",
        "gpu_count": 1,
        "max_workers": 8,
        "service_account": "w@p.iam.gserviceaccount.com",
        "temp_location": "gs://bucket/temp",
    }
    done = airflow.test("beam_inference_dataflow", fields, DATAFLOW_STANDIN=dataflow.url)
    assert done.code == 0, done.log[-5000:]
    assert done.states == {"wait_for_input": "skipped", "run": "success", "verify": "success"}
    (launch,) = dataflow.launches
    assert launch["containerSpecGcsPath"] == DATAFLOW_FIELDS["template"]
    assert launch["parameters"] == {
        "job": "gs://bucket/job.yaml",
        "sdk_container_image": DATAFLOW_FIELDS["sdk_container_image"],
        "output": "gs://bucket/complete",
        "resume": "true",
        "gpu": "l4",
        "gpu_count": "1",
    }
    assert launch["environment"] == {
        "maxWorkers": "8",
        "serviceAccountEmail": "w@p.iam.gserviceaccount.com",
        "tempLocation": "gs://bucket/temp",
    }


def test_a_job_that_is_done_but_incomplete_fails_at_the_verification(airflow, dataflow):
    fields = {**DATAFLOW_FIELDS, "output": "gs://bucket/nothing"}
    done = airflow.test("beam_inference_dataflow", fields, DATAFLOW_STANDIN=dataflow.url)
    assert done.code != 0
    assert done.states == {"wait_for_input": "skipped", "run": "success", "verify": "failed"}
    assert "nothing to verify" in done.log


def test_a_failing_job_is_tried_again_and_then_fails_the_run(airflow, dataflow):
    dataflow.work = lambda job: FAILED
    done = airflow.test("beam_inference_dataflow", COMPLETE, DATAFLOW_STANDIN=dataflow.url)
    assert done.code != 0
    assert done.states == {
        "wait_for_input": "skipped",
        "run": "failed",
        "verify": "upstream_failed",
    }
    assert len(dataflow.launches) == done.attempts["run"] == 6
    assert len({launch["jobName"] for launch in dataflow.launches}) == 1


def test_a_lost_job_is_started_anew(airflow, dataflow):
    endings = iter([LOST, DONE])
    dataflow.work = lambda job: next(endings)
    done = airflow.test("beam_inference_dataflow", COMPLETE, DATAFLOW_STANDIN=dataflow.url)
    assert done.code == 0, done.log[-5000:]
    assert len(dataflow.launches) == done.attempts["run"] == 2


def api_fails_once(job):
    job.hiccups = 1
    while job.hiccups:
        time.sleep(0.05)


def test_a_retry_waits_for_the_job_that_still_runs(airflow, dataflow):
    def work(job):
        api_fails_once(job)
        time.sleep(8)  # the retry comes after one second
        return DONE

    dataflow.work = work
    done = airflow.test("beam_inference_dataflow", COMPLETE, DATAFLOW_STANDIN=dataflow.url)
    assert done.code == 0, done.log[-5000:]
    assert done.attempts["run"] == 2
    assert len(dataflow.launches) == 1
    assert "was started by an earlier attempt: JOB_STATE_RUNNING" in done.log


def test_a_retry_accepts_the_job_that_is_done(airflow, dataflow):
    def work(job):
        api_fails_once(job)
        time.sleep(5)
        return DONE

    dataflow.work = work
    late = {"AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "8"}
    done = airflow.test("beam_inference_dataflow", COMPLETE, DATAFLOW_STANDIN=dataflow.url, **late)
    assert done.code == 0, done.log[-5000:]
    assert done.attempts["run"] == 2
    assert len(dataflow.launches) == 1
    assert "was started by an earlier attempt: JOB_STATE_DONE" in done.log


def test_a_job_cancelled_in_dataflow_is_not_started_again(airflow, dataflow):
    dataflow.work = lambda job: CANCELLED
    done = airflow.test("beam_inference_dataflow", COMPLETE, DATAFLOW_STANDIN=dataflow.url)
    assert done.states["run"] == "failed"
    assert len(dataflow.launches) == done.attempts["run"] == 1
    assert "was cancelled. What it has done is kept" in done.log
