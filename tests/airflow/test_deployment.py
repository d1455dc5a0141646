"""Test the Dataflow DAG in a whole Airflow, with all the processes that run in production."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from itertools import pairwise

import numpy as np
import pytest
import yaml
from airflow_home import DATAFLOW_FIELDS, Airflow, free_port, google, pipeline_of, receipts_in
from fakes.dataflow import CANCELLED, DONE, DataflowStandIn
from helpers import job_values, toy, write_job, write_volume

DATAFLOW = "beam_inference_dataflow"
LOCAL = "beam_inference_local"


class Deployment:
    """Airflow's four services, its database, and its API."""

    COMPONENTS = ("dag-processor", "triggerer --skip-serve-logs", "scheduler --skip-serve-logs")

    def __init__(self, home, environment, **settings):
        port = free_port()
        self.url = f"http://localhost:{port}"
        self.airflow = Airflow(
            home,
            {
                **environment,
                "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
                "AIRFLOW__CORE__PARALLELISM": "2",
                "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
                "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
                "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
                "AIRFLOW__API_AUTH__JWT_SECRET": "only for this test " * 4,
                # no runs but the backfill's and our own
                "AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE": "False",
                "BEAM_INFERENCE_DATAFLOW_SCHEDULE": "@daily",
                **{
                    f"BEAM_INFERENCE_{name.upper()}": value
                    for name, value in DATAFLOW_FIELDS.items()
                },
                **settings,
            },
        )
        self.commands = [
            f"api-server --host localhost --port {port} --workers 1",
            *self.COMPONENTS,
        ]

    def __enter__(self):
        self.processes = [
            self.airflow.start(
                *command.split(), log=self.airflow.home / f"{command.split()[0]}.log"
            )
            for command in self.commands
        ]
        self.wait(
            "the DAG", lambda: self.airflow.query("SELECT 1 FROM dag WHERE dag_id = ?", DATAFLOW)
        )
        self.wait("the API", self.token)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait(self, what, condition, timeout=90):
        """Until something is so; else what Airflow has to say."""
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            dead = [process.args for process in self.processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(
                    f"== {file}\n{file.read_text()[-2000:]}"
                    for file in self.airflow.home.glob("*.log")
                )
                pytest.fail(
                    f"{what}: not within {timeout} s; ended: {dead}; tasks: {self.tasks()}\n{logs}"
                )
            time.sleep(0.5)
        return found

    def token(self):
        try:
            with urllib.request.urlopen(f"{self.url}/auth/token") as answer:
                return json.load(answer)["access_token"]
        except urllib.error.URLError:
            return None

    def ask(self, method, path, body):
        """Ask the API; status and answer. Asked again where SQLite had several writers at once."""
        for _ in range(10):
            status, answer = self.ask_once(method, path, body)
            if status < 500:
                break
            time.sleep(0.5)
        return status, answer

    def ask_once(self, method, path, body):
        headers = {"Authorization": f"Bearer {self.token()}", "Content-Type": "application/json"}
        url = f"{self.url}/api/v2/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def trigger(self, run_id, dag_id=DATAFLOW, **fields):
        return self.ask(
            "POST",
            f"dags/{dag_id}/dagRuns",
            {"dag_run_id": run_id, "logical_date": None, "conf": fields},
        )

    def start(self, run_id, dag_id=DATAFLOW, **fields):
        status, answer = self.trigger(run_id, dag_id, **fields)
        assert status == 200, answer

    def clear(self, run_id, dag_id=DATAFLOW):
        tasks = {
            "dag_run_id": run_id,
            "task_ids": ["run"],
            "include_downstream": True,
            "only_failed": False,
        }
        status, answer = self.ask(
            "POST", f"dags/{dag_id}/clearTaskInstances", {"dry_run": False, **tasks}
        )
        assert status == 200, answer

    def mark_failed(self, run_id, dag_id=DATAFLOW):
        path = f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/run"
        status, answer = self.ask("PATCH", path, {"new_state": "failed"})
        assert status == 200, answer

    def tasks(self, run_id="%"):
        """State of each task of a run."""
        rows = self.airflow.query(
            "SELECT task_id, state FROM task_instance WHERE run_id LIKE ?", run_id
        )
        return dict(rows)

    def runs(self, prefix):
        """State of each run whose id begins so."""
        return dict(
            self.airflow.query(
                "SELECT run_id, state FROM dag_run WHERE run_id LIKE ?", f"{prefix}%"
            )
        )

    def wait_for(self, prefix, state, count=1):
        self.wait(
            f"{count} {prefix} {state}",
            lambda: list(self.runs(prefix).values()) == [state] * count,
            110,
        )


BACKFILL = {"output": "gs://bucket/{{ ds }}/out", "roi": "0x0x0:16x32x32"}


@pytest.fixture(scope="module")
def dataflow(execute):
    with DataflowStandIn(execute) as served:
        yield served


@pytest.fixture(scope="module")
def deployment(gcs, dataflow, tmp_path_factory):
    """An Airflow with a backfill, created before anything runs because SQLite is easily locked."""
    environment = {**google(gcs), "DATAFLOW_STANDIN": dataflow.url}
    made = Deployment(tmp_path_factory.mktemp("deployment") / "home", environment)
    made.airflow.run("dags", "reserialize")
    made.airflow.run(
        *(
            "backfill",
            "create",
            "--dag-id",
            DATAFLOW,
            "--from-date",
            "2024-03-01",
            "--to-date",
            "2024-03-03",
        ),
        *("--max-active-runs", "1", "--dag-run-conf", json.dumps(BACKFILL)),
    )
    with made as running:
        yield running


def started(dataflow, count):
    """The jobs that have the newest one's name, once there are so many."""
    jobs = list(dataflow.jobs.values())
    mine = [job for job in jobs if job.name == jobs[-1].name]
    return mine if len(mine) >= count else None


def until_cancelled(job):
    job.cancelled.wait(120)
    return DONE


@pytest.mark.timeout(300)
def test_a_backfill_of_three_dates_runs_three_jobs_one_at_a_time(deployment, dataflow):
    deployment.wait_for("backfill", "success", 3)

    jobs = list(dataflow.jobs.values())
    assert len({job.name for job in jobs}) == len(jobs) == 3
    assert [job.body["parameters"]["output"] for job in jobs] == [
        f"gs://bucket/2024-03-0{day}/out" for day in (1, 2, 3)
    ]
    assert all(before.changed < after.created for before, after in pairwise(jobs))


@pytest.mark.timeout(300)
def test_clearing_the_waiting_task_cancels_the_job_and_another_goes_on(deployment, dataflow):
    dataflow.work = lambda job: DONE if started(dataflow, 2) else until_cancelled(job)
    deployment.start("cleared", output="gs://bucket/complete")
    deployment.wait("waiting", lambda: deployment.tasks("cleared").get("run") == "deferred")
    time.sleep(3)  # the triggerer takes it up
    deployment.clear("cleared")
    deployment.wait_for("cleared", "success")

    first, second = started(dataflow, 2)
    assert (first.state, second.state) == (CANCELLED, DONE)


@pytest.mark.timeout(300)
def test_marking_the_waiting_task_failed_cancels_the_job(deployment, dataflow):
    dataflow.work = until_cancelled
    deployment.start("marked", output="gs://bucket/complete")
    deployment.wait("waiting", lambda: deployment.tasks("marked").get("run") == "deferred")
    time.sleep(3)
    deployment.mark_failed("marked")
    deployment.wait_for("marked", "failed")
    deployment.wait("cancelled", lambda: [job.state for job in started(dataflow, 1)] == [CANCELLED])


def test_a_run_after_a_clear_is_a_new_job(deployment, dataflow):
    """What was done before is not accepted again: the input or the network may have been mended."""
    dataflow.work = lambda job: DONE
    deployment.start("again", output="gs://bucket/nothing")
    deployment.wait_for("again", "failed")
    deployment.clear("again")
    first, second = deployment.wait("a second job", lambda: started(dataflow, 2))
    assert (first.name, first.state) == (second.name, DONE)


@pytest.mark.timeout(300)
def test_marking_a_local_run_failed_stops_its_pipeline_and_a_clear_goes_on(deployment, tmp_path):
    write_volume(
        tmp_path / "in", np.random.default_rng(0).integers(1, 256, (32, 128, 128), dtype=np.uint8)
    )
    recompute = {"strategy": "recompute"}  # so that receipts come one after the other
    values = job_values(tmp_path / "in", tmp_path / "out", model=toy("slow"), inference=recompute)
    job = write_job(tmp_path / "job.yaml", values)
    deployment.start("stopped", LOCAL, job=str(job))
    deployment.wait("receipts", lambda: receipts_in(tmp_path / "out") >= 2)
    assert pipeline_of(job) is not None
    deployment.mark_failed("stopped", LOCAL)
    deployment.wait_for("stopped", "failed")
    deployment.wait("the end of the pipeline", lambda: pipeline_of(job) is None)
    assert receipts_in(tmp_path / "out") < 32

    deployment.clear("stopped", LOCAL)
    deployment.wait_for("stopped", "success")
    assert receipts_in(tmp_path / "out") == 32


def test_the_api_refuses_a_form_that_is_wrong(deployment):
    status, answer = deployment.trigger("wrong", roi="everything")
    assert status == 400
    assert "roi" in str(answer)


ASSET = "x://bucket/tissue"


@pytest.fixture(scope="module")
def scheduled(gcs, tmp_path_factory):
    """An Airflow whose scheduler starts runs: a DAG for each row, by the clock and by an asset."""
    folder = tmp_path_factory.mktemp("rows")
    array = np.random.default_rng(0).integers(1, 256, (16, 32, 32), dtype=np.uint8)
    write_volume(folder / "in", array)
    jobs = {
        name: str(write_job(folder / f"{name}.yaml", job_values(folder / "in", folder / name)))
        for name in ("minute", "tissue")
    }
    rows = {
        "minute": {"schedule": "* * * * *", "job": jobs["minute"]},
        "tissue": {"assets": [ASSET], "job": jobs["tissue"]},
    }
    (folder / "jobs.yaml").write_text(yaml.safe_dump(rows))
    made = Deployment(
        tmp_path_factory.mktemp("scheduled") / "home",
        google(gcs),
        AIRFLOW__SCHEDULER__USE_JOB_SCHEDULE="True",
        BEAM_INFERENCE_DATAFLOW_SCHEDULE="",
        BEAM_INFERENCE_JOBS=str(folder / "jobs.yaml"),
    )
    with made as running:
        yield running, folder


@pytest.mark.timeout(300)
def test_the_schedulers_tick_and_an_assets_event_start_runs_of_rows(scheduled):
    deployment, folder = scheduled
    deployment.wait(
        "a run by the clock",
        lambda: "success" in deployment.runs("scheduled__").values(),
        timeout=180,
    )
    assert receipts_in(folder / "minute") == 1
    assert deployment.runs("asset_triggered__") == {}
    ((asset,),) = deployment.airflow.query("SELECT id FROM asset WHERE uri = ?", ASSET)
    status, answer = deployment.ask("POST", "assets/events", {"asset_id": asset})
    assert status == 200, answer
    deployment.wait_for("asset_triggered__", "success")
    assert receipts_in(folder / "tissue") == 1
