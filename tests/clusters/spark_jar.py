"""Makes a job server for SparkRunner of Spark's own jars, which pip has, and of Beam's.

    python -m clusters.spark_jar PYSPARK_FOLDER JOB_SERVER_JAR NEW_JAR

The new jar holds a manifest alone: it names the other jars, Spark's first (Kryo), so that
``java -jar`` takes all of them.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

OPENED_PACKAGES = [
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio"),
    *("java.util", "java.util.concurrent", "java.util.concurrent.atomic"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
]
"""Packages of Java 17 that Spark 3 needs open."""
_BYTES_OF_LINE = 72


def write_spark_jar(pyspark: Path, server: Path, target: Path) -> None:
    """Write a jar whose main class is the Spark job server's.

    Args:
        pyspark: folder of the installed package, with Spark's jars in ``jars``.
        server: jar with Beam's Spark runner, without Spark.
        target: jar to write.
    """
    jars = [*sorted((pyspark / "jars").glob("*.jar")), server]
    attributes = {
        "Manifest-Version": "1.0",
        "Main-Class": "org.apache.beam.runners.spark.SparkJobServerDriver",
        "Class-Path": " ".join(jar.resolve().as_uri() for jar in jars),
        "Add-Opens": " ".join(f"java.base/{package}" for package in OPENED_PACKAGES),
    }
    text = "".join(map(_attribute, attributes, attributes.values()))
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("META-INF/MANIFEST.MF", text)


def _attribute(name: str, value: str) -> str:
    """One attribute of a manifest, in lines of the length that Java reads."""
    text = f"{name}: {value}"
    lines = [text[:_BYTES_OF_LINE]]
    rest = text[_BYTES_OF_LINE:]
    step = _BYTES_OF_LINE - 1
    lines += [f" {rest[begin : begin + step]}" for begin in range(0, len(rest), step)]
    return "".join(f"{line}\r\n" for line in lines)


if __name__ == "__main__":
    write_spark_jar(*map(Path, sys.argv[1:4]))
