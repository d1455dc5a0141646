"""Finds the programs that tests on real engines need, or says why a test is skipped."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

import pytest

from beam_inference.beam.engine_checks import ask_engine
from beam_inference.beam.flags import beam_options
from beam_inference.errors import ConfigError
from clusters.spark_jar import write_spark_jar

_PROGRAMS = {
    "Flink": ("FLINK_JOB_SERVER_JAR", "--flink_job_server_jar"),
    "Spark": ("SPARK_JOB_SERVER_JAR", "--spark_job_server_jar"),
    "Prism": ("PRISM_LOCATION", "--prism_location"),
}


def package_of(variable: str, name: str) -> Path:
    """The folder of a package in the environment that a variable names; skips without one."""
    environment = os.environ.get(variable)
    if not environment:
        pytest.skip(f"{variable} names no environment: make flink-test, make spark-test")
    if shutil.which("java") is None:
        pytest.skip("there is no java")
    return next(Path(environment).resolve().glob(f"lib/python*/site-packages/{name}"))


def job_server_flags(engine: str, folder: Path) -> list[str]:
    """Flags that name an engine's job server, if a variable does; skips where none may be had.

    Args:
        engine: Flink, Spark or Prism.
        folder: for a jar that is made for the test.
    """
    variable, flag = _PROGRAMS[engine]
    path = os.environ.get(variable)
    if not path:
        if not os.environ.get("DOWNLOAD_JOB_SERVERS"):
            pytest.skip(f"{variable} names no job server")
        return []
    if engine == "Spark":
        return _spark_flags(Path(path).resolve(), folder)
    return [f"{flag}={Path(path).resolve()}"]


def _spark_flags(server: Path, folder: Path) -> list[str]:
    """Flags for a job server of Spark's own jars too, where the jar named lacks them."""
    with zipfile.ZipFile(server) as jar:
        names = jar.namelist()
    if len(names) < 10 or "org/apache/spark/SparkContext.class" in names:
        return [f"--spark_job_server_jar={server}"]
    pyspark = package_of("PYSPARK_ENVIRONMENT", "pyspark")
    write_spark_jar(pyspark, server, folder / "spark-server.jar")
    # executors have Spark's jars
    return [
        f"--spark_job_server_jar={folder / 'spark-server.jar'}",
        f"--files_to_stage={server}",
    ]


def skip_if_refused(flags: list[str]) -> None:
    """Skip a test whose launch would be refused: its job server cannot be had, say."""
    try:
        ask_engine(beam_options(flags))
    except ConfigError as error:
        pytest.skip(str(error))
