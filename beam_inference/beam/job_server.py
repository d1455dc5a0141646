"""The job server that a launch on Flink, Spark or Prism starts for itself, and ends with itself.

Beam's runners would start theirs with a handler of SIGINT that replaces ours and that only the main
thread may set, and in our process group, where a terminal's Ctrl-C would end it before the job.
"""

from __future__ import annotations

import copy
import logging
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PortableOptions,
)

from beam_inference.beam import server_watchdog
from beam_inference.beam.portable_engines import engine_of, is_uber_jar, with_scheme
from beam_inference.errors import BeamInferenceError

if TYPE_CHECKING:
    from apache_beam.runners.portability.job_server import SubprocessJobServer

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
_POLL_SECONDS = 0.05
_KEPT_LINES = 200
_SECONDS_TO_END = server_watchdog.SECONDS_TO_END + 5.0
_MESSAGE = re.compile(
    r"(?:\w+\.)*\w*(?:Exception|Error)\b|^Error|^error|unrecognized", re.MULTILINE
)


@contextmanager
def job_server(
    options: PipelineOptions, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[PipelineOptions]:
    """Start the job server of a runner that needs one, and end it with the context.

    It ends, too, if this process ends without leaving the context, by whatever signal.

    Args:
        options: of Beam.
        should_stop: whether to give up waiting for the server.

    Yields:
        Options that lead to the server; the same ones, where the runner needs none of ours.

    Raises:
        BeamInferenceError: the server cannot be had, or does not start.
    """
    if not needs_job_server(options):
        yield options
        return
    engine = engine_of(options)
    folder = tempfile.mkdtemp(prefix="beam-inference-job-server-")
    options = _with_folder(options, folder)
    try:
        command, endpoint = _command_and_endpoint(options)
        server = ServerProcess(f"the {engine} job server", command, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        server.wait_for_port(endpoint, should_stop)
        options.view_as(PortableOptions).job_endpoint = endpoint
        yield options
    finally:
        server.end()


def needs_job_server(options: PipelineOptions) -> bool:
    """Whether a launch with these options starts a job server of its own."""
    endpoint = options.view_as(PortableOptions).job_endpoint
    return engine_of(options) is not None and not endpoint and not is_uber_jar(options)


class ServerProcess:
    """A server in a session of its own, under a watchdog that ends it with this process.

    Args:
        name: for messages.
        command: the server's program and arguments.
        folder: for its temporary files; removed at its end.
    """

    def __init__(self, name: str, command: Sequence[str], folder: str) -> None:
        self._name = name
        self._command = command
        self._lines = deque[str](maxlen=_KEPT_LINES)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", server_watchdog.__file__, folder, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        assert self._watchdog.stdout is not None
        self._reader = threading.Thread(
            target=self._read_lines, args=(self._watchdog.stdout,), daemon=True
        )
        self._reader.start()

    def _read_lines(self, output: IO[bytes]) -> None:
        for line in output:
            text = line.decode(errors="backslashreplace").rstrip()
            self._lines.append(text)
            logger.debug("%s: %s", self._name, text)

    def wait_for_port(self, endpoint: str, should_stop: Callable[[], bool]) -> None:
        """Wait until the server listens.

        Args:
            endpoint: ``host:port`` where it will.
            should_stop: whether to give up.

        Raises:
            BeamInferenceError: it ended before, or takes too long, or is not wanted any more.
        """
        host, _, port = endpoint.rpartition(":")
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            if self._watchdog.poll() is not None:
                self._reader.join(1)
                raise BeamInferenceError(
                    f"{self._name} ended with exit code {self._watchdog.returncode} before it "
                    f"listened: {message_of_log(self._lines)}. Its command: "
                    f"{' '.join(self._command)}"
                )
            if should_stop():
                raise BeamInferenceError(f"{self._name} was stopped before it listened")
            if time.monotonic() > deadline:
                raise BeamInferenceError(
                    f"{self._name} does not listen at {endpoint} after {_START_SECONDS:.0f} s. "
                    f"Its last message: {message_of_log(self._lines)}. Its command: "
                    f"{' '.join(self._command)}"
                )
            time.sleep(_POLL_SECONDS)

    def end(self) -> None:
        """End the server, and wait until it is gone."""
        assert self._watchdog.stdin is not None
        assert self._watchdog.stdout is not None
        self._watchdog.stdin.close()
        try:
            self._watchdog.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._watchdog.kill()
            self._watchdog.wait()
        self._reader.join(1)
        self._watchdog.stdout.close()


def message_of_log(lines: Sequence[str]) -> str:
    """Choose the line of a server's output that tells why it failed.

    Args:
        lines: the last lines, which may hold the stack of a Java exception.
    """
    told = [line.strip() for line in lines if line.strip()]
    frames = ("at ", "...", "java.base/")
    told = [line for line in told if not line.startswith(frames)]
    causes = [line for line in told if line.startswith("Caused by: ")]
    if causes:
        return causes[-1].removeprefix("Caused by: ")
    failures = [line for line in told if _MESSAGE.search(line)]
    return (failures or told or ["it said nothing"])[-1]


def _with_folder(options: PipelineOptions, folder: str) -> PipelineOptions:
    """A copy of options with which a job server keeps all its files in a folder."""
    options = copy.deepcopy(options)
    if engine_of(options) == "Flink":
        flink = options.view_as(FlinkRunnerOptions)
        flink.flink_master = with_scheme(flink.flink_master)
        portable = options.view_as(PortableOptions)
        if portable.output_executable_path:
            # A cluster runs no jar that names a master of its own.
            flink.flink_master = "[auto]"
            portable.output_executable_path = str(Path(portable.output_executable_path).absolute())
    server = options.view_as(JobServerOptions)
    server.artifacts_dir = server.artifacts_dir or str(Path(folder) / "artifacts")
    server.job_server_jvm_properties = [
        f"-Djava.io.tmpdir={folder}",
        *server.job_server_jvm_properties,
    ]
    return options


def _command_and_endpoint(options: PipelineOptions) -> tuple[list[str], str]:
    """The command that starts a runner's job server, and where it will listen.

    Beam finds or downloads the program.

    Raises:
        BeamInferenceError: it cannot.
    """
    try:
        command, endpoint = server_of_beam(options).subprocess_cmd_and_endpoint()
    except (OSError, RuntimeError, ValueError) as error:
        raise BeamInferenceError(
            f"the {engine_of(options)} job server cannot be had: {error}"
        ) from error
    return [str(word) for word in command], endpoint


def server_of_beam(options: PipelineOptions) -> SubprocessJobServer:
    """Beam's description of a runner's job server, which it does not start."""
    engine = engine_of(options)
    if engine == "Flink":
        from apache_beam.runners.portability.flink_runner import FlinkJarJobServer

        return FlinkJarJobServer(options)
    if engine == "Spark":
        from apache_beam.runners.portability.spark_runner import SparkJarJobServer

        return SparkJarJobServer(options)
    from apache_beam.runners.portability.prism_runner import PrismJobServer

    return PrismJobServer(options)
