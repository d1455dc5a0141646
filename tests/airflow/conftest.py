"""Fixtures for tests of the DAGs in a real Airflow.

The tests are collected only where ``AIRFLOW_PYTHON`` names the python that has Airflow. ``make
airflow-test`` makes that environment, which is apart from the one that pytest and beam-inference
are in.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import yaml
from airflow_home import MAIN, PYTHON, Airflow, google, put_folder
from fakes.dataflow import DONE, FAILED, DataflowStandIn, Job
from fakes.gcs import GcsStandIn
from helpers import job_values, write_volume

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def gcs(tmp_path_factory):
    """A bucket with a small volume `in`, a job over it, and its complete output `complete`."""
    folder = tmp_path_factory.mktemp("gcs")
    write_volume(
        folder / "in", np.random.default_rng(0).integers(0, 256, (32, 64, 32), dtype=np.uint8)
    )
    with GcsStandIn(["bucket"]) as served:
        put_folder(served, folder / "in", "in")
        served.put(
            "bucket",
            "job.yaml",
            yaml.safe_dump(job_values("gs://bucket/in", "gs://bucket/out")).encode(),
        )
        flags = ["--job=gs://bucket/job.yaml", "--output=gs://bucket/complete"]
        subprocess.run(
            [sys.executable, str(MAIN), *flags],
            env=google(served),
            check=True,
            capture_output=True,
        )
        yield served


@pytest.fixture(scope="session")
def airflow(gcs, tmp_path_factory):
    return Airflow(tmp_path_factory.mktemp("airflow") / "home", google(gcs))


@pytest.fixture(scope="session")
def execute(gcs):
    """A function that runs `main.py` as Dataflow would, and returns the state the job ends in."""

    def work(job: Job) -> str:
        flags = [f"--{name}={value}" for name, value in job.body["parameters"].items()]
        command = [sys.executable, str(MAIN), *flags, "--runner=DirectRunner"]
        done = subprocess.run(command, env=google(gcs), capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return DONE if done.returncode in (0, 3) else FAILED

    return work


@pytest.fixture
def dataflow():
    with DataflowStandIn() as served:
        yield served
