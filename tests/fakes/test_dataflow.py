"""The stand-in for Dataflow behaves as Google's client expects."""

import threading
import time

import pytest
import requests
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import dataflow_v1beta3
from google.cloud.dataflow_v1beta3 import JobState

from fakes.dataflow import CANCELLED, DONE, LOST, DataflowStandIn

WHERE = {"project_id": "p", "location": "r"}


def client(kind, served):
    options = ClientOptions(api_endpoint=served.url)
    return kind(credentials=AnonymousCredentials(), client_options=options, transport="rest")


@pytest.fixture
def dataflow():
    with DataflowStandIn() as served:
        yield served


@pytest.fixture
def jobs(dataflow):
    return client(dataflow_v1beta3.JobsV1Beta3Client, dataflow)


@pytest.fixture
def launch(dataflow):
    templates = client(dataflow_v1beta3.FlexTemplatesServiceClient, dataflow)

    def call(name, **parameters):
        launched = {
            "job_name": name,
            "container_spec_gcs_path": "gs://b/t.json",
            "parameters": parameters,
        }
        return templates.launch_flex_template({**WHERE, "launch_parameter": launched}).job

    return call


def end(job):
    deadline = time.monotonic() + 10
    while job.is_active:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return job.state


def test_a_launched_job_runs_and_ends_as_its_work_says(dataflow, jobs, launch):
    go = threading.Event()
    dataflow.work = lambda job: DONE if go.wait(10) else "never"
    job = launch("a", job="gs://b/job.yaml")
    found = jobs.get_job({**WHERE, "job_id": job.id})
    assert found.current_state in (JobState.JOB_STATE_QUEUED, JobState.JOB_STATE_RUNNING)
    go.set()
    assert end(dataflow.jobs[job.id]) == DONE
    assert jobs.get_job({**WHERE, "job_id": job.id}).current_state == JobState.JOB_STATE_DONE
    assert dataflow.launches[0]["parameters"] == {"job": "gs://b/job.yaml"}


def test_one_active_job_of_a_name(dataflow, jobs, launch):
    dataflow.work = lambda job: DONE if job.cancelled.wait(10) else "never"
    job = launch("a")
    with pytest.raises(exceptions.Conflict, match="already an active job named a"):
        launch("a")
    assert jobs.create_job({**WHERE, "job": {"name": "a"}}).id == job.id, (
        "creating returns the active job"
    )
    jobs.update_job(
        {**WHERE, "job_id": job.id, "job": {"requested_state": JobState.JOB_STATE_CANCELLED}}
    )
    assert end(dataflow.jobs[job.id]) == CANCELLED
    assert launch("a").id != job.id


def test_a_lost_job_is_not_known(dataflow, jobs, launch):
    dataflow.work = lambda job: LOST
    job = launch("a")
    end(dataflow.jobs[job.id])
    with pytest.raises(exceptions.NotFound):
        jobs.get_job({**WHERE, "job_id": job.id})
    assert list(jobs.list_jobs(WHERE)) == []


def test_an_injected_failure_passes(dataflow, jobs, launch):
    job = launch("a")
    dataflow.jobs[job.id].hiccups = 1
    with pytest.raises(exceptions.InternalServerError):
        jobs.get_job({**WHERE, "job_id": job.id})
    assert jobs.get_job({**WHERE, "job_id": job.id}).name == "a"


def test_lists_come_in_pages_and_by_place(dataflow, jobs, launch):
    for name in "abcde":
        launch(name)
    assert [job.name for job in jobs.list_jobs(WHERE)] == list("abcde")
    assert list(jobs.list_jobs({**WHERE, "location": "elsewhere"})) == []


def test_what_it_does_not_know_is_told_at_the_end():
    with (
        pytest.raises(AssertionError, match="GET /v1b3/projects/p/snapshots"),
        DataflowStandIn() as served,
    ):
        assert requests.get(f"{served.url}/v1b3/projects/p/snapshots", timeout=5).status_code == 404
