"""A standalone Spark cluster of two hosts, from the jars that pip installs with pyspark.

    python -m clusters.spark PYSPARK_FOLDER

starts one and prints where it is, until it is interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusters.hosts import Host, free_port, listens, two_hosts, wait_until
from clusters.pools import POOL_PORT, start_pool
from clusters.spark_jar import OPENED_PACKAGES

OPENS = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED_PACKAGES]
_DEPLOY = "org.apache.spark.deploy"


@dataclass
class SparkOnHosts:
    """A cluster whose parts can be started and killed.

    Attributes:
        pyspark: folder with ``jars``.
        folder: for work and logs.
        here: the master's host.
        hosts: of the workers, each with a worker pool of its own.
        port: of the master.
        cores: of each worker.
    """

    pyspark: Path
    folder: Path
    here: Host
    hosts: list[Host]
    port: int
    cores: int

    @property
    def master(self) -> str:
        """URL of the master."""
        return f"spark://{self.here.address}:{self.port}"

    @property
    def flags(self) -> list[str]:
        """Flags of a launch that starts a job server of its own."""
        properties = [
            f"-Dspark.driver.host={self.here.address}",
            f"-Dspark.executor.extraJavaOptions={' '.join(OPENS)}",
            "-Dspark.default.parallelism=8",
            "-Xmx1g",
        ]
        return [
            "--runner=SparkRunner",
            f"--spark_master_url={self.master}",
            "--environment_type=EXTERNAL",
            f"--environment_config=localhost:{POOL_PORT}",
            *(f"--job_server_jvm_property={each}" for each in properties),
        ]

    def start_master(self) -> None:
        """Start the master, and wait until it listens."""
        words = ["--host", self.here.address, "--port", str(self.port), "--webui-port", "0"]
        self._start(self.here, "master", "master.Master", *words)
        wait_until(lambda: listens(self.here.address, self.port), "the Spark master")

    def start_worker(self, host: Host) -> None:
        """Start a worker and, before it, its worker pool."""
        if "pool" not in host.processes:
            start_pool(host)
        words = ["--host", host.address, "--cores", str(self.cores), "--memory", "2g"]
        words += ["--webui-port", "0", "--work-dir", str(self.folder / host.address)]
        self._start(host, "worker", "worker.Worker", *words, self.master)
        # A worker that was started before counts no more.
        wait_until(lambda: "Successfully registered" in host.log("worker"), "a Spark worker")

    def _start(self, host: Host, name: str, program: str, *words: str) -> None:
        environment = {
            "SPARK_HOME": str(self.pyspark),
            "SPARK_SCALA_VERSION": "2.12",
            "SPARK_LOCAL_IP": host.address,
            "SPARK_WORKER_OPTS": "-Dspark.worker.cleanup.enabled=true",
        }
        command = ["java", *OPENS, "-Xmx512m", "-Dspark.worker.timeout=10"]
        command += ["-cp", f"{self.pyspark}/jars/*", f"{_DEPLOY}.{program}", *words]
        host.start(name, command, environment)


@contextmanager
def spark_on_hosts(pyspark: Path, folder: Path) -> Iterator[SparkOnHosts]:
    """Start a cluster of two hosts, or of one with two cores where two cannot be had.

    Args:
        pyspark: folder of the installed package.
        folder: for work and logs.

    Yields:
        The cluster, when its workers have registered.
    """
    with two_hosts(folder) as (here, hosts):
        cores = 2 // len(hosts)
        spark = SparkOnHosts(pyspark, folder, here, hosts, free_port(), cores)
        spark.start_master()
        for host in hosts:
            spark.start_worker(host)
        yield spark


def main() -> None:
    """Start a cluster, until an interrupt."""
    with (
        tempfile.TemporaryDirectory() as folder,
        spark_on_hosts(Path(sys.argv[1]), Path(folder)) as spark,
        suppress(KeyboardInterrupt),
    ):
        print(*spark.flags, folder, sep=os.linesep, flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main()
