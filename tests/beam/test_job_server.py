"""The job server that a launch starts: it listens, and never outlives the launch."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fakes.job_server_jar import write_jar
from helpers import read_volume

from beam_inference.beam.flags import beam_options
from beam_inference.beam.job_server import ServerProcess, job_server, message_of_log
from beam_inference.beam.portable_engines import is_uber_jar
from beam_inference.cli.main import main
from beam_inference.errors import BeamInferenceError

PROGRAM = Path(__file__).parents[1] / "fakes" / "job_server_program.py"


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """A file in which the stand-in writes the ids of its processes."""
    file = tmp_path / "pids"
    file.touch()
    monkeypatch.setenv("STAND_IN_PIDS", str(file))
    yield file
    for pid in ids_in(file):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def folder_of_temporary_files(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def java(tmp_path):
    """Flags of a FlinkRunner whose java is the stand-in."""
    program = tmp_path / "java"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PROGRAM}" "$@"\n')
    program.chmod(0o755)
    jar = write_jar(tmp_path / "server.jar")
    return [
        "--runner=FlinkRunner",
        f"--job_server_java_launcher={program}",
        f"--flink_job_server_jar={jar}",
    ]


def ids_in(file):
    return [int(line) for line in file.read_text().split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_runner_with_a_server_of_its_own_does_a_job(
    conv_like_job, java, pids, folder_of_temporary_files, tmp_path
):
    """The server is Beam's own job service, the workers are threads of this process."""
    path, expected = conv_like_job
    before = signal.getsignal(signal.SIGINT)
    assert main(["run", path, *java]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(ids_in(pids)) == 1
    assert not any(map(is_alive, ids_in(pids)))
    assert not list(folder_of_temporary_files.glob("beam-inference-job-server-*"))


@pytest.fixture
def conv_like_job(job, tmp_path):
    assert main(["run", job(output={"path": str(tmp_path / "plain"), "dtype": "float32"})]) == 0
    return job(), read_volume(tmp_path / "plain")


def test_the_server_ends_with_the_context_and_the_given_options_stay_as_they_were(
    java, pids, folder_of_temporary_files, monkeypatch
):
    monkeypatch.setenv("STAND_IN", "listen")
    options = beam_options(java)
    with job_server(options) as led:
        assert led.get_all_options()["job_endpoint"].startswith("localhost:")
        (pid,) = ids_in(pids)
        assert is_alive(pid)
        assert os.getsid(pid) != os.getsid(0)
        assert list(folder_of_temporary_files.iterdir())
    assert not is_alive(pid)
    assert not list(folder_of_temporary_files.iterdir())
    assert options.get_all_options()["job_endpoint"] is None


@pytest.mark.slow
def test_a_server_that_ignores_signals_is_killed_with_what_it_started(java, pids, monkeypatch):
    monkeypatch.setenv("STAND_IN", "ignore")
    with job_server(beam_options(java)):
        wait_until(lambda: len(ids_in(pids)) == 2)
    assert not any(map(is_alive, ids_in(pids)))


LAUNCHER = """
import os, signal, sys, time
from beam_inference.beam.flags import beam_options
from beam_inference.beam.job_server import job_server
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which tests under nohup ignore
with job_server(beam_options(sys.argv[2:])):
    print("ready", flush=True)
    if sys.argv[1] == "exit":
        os._exit(130)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("exit", marks=pytest.mark.slow),
        "SIGKILL",
        pytest.param("SIGINT to the group", marks=pytest.mark.slow),
        pytest.param("SIGHUP to the group", marks=pytest.mark.slow),
    ],
)
def test_no_server_outlives_its_launcher(end, java, pids, folder_of_temporary_files, monkeypatch):
    monkeypatch.setenv("STAND_IN", "listen")
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, end, *java],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        assert list(folder_of_temporary_files.glob("beam-inference-job-server-*"))
        if "group" in end:
            os.killpg(launcher.pid, getattr(signal, end.split()[0]))
        elif end == "SIGKILL":
            launcher.kill()
        launcher.wait(20)
    (pid,) = ids_in(pids)
    wait_until(lambda: not is_alive(pid))
    wait_until(lambda: not list(folder_of_temporary_files.glob("beam-inference-job-server-*")))


def test_a_server_that_fails_is_told_by_its_message_and_command(
    job, java, pids, folder_of_temporary_files, monkeypatch, capsys
):
    monkeypatch.setenv("STAND_IN", "fail")
    assert main(["run", job(), *java]) == 1
    out = capsys.readouterr().out
    assert "the Flink job server ended with exit code 1 before it listened" in out
    assert "java.net.BindException: Address already in use" in out
    assert "--flink-master" in out
    assert not list(folder_of_temporary_files.glob("beam-inference-job-server-*"))


def test_a_program_that_is_not_there_is_told(folder_of_temporary_files):
    folder = folder_of_temporary_files / "server"
    folder.mkdir()
    server = ServerProcess("the server", ["/nowhere/java"], str(folder))
    try:
        with pytest.raises(BeamInferenceError, match=r"No such file or directory: '/nowhere/java'"):
            server.wait_for_port("localhost:1", lambda: False)
    finally:
        server.end()


def test_waiting_for_a_server_ends_when_the_launch_is_to_stop(java, pids, monkeypatch):
    with (
        pytest.raises(BeamInferenceError, match="was stopped before it listened"),
        job_server(beam_options([*java, "--job_port=1"]), lambda: True),
    ):
        raise AssertionError("not reached")
    assert not any(map(is_alive, ids_in(pids)))


def test_a_server_that_beam_cannot_have_is_told():
    flags = ["--runner=PrismRunner", "--prism_location=/nowhere/prism"]
    with (
        pytest.raises(BeamInferenceError, match="the Prism job server cannot be had"),
        job_server(beam_options(flags)),
    ):
        raise AssertionError("not reached")


@pytest.mark.parametrize(
    "flags",
    [
        ["--runner=FlinkRunner", "--job_endpoint=localhost:1"],
        ["--runner=FlinkRunner", "--flink_submit_uber_jar", "--flink_master=host:8081"],
        ["--runner=PortableRunner", "--job_endpoint=localhost:1"],
        [],
    ],
)
def test_launches_that_need_no_server_get_none(flags):
    options = beam_options(flags)
    with job_server(options) as led:
        assert led is options


def test_an_uber_jar_is_for_a_cluster():
    """Without one, Beam takes a job server all the same."""
    assert not is_uber_jar(beam_options(["--runner=FlinkRunner", "--flink_submit_uber_jar"]))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [
                "INFO begins",
                "Exception in thread main java.lang.RuntimeException: outer",
                "\tat a.B.c(B.java:1)",
                "Caused by: java.net.ConnectException: Connection refused",
                "\tat java.base/java.lang.Thread.run(Thread.java:840)",
                "\t... 3 more",
            ],
            "java.net.ConnectException: Connection refused",
        ),
        (["Error: Unable to access jarfile x.jar"], "Error: Unable to access jarfile x.jar"),
        (["INFO a", "INFO b"], "INFO b"),
        ([], "it said nothing"),
    ],
)
def test_the_line_that_tells_why_is_found(lines, message):
    assert message_of_log(lines) == message
