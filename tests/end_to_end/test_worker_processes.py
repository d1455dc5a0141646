"""Test that Beam's external worker pool and multi_processing give the same bytes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import read_volume

from beam_inference.cli.main import main
from beam_inference.job.state import State


def free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def wait_for_port(port, process):
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)) == 0:
                return
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.1)


@pytest.fixture
def job_service(tmp_path):
    """Beam's job service and a pool that starts worker processes; the flags that lead there."""
    jobs = free_port()
    pool = free_port()
    commands = [
        ["apache_beam.runners.portability.local_job_service_main", "-p", str(jobs)],
        ["apache_beam.runners.worker.worker_pool_main", f"--service_port={pool}"],
    ]
    # The pool starts a bare "python": this environment's must be the first on the path.
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    }
    with (tmp_path / "services.log").open("w") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            for command in commands
        ]
        try:
            for port, process in zip((jobs, pool), processes, strict=True):
                wait_for_port(port, process)
            yield [
                "--runner=PortableRunner",
                f"--job_endpoint=localhost:{jobs}",
                "--environment_type=EXTERNAL",
                f"--environment_config=localhost:{pool}",
            ]
        finally:
            for process in processes:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def workers_of(output):
    state = State(f"file://{output}/_beam_inference")
    job = state.load_job()
    return {receipt.worker for receipt in state.of(job).read_receipts(range(job.plan.chunks.count))}


@pytest.mark.slow
def test_a_job_service_with_an_external_worker_pool(conv_job, job_service, tmp_path, capsys):
    path, expected = conv_job
    assert main(["run", path, *job_service]) == 0
    assert "18 of 18 chunks done" in capsys.readouterr().out
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert not any(worker.endswith(f":{os.getpid()}") for worker in workers_of(tmp_path / "out"))
    assert main(["verify", path, "--deep"]) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_there_too_a_worker_decides_what_a_job_file_leaves_open(
    open_job, job_service, tmp_path, capsys
):
    path = open_job()
    assert main(["run", path, *job_service]) == 0
    assert capsys.readouterr().err.count("the network is tried on a worker") == 1
    engine = State(f"file://{tmp_path}/out/_beam_inference").load_job().config.inference.engine
    assert main(["run", open_job(output="here", threads=1, engine=engine)]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "here"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_wrong_network_is_told_by_a_worker_of_a_pool(open_job, job_service, tmp_path, capsys):
    path = open_job("expanded")
    assert main(["run", path]) == 2
    here = capsys.readouterr().err
    assert main(["run", path, *job_service]) == 2
    assert capsys.readouterr().err.endswith(here)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_of_the_local_runner(long_job, tmp_path):
    path, expected = long_job  # of a quick one the first process leaves the second nothing
    flags = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    run = subprocess.run(
        [sys.executable, "-m", "beam_inference", "run", path, *flags, "--set=job.run_length=1"],
        capture_output=True,
        timeout=110,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 0, run.stderr
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert len(workers_of(tmp_path / "out")) == 2
