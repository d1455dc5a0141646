"""A Flink cluster of two hosts, from the jars that pip installs with apache-flink-libraries.

    python -m clusters.flink PYFLINK_FOLDER

starts one and prints where it is, until it is interrupted.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from beam_inference.beam.flink_cluster import FlinkCluster, FlinkError
from clusters.hosts import Host, free_port, listens, two_hosts, wait_until
from clusters.pools import POOL_PORT, start_pool

_PACKAGES = (
    *("java.lang", "java.lang.reflect", "java.net", "java.io", "java.nio", "java.text"),
    *("java.time", "java.util", "java.util.concurrent", "java.util.concurrent.atomic"),
    *("java.util.concurrent.locks", "sun.nio.ch"),
)
_OPENS = (
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _PACKAGES),
    "--add-exports=java.base/sun.net.util=ALL-UNNAMED",
)
_RUNTIME = "org.apache.flink.runtime"


@dataclass
class FlinkOnHosts:
    """A cluster whose parts can be started and killed.

    Attributes:
        pyflink: folder with ``lib`` and ``bin``.
        folder: for configurations and logs.
        here: the JobManager's host.
        hosts: of the TaskManagers, each with a worker pool of its own.
        port: of the REST interface.
        slots: of each TaskManager.
    """

    pyflink: Path
    folder: Path
    here: Host
    hosts: list[Host]
    port: int
    slots: int

    @property
    def master(self) -> str:
        """Address of the REST interface."""
        return f"{self.here.address}:{self.port}"

    @property
    def cluster(self) -> FlinkCluster:
        """The same, to be asked."""
        return FlinkCluster(f"http://{self.master}")

    @property
    def flags(self) -> list[str]:
        """Flags of a launch that starts a job server of its own."""
        return [
            "--runner=FlinkRunner",
            f"--flink_master={self.master}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{POOL_PORT}",
            "--job_server_jvm_property=-Xmx1g",
        ]

    @property
    def class_path(self) -> str:
        """Flink's jars."""
        return os.pathsep.join(map(str, sorted((self.pyflink / "lib").glob("*.jar"))))

    def start_job_manager(self) -> None:
        """Start the JobManager, and wait until it answers."""
        entry = f"{_RUNTIME}.entrypoint.StandaloneSessionClusterEntrypoint"
        configuration = self._configuration(self.here)
        self.here.start(
            "jobmanager",
            [
                *("java", *_OPENS, "-Xmx768m", "-cp", self.class_path, entry),
                *("--configDir", str(configuration)),
            ],
        )
        wait_until(lambda: self._registered() >= 0, self.here.log("jobmanager"))

    def start_task_manager(self, host: Host) -> None:
        """Start a TaskManager and, before it, its worker pool."""
        if "pool" not in host.processes:
            start_pool(host)
        configuration = str(self._configuration(host))
        flags, options = self._memory_of_task_manager(configuration)
        command = ["java", *flags, *_OPENS, "-cp", self.class_path]
        command += [f"{_RUNTIME}.taskexecutor.TaskManagerRunner", "--configDir", configuration]
        host.start("taskmanager", [*command, *options])

    def start_job_server(self, jar: str) -> str:
        """Start a job server that stays, with a heap of 1 GB; gives its address when it listens."""
        port = free_port()
        ports = [f"--job-port={port}", "--artifact-port=0", "--expansion-port=0"]
        command = ["java", "-Xmx1g", "-jar", jar, f"--flink-master={self.master}", *ports]
        self.here.start("jobserver", command)
        wait_until(lambda: listens("localhost", port), "the job server")
        return f"localhost:{port}"

    def wait_for_task_managers(self, count: int) -> None:
        """Wait until some TaskManagers have registered, and no more."""
        wait_until(lambda: self._registered() == count, f"{count} TaskManagers")

    def _registered(self) -> int:
        try:
            return len(self.cluster.task_managers())
        except FlinkError:
            return -1

    def _memory_of_task_manager(self, configuration: str) -> tuple[list[str], list[str]]:
        """JVM flags and options of a TaskManager, computed as Flink's own script does."""
        jars = [self.pyflink / "bin" / "bash-java-utils.jar"]
        jars += (self.pyflink / "lib").glob("flink-dist-*.jar")
        command = ["java", "-cp", os.pathsep.join(map(str, jars))]
        command += [f"{_RUNTIME}.util.bash.BashJavaUtils", "GET_TM_RESOURCE_PARAMS"]
        output = subprocess.run(
            [*command, "--configDir", configuration], capture_output=True, text=True, check=True
        ).stdout
        flags, options = [
            line.partition("BASH_JAVA_UTILS_EXEC_RESULT:")[2]
            for line in output.splitlines()
            if "BASH_JAVA_UTILS_EXEC_RESULT:" in line
        ]
        return shlex.split(flags), shlex.split(options)

    def _configuration(self, host: Host) -> Path:
        folder = self.folder / f"flink-{host.address}"
        folder.mkdir(exist_ok=True)
        settings = {
            "jobmanager.rpc.address": self.here.address,
            "jobmanager.bind-host": "0.0.0.0",
            "jobmanager.memory.process.size": "1600m",
            "rest.address": self.here.address,
            "rest.bind-address": "0.0.0.0",
            "rest.port": str(self.port),
            "taskmanager.host": host.address,
            "taskmanager.bind-host": "0.0.0.0",
            "taskmanager.memory.process.size": "1400m",
            "taskmanager.numberOfTaskSlots": str(self.slots),
            "io.tmp.dirs": str(folder / "tmp"),
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.attempts": "10",
            "restart-strategy.fixed-delay.delay": "1 s",
            "heartbeat.interval": "2000",
            "heartbeat.timeout": "10000",
        }
        (folder / "tmp").mkdir(exist_ok=True)
        text = "".join(f"{key}: {value}\n" for key, value in settings.items())
        (folder / "config.yaml").write_text(text)
        return folder


@contextmanager
def flink_on_hosts(pyflink: Path, folder: Path, slots: int = 1) -> Iterator[FlinkOnHosts]:
    """Start a cluster of two hosts, or of one with twice the slots where two cannot be had.

    Args:
        pyflink: folder of the installed package.
        folder: for configurations and logs.
        slots: of each TaskManager.

    Yields:
        The cluster, when its TaskManagers have registered.
    """
    with two_hosts(folder) as (here, hosts):
        cluster = FlinkOnHosts(
            pyflink=pyflink,
            folder=folder,
            here=here,
            hosts=hosts,
            port=free_port(),
            slots=slots * 2 // len(hosts),
        )
        cluster.start_job_manager()
        for host in hosts:
            cluster.start_task_manager(host)
        cluster.wait_for_task_managers(len(hosts))
        yield cluster


def main() -> None:
    """Start a cluster, until an interrupt."""
    with (
        tempfile.TemporaryDirectory() as folder,
        flink_on_hosts(Path(sys.argv[1]), Path(folder)) as flink,
        suppress(KeyboardInterrupt),
    ):
        hosts = ", ".join(host.address for host in flink.hosts)
        print(f"--flink_master={flink.master}; TaskManagers on {hosts}; {folder}", flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
