"""An Airflow of our own, run as other processes, by the python that ``AIRFLOW_PYTHON`` names."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.gcs import GcsStandIn

PYTHON = os.environ.get("AIRFLOW_PYTHON")
TEMPLATES = Path(__file__).parents[1] / "templates"
MAIN = TEMPLATES / "main.py"
CONNECTION = {
    "conn_type": "google_cloud_platform",
    "extra": {"is_anonymous": True, "project": "p"},
}
DATAFLOW_FIELDS = {
    "job": "gs://bucket/job.yaml",
    "region": "europe-west4",
    "template": "gs://bucket/template.json",
    "sdk_container_image": "europe-west4-docker.pkg.dev/p/r/beam-inference:1",
}
"""What a run of the Dataflow DAG cannot do without."""


@dataclass
class DagRun:
    """How a run of a DAG ended."""

    code: int
    log: str
    states: dict[str, str]
    attempts: dict[str, int]


class Airflow:
    """Airflow's command line, with a home and a database of its own.

    Attributes:
        environment: What its processes see, besides what each call adds.
    """

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self.home = home
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("AIRFLOW", "BEAM_INFERENCE"))
            },
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(TEMPLATES / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "1",
            "AIRFLOW_CONN_GOOGLE_CLOUD_DEFAULT": json.dumps(CONNECTION),
            "BEAM_INFERENCE_PYTHON": sys.executable,
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
            **environment,
        }
        (home / "config").mkdir(parents=True)
        shutil.copy(
            Path(__file__).parent / "airflow" / "airflow_local_settings.py", home / "config"
        )
        self.run("db", "migrate")

    def start(
        self, *arguments: str, log: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its output goes to `log` or to a pipe."""
        with log.open("w") if log else nullcontext(subprocess.PIPE) as output:
            return subprocess.Popen(
                [str(PYTHON), "-m", "airflow", *arguments],
                env={**self.environment, **environment},
                cwd=self.home,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen[str], timeout: float) -> str:
        """Return what a command prints.

        It is killed if it takes too long, because `dags test` ignores gentler signals.
        """
        try:
            return process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(
                f"{process.args!r} took more than {timeout} s:\n{process.communicate()[0][-5000:]}"
            )

    def run(self, *arguments: str, timeout: float = 60, **environment: str) -> str:
        """Run a command that must succeed, and return its output."""
        process = self.start(*arguments, log=None, **environment)
        output = self.finish(process, timeout)
        assert process.returncode == 0, output[-5000:]
        return output

    def test(
        self, dag_id: str, fields: Mapping[str, Any], timeout: float = 110, **environment: str
    ) -> DagRun:
        """Run a DAG in one process by `airflow dags test`, with its retries and deferrals."""
        return self.finish_test(self.start_test(dag_id, fields, **environment), dag_id, timeout)

    def start_test(
        self, dag_id: str, fields: Mapping[str, Any], **environment: str
    ) -> subprocess.Popen[str]:
        """Start `airflow dags test`, for :meth:`finish_test` to wait for."""
        fields_json = json.dumps(fields)
        return self.start("dags", "test", dag_id, "--conf", fields_json, log=None, **environment)

    def finish_test(
        self, process: subprocess.Popen[str], dag_id: str, timeout: float = 110
    ) -> DagRun:
        """Wait for a run of `airflow dags test`, and return how it ended."""
        log = self.finish(process, timeout)
        newest = "run_id = (SELECT run_id FROM dag_run WHERE dag_id = ? ORDER BY id DESC LIMIT 1)"
        rows = self.query(
            f"SELECT task_id, state, try_number FROM task_instance WHERE dag_id = ? AND {newest}",
            dag_id,
            dag_id,
        )
        states, attempts = ({row[0]: row[column] for row in rows} for column in (1, 2))
        return DagRun(process.returncode, log, states, attempts)

    def query(self, sql: str, *values: str) -> list[tuple[Any, ...]]:
        """Rows that the database returns."""
        connection = sqlite3.connect(self.home / "airflow.db", timeout=30)
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return int(listening.getsockname()[1])


def pipeline_of(job: Path) -> int | None:
    """The process that runs `main.py` for a job file."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if str(MAIN) in words and f"--job={job}" in words:
                return int(folder.name)
    return None


def receipts_in(output: Path) -> int:
    """Number of chunks that are done."""
    return len(list((output / "_beam_inference" / "receipts").rglob("*.json")))


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def put_folder(gcs: GcsStandIn, folder: Path, name: str) -> None:
    """Copy a folder into the bucket."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            gcs.put("bucket", f"{name}/{path.relative_to(folder)}", path.read_bytes())


def google(gcs: GcsStandIn) -> dict[str, str]:
    """An environment in which Cloud Storage is the stand-in."""
    urls = {"STORAGE_EMULATOR_HOST": gcs.url, "TENSORSTORE_GCS_HTTP_URL": gcs.url}
    return {**os.environ, **urls, "NO_GCE_CHECK": "true"}
