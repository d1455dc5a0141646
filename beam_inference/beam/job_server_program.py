"""Looks at the program of a job server before it is started: Java, the jar, Prism, a download."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import apache_beam
from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    JobServerOptions,
    PipelineOptions,
    PrismRunnerOptions,
    SparkRunnerOptions,
)

from beam_inference.beam.job_server import server_of_beam
from beam_inference.beam.portable_engines import engine_of
from beam_inference.errors import ConfigError

_ANSWER_SECONDS = 5.0
_LEAST_JAVA = 11
_CLASS_FILES_OF_JAVA_1 = 44
_MOST_BYTES = 2**20


class _Jar(NamedTuple):
    """A job server's jar: its main class, and the versions that it was made with or for."""

    main_class: str
    java: int
    beam: str | None
    flink: str | None


def check_program(options: PipelineOptions, flink_version: str | None) -> list[str]:
    """Check that the job server's program is here, or can be downloaded, and fits.

    Args:
        options: of Beam.
        flink_version: of the cluster, such as "1.19"; None if there is none, or it is not known.

    Returns:
        Notes to tell.

    Raises:
        ConfigError: it is not to be had, or does not fit.
    """
    engine = engine_of(options)
    if engine == "Prism":
        _check_prism(options)
        return []
    if engine == "Flink":
        flag = "--flink_job_server_jar"
        path = options.view_as(FlinkRunnerOptions).flink_job_server_jar
    else:
        flag = "--spark_job_server_jar"
        path = options.view_as(SparkRunnerOptions).spark_job_server_jar
    jar = None
    if path and not urlsplit(path).scheme:
        jar = _read_jar(Path(path), flag)
        _check_fit(jar, f"{flag}={path}", str(engine), flink_version)
    else:
        _check_download(options, flag, flink_version)
    _check_java(options, jar.java if jar else _LEAST_JAVA)
    if jar is None or jar.beam in (None, apache_beam.__version__):
        return []
    return [f"{flag}: of Beam {jar.beam}; this is Beam {apache_beam.__version__}"]


def _read_jar(path: Path, flag: str) -> _Jar:
    """Read what a jar says of itself.

    Raises:
        ConfigError: it is not there, or is no jar.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _text(archive, "META-INF/MANIFEST.MF").replace("\r\n", "\n")
            manifest = manifest.replace("\n ", "")
            main_class = _value(manifest, "Main-Class: ") or ""
            names = archive.namelist()
            head = b""
            if (file := main_class.replace(".", "/") + ".class") in names:
                with archive.open(file) as opened:
                    head = opened.read(8)
            runners = [re.search(r"beam-runners-flink-([\d.]+)/pom\.properties", n) for n in names]
            flink = [found[1] for found in runners if found]
            return _Jar(
                main_class=main_class,
                java=head[7] - _CLASS_FILES_OF_JAVA_1 if len(head) == 8 else _LEAST_JAVA,
                beam=_value(_text(archive, "org/apache/beam/sdk/sdk.properties"), "version="),
                flink=flink[0] if flink else None,
            )
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{flag}={path} is no jar that can be read: {error}. Name the jar of Beam's job server."
        ) from None


def _text(archive: zipfile.ZipFile, name: str) -> str:
    try:
        with archive.open(name) as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except KeyError:
        return ""


def _value(text: str, key: str) -> str | None:
    found = re.search(rf"^{re.escape(key)}(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def _check_fit(jar: _Jar, where: str, engine: str, flink_version: str | None) -> None:
    """Check a jar against the runner and the cluster.

    Raises:
        ConfigError: it is for another engine, or another version of Flink.
    """
    if f".{engine.lower()}." not in jar.main_class:
        raise ConfigError(
            f"{where} is not the job server of {engine}: its main class is "
            f"{jar.main_class or 'not named'}"
        )
    if engine == "Flink" and flink_version and jar.flink and jar.flink != flink_version:
        raise ConfigError(
            f"{where} is for Flink {jar.flink}, but the cluster has Flink {flink_version}: take "
            f"the jar of Beam's job server for {flink_version}"
        )


def _check_java(options: PipelineOptions, least: int) -> None:
    """Check that Java is there, and recent enough.

    Raises:
        ConfigError: it is not.
    """
    launcher = options.view_as(JobServerOptions).job_server_java_launcher
    program = shutil.which(launcher)
    advice = "Install one, or name it: --job_server_java_launcher=/path/to/java"
    if program is None:
        raise ConfigError(
            f"the job server needs Java {least} or later, but there is no {launcher}. {advice}"
        )
    try:
        told = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=10, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{program} does not start: {error}. {advice}") from None
    found = re.search(r'version "(?:1\.)?(\d+)', told)
    if found and int(found[1]) < least:
        raise ConfigError(
            f"the job server needs Java {least} or later, but {program} is Java {found[1]}. "
            f"{advice}"
        )


def _check_prism(options: PipelineOptions) -> None:
    path = options.view_as(PrismRunnerOptions).prism_location
    if path and not urlsplit(path).scheme:
        if not Path(path).is_file():
            raise ConfigError(
                f"--prism_location={path}: there is no such file. Name Prism's program, or the "
                "zip file that holds it."
            )
        return
    _check_download(options, "--prism_location", None)


def _check_download(options: PipelineOptions, flag: str, flink_version: str | None) -> None:
    """Check that Beam has the program already, or can download it.

    Raises:
        ConfigError: there is none for this version, or nothing answers.
    """
    published = FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS
    if flink_version and flink_version not in published:
        raise ConfigError(
            f"the cluster has Flink {flink_version}, for which Beam {apache_beam.__version__} "
            f"has no job server: it has those for {', '.join(published)}. Take a cluster of one "
            f"of these, or name a jar: {flag}=PATH"
        )
    if flink_version:
        options = PipelineOptions.from_dictionary(
            options.get_all_options(drop_default=True) | {"flink_version": flink_version}
        )
    try:
        url, cached = _program_and_cache(options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{error}. Name the program: {flag}=PATH") from None
    if Path(url).exists() or cached.exists() or urlsplit(url).scheme not in ("http", "https"):
        return
    try:
        with urlopen(Request(url, method="HEAD"), timeout=_ANSWER_SECONDS):
            return
    except (HTTPError, HTTPException, OSError, ValueError) as error:
        raise ConfigError(
            f"the job server's program is not here, and cannot be downloaded from {url} ({error}). "
            f"Name it: {flag}=PATH, or put it at {cached}"
        ) from None


def _program_and_cache(options: PipelineOptions) -> tuple[str, Path]:
    """Where Beam finds a program, and where it keeps what it downloads."""
    from apache_beam.runners.portability.job_server import JavaJarJobServer
    from apache_beam.runners.portability.prism_runner import PrismJobServer
    from apache_beam.utils.subprocess_server import JavaJarServer

    server = server_of_beam(options)
    if isinstance(server, JavaJarJobServer):
        url = server.path_to_jar()
        folder = options.view_as(JobServerOptions).jar_cache_dir or JavaJarServer.JAR_CACHE
    else:
        assert isinstance(server, PrismJobServer)
        url = server.path_to_binary()
        folder = PrismJobServer.BIN_CACHE
    return str(url), Path(folder) / Path(urlsplit(str(url)).path).name
