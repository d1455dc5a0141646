"""Jobs on Flink, Spark and Prism by the runners' names: real servers, which the launch starts.

FLINK_JOB_SERVER_JAR, SPARK_JOB_SERVER_JAR and PRISM_LOCATION name the programs; without them Beam
downloads some only where DOWNLOAD_JOB_SERVERS is set.
"""

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from clusters.hosts import free_port, listens, wait_until
from clusters.page import commands_of, with_names
from clusters.programs import job_server_flags, skip_if_refused
from helpers import read_volume

from beam_inference.job.state import State

FLAGS = {
    "Flink": ["--parallelism=2"],
    "Spark": ["--spark_master_url=local[2]"],
    "Prism": [],
}


@pytest.fixture(params=FLAGS)
def runner(request, tmp_path, monkeypatch):
    """Flags of a runner, whose servers keep their files in a folder of the test."""
    flags = [
        f"--runner={request.param}Runner",
        *job_server_flags(request.param, tmp_path),
        "--job_server_jvm_property=-Xmx1g",
        *FLAGS[request.param],
    ]
    skip_if_refused(flags)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    return flags


def servers_of(folder):
    """Processes other than this one's children that have a folder of ours in their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def assert_nothing_is_left(tmp_path):
    folder = tmp_path / "temporary" / "beam-inference-job-server-"
    deadline = time.monotonic() + 20
    while servers_of(folder) or list(folder.parent.glob(f"{folder.name}*")):
        assert time.monotonic() < deadline, servers_of(folder)
        time.sleep(0.1)


def start(path, runner):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", path, *runner],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def count_receipts(output):
    state = State(f"file://{output}/_beam_inference")
    job = state.load_job()
    return 0 if job is None else state.of(job).count_receipts(0, job.plan.chunks.count)


def wait_for_receipts(run, output, count=2):
    while run.poll() is None and count_receipts(output) < count:
        time.sleep(0.1)
    assert run.poll() is None, run.communicate()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_same_bytes_and_nothing_left_behind(conv_job, runner, tmp_path):
    path, expected = conv_job
    with start(path, runner) as run:
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, out + err
    assert "18 of 18 chunks done" in out
    assert "localhost" not in out + err, "where our own server listens is nobody's concern"
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_of_the_page(conv_job, runner, tmp_path):
    path, expected = conv_job
    commands = [with_names(each, {"job.yaml": path}) for each in commands_of("Without a cluster")]
    (command,) = [each for each in commands if runner[0] in each]
    told = {word.partition("=")[0] for word in command}
    more = [flag for flag in runner if flag.partition("=")[0] not in told]
    with start(path, [*command[3:], *more]) as run:
        out, err = run.communicate(timeout=300)
    assert run.returncode == 0, out + err
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_to_the_whole_group(slow_job, runner, times, tmp_path):
    path, expected = slow_job
    with start(path, runner) as run:
        wait_for_receipts(run, tmp_path / "out")
        os.killpg(run.pid, signal.SIGINT)
        if times == 2:
            time.sleep(0.5)
            os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130, out + err
    assert_nothing_is_left(tmp_path)
    if times == 1:
        assert "to do what is missing" in out
        assert 0 < count_receipts(tmp_path / "out") < 18
        with start(path, runner) as run:
            out, err = run.communicate(timeout=300)
        assert run.returncode == 0, out + err
        np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_launcher_is_killed(slow_job, runner, tmp_path):
    path, _ = slow_job
    with start(path, runner) as run:
        wait_for_receipts(run, tmp_path / "out")
        assert servers_of(tmp_path / "temporary" / "beam-inference-job-server-")
        run.kill()
        run.wait(10)
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prism_that_the_user_started(conv_job, tmp_path):
    path, expected = conv_job
    (flag,) = job_server_flags("Prism", tmp_path) or [""]
    if not zipfile.is_zipfile(archive := flag.partition("=")[2]):
        pytest.skip("PRISM_LOCATION names no zip file")
    with zipfile.ZipFile(archive) as file:
        prism = Path(file.extract(file.namelist()[0], tmp_path))
    prism.chmod(0o755)
    port = free_port()
    command = [str(prism), f"--job_port={port}", "--serve_http=false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: listens("localhost", port), "Prism")
            flags = ["--runner=PortableRunner", f"--job_endpoint=localhost:{port}"]
            with start(path, [*flags, "--environment_type=LOOPBACK"]) as run:
                out, err = run.communicate(timeout=200)
        finally:
            server.kill()
    assert run.returncode == 0, out + err
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
