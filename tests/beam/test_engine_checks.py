"""What is told or refused before a launch on Flink, Spark or Prism."""

import logging
import shutil
import socket
import ssl
import subprocess
import time

import pytest
from fakes.flink_rest import StandInTaskManager
from fakes.http_stand_in import HttpServer, Response
from fakes.job_server_jar import write_jar

from beam_inference.beam.engine_checks import ask_engine, settle_engine
from beam_inference.beam.flags import beam_options, check_options, place_of, workers_of
from beam_inference.cli.main import main
from beam_inference.errors import ConfigError

ELSEWHERE = "192.0.2.7"  # an address for examples, which no machine has
NO_POOL = "--environment_config="


@pytest.fixture
def pool():
    """A port where somebody listens."""
    with socket.create_server(("localhost", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def java(tmp_path):
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\necho 'openjdk version \"17.0.15\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def flags(flink, pool, java, tmp_path):
    """Flags of a launch on the stand-in that finds nothing wrong."""
    return [
        "--runner=FlinkRunner",
        f"--flink_master={flink.url}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{pool}",
        f"--flink_job_server_jar={write_jar(tmp_path / 'server.jar')}",
        f"--job_server_java_launcher={java}",
    ]


def ask(flags):
    """What is learned with some flags; refused or not, within ten seconds."""
    begun = time.monotonic()
    try:
        options = beam_options(flags)
        check_options(options)
        return ask_engine(options)
    finally:
        assert time.monotonic() < begun + 10


def test_free_slots_are_taken_and_told(flink, flags, capsys):
    flink.managers = [StandInTaskManager(slots=3, free=2)]
    options = beam_options(flags)
    place = settle_engine(options, place_of(options))
    assert f"Flink 1.19.3 at {flink.url}: 2 of 3 slots free: --parallelism=2" in (
        capsys.readouterr().err
    )
    assert options.get_all_options()["parallelism"] == 2
    assert options.get_all_options()["flink_version"] == "1.19"
    assert workers_of(options) == 2
    assert not place.is_this_machine
    assert (place.processes_per_host, place.threads_per_process) == (1, 3)


def test_processes_of_a_task_manager_share_its_slots(flink, flags):
    flink.managers = [StandInTaskManager(slots=4, free=4)]
    facts = ask([*flags, "--sdk_worker_parallelism=2"])
    assert (facts.processes_per_host, facts.threads_per_process) == (2, 2)


@pytest.mark.parametrize(
    ("managers", "more", "warning"),
    [
        ([StandInTaskManager(free=0)], [], "none of its 1 slot is free"),
        ([], [], r"no TaskManager yet. The job asks for 1 slot \(--parallelism=N\)"),
        ([StandInTaskManager()], ["--parallelism=3"], "--parallelism=3, but only 1 of 1 slot"),
    ],
)
def test_a_job_that_will_wait_for_slots_is_told(managers, more, warning, flink, flags):
    flink.managers = managers
    facts = ask([*flags, *more])
    assert facts.parallelism is None
    with pytest.raises(AssertionError, match=warning):
        raise AssertionError(*facts.warnings)


def test_parallelism_that_was_given_stays(flags):
    facts = ask([*flags, "--parallelism=1"])
    assert (facts.parallelism, facts.notes, facts.warnings) == (None, [], [])


def test_a_cluster_without_restarts_is_told(flink, flags):
    flink.settings = {}
    assert "restart-strategy.type: fixed-delay" in ask(flags).warnings[0]


@pytest.mark.parametrize("status", [401, 403])
def test_a_secured_cluster_is_told_and_not_refused(status, flink, flags):
    flink.status = status
    (warning,) = ask(flags).warnings
    assert f"{flink.url}/overview answers {status}" in warning
    assert "--parallelism=N" in warning


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_a_certificate_that_is_not_known_is_told_and_not_refused(flags, tmp_path):
    key = str(tmp_path / "key.pem")
    certificate = str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = HttpServer(0, lambda _: Response.of_json({}))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.start()
    url = f"https://localhost:{server.server_port}"
    try:
        (warning,) = ask([*flags, f"--flink_master={url}"]).warnings
    finally:
        server.stop()
    assert f"{url} does not answer: [SSL: CERTIFICATE_VERIFY_FAILED]" in warning


def refused_flags(flags, flink, tmp_path):
    """Changes of the flags that a launch cannot work with, and what is said."""
    write_jar(tmp_path / "spark.jar", "org.apache.beam.runners.spark.SparkJobServerDriver")
    write_jar(tmp_path / "newer.jar", java=21)
    (tmp_path / "no.jar").write_text("no jar")
    external = ["--environment_type=EXTERNAL", "--environment_config=localhost:50000"]
    spark = ["--runner=SparkRunner", *external]
    return {
        "no master": (
            ["--flink_master=localhost:1"],
            "--flink_master=localhost:1: http://localhost:1 does not answer.*8081",
        ),
        "another version": (["--flink_version=1.20"], "--flink_version=1.20, but .* 1.19.3"),
        "no pool": (
            ["--environment_config=localhost:1"],
            "nobody listens at 127.0.0.1:1, .*worker_pool_main --service_port=1",
        ),
        "no jar": (
            [f"--flink_job_server_jar={tmp_path}/nowhere.jar"],
            "--flink_job_server_jar=.*nowhere.jar is no jar",
        ),
        "not a jar": ([f"--flink_job_server_jar={tmp_path}/no.jar"], "no.jar is no jar"),
        "the other engine's jar": (
            [f"--flink_job_server_jar={tmp_path}/spark.jar"],
            "spark.jar is not the job server of Flink: its main class is .*SparkJobServerDriver",
        ),
        "old Java": (
            [f"--flink_job_server_jar={tmp_path}/newer.jar"],
            "needs Java 21 or later, but .*java is Java 17.*--job_server_java_launcher",
        ),
        "no Java": (
            ["--job_server_java_launcher=/nowhere/java"],
            "needs Java 17 or later, but there is no /nowhere/java.*--job_server_java_launcher",
        ),
        "no download": (
            ["--flink_job_server_jar=http://localhost:1/x.jar"],
            "cannot be downloaded from http://localhost:1/x.jar.*--flink_job_server_jar=PATH",
        ),
        "no Prism": (
            ["--runner=PrismRunner", "--prism_location=/nowhere/prism"],
            "--prism_location=/nowhere/prism: there is no such file",
        ),
        "LOOPBACK elsewhere": (
            [f"--flink_master={ELSEWHERE}:8081", "--environment_type=LOOPBACK", NO_POOL],
            f"LOOPBACK: .*engine at {ELSEWHERE} \\(--flink_master\\).*EXTERNAL",
        ),
        "no Spark master": (
            [*spark, "--spark_master_url=spark://localhost:1"],
            "--spark_master_url=spark://localhost:1: nobody listens there.*7077",
        ),
        "no job service": (
            ["--runner=PortableRunner", "--job_endpoint=localhost:1"],
            "--job_endpoint=localhost:1: no job service answers there.*--job-port",
        ),
        "a jar for Spark": (
            [*spark, "--spark_master_url=spark://h:1", "--output_executable_path=x.jar"],
            "--output_executable_path=x.jar writes a jar for Flink",
        ),
        "a jar by another's server": (
            ["--job_endpoint=localhost:1", "--output_executable_path=x.jar"],
            "Remove --job_endpoint",
        ),
    }


CASES = [
    *("no master", "another version", "no pool", "no jar", "not a jar", "the other engine's jar"),
    *("old Java", "no Java", "no download", "no Prism", "LOOPBACK elsewhere", "no Spark master"),
    *("no job service", "a jar for Spark", "a jar by another's server"),
]


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused_with_its_address_or_flag(case, flags, flink, tmp_path):
    more, message = refused_flags(flags, flink, tmp_path)[case]
    with pytest.raises(ConfigError, match=message):
        ask([*flags, *more])


def without(flags, name):
    return [flag for flag in flags if not flag.startswith(name)]


def test_beams_own_container_is_refused(flags):
    flags = without(without(flags, "--environment_type"), "--environment_config")
    with pytest.raises(ConfigError, match=r"lacks beam-inference.*--environment_type=EXTERNAL"):
        ask(flags)
    ask([*flags, "--environment_type=DOCKER", "--environment_config=an-image"])


def test_a_pool_that_is_not_named_is_refused(flags):
    with pytest.raises(ConfigError, match="needs --environment_config=localhost:50000"):
        ask(without(flags, "--environment_config"))


def test_task_managers_that_share_a_pool_are_refused(flink, flags):
    flink.managers = [StandInTaskManager(), StandInTaskManager()]
    with pytest.raises(ConfigError, match=r"2 TaskManagers are on 127.0.0.1.*would hang"):
        ask(flags)


def test_task_managers_that_do_not_reach_this_process_are_refused(flink, flags):
    flink.managers = [StandInTaskManager(ELSEWHERE)]
    with pytest.raises(ConfigError, match=f"TaskManagers on {ELSEWHERE} cannot reach"):
        ask([*flags, "--environment_type=LOOPBACK", NO_POOL])


def test_a_version_without_a_job_server_is_refused(flink, flags):
    flink.version = "1.15.2"
    with pytest.raises(ConfigError, match=r"Flink 1.15, for which Beam .* has no job server"):
        ask(without(flags, "--flink_job_server_jar"))


def test_a_jar_for_another_version_is_refused(flink, flags):
    flink.version = "1.20.1"
    with pytest.raises(ConfigError, match=r"is for Flink 1.19, but the cluster has Flink 1.20"):
        ask(flags)


def test_what_is_not_flink_is_told(flags):
    server = HttpServer(0, lambda _: Response.of_json({}))
    server.start()
    url = f"http://localhost:{server.server_port}"
    try:
        with pytest.raises(ConfigError, match="does not answer as Flink does"):
            ask([*flags, f"--flink_master={url}"])
    finally:
        server.stop()


def test_a_job_server_of_another_version_of_beam_is_told(flags, tmp_path):
    write_jar(tmp_path / "server.jar", beam="2.70.0")
    assert "of Beam 2.70.0; this is Beam 2." in ask(flags).notes[-1]


def test_spark_is_told_what_decides(java, tmp_path):
    jar = write_jar(tmp_path / "spark.jar", "org.apache.beam.runners.spark.SparkJobServerDriver")
    with socket.create_server(("localhost", 0)) as master:
        flags = [
            "--runner=SparkRunner",
            f"--spark_master_url=spark://localhost:{master.getsockname()[1]}",
            f"--spark_job_server_jar={jar}",
            f"--job_server_java_launcher={java}",
            "--environment_type=EXTERNAL",
            "--environment_config=localhost:50000",
        ]
        assert "-Dspark.default.parallelism=N" in ask(flags).notes[0]
        told = [*flags, "--job_server_jvm_property=-Dspark.default.parallelism=8"]
        assert not ask(told).notes
        assert workers_of(beam_options(told)) == 8
        told += ["--job_server_jvm_property=-Dspark.default.parallelism=2"]
        assert workers_of(beam_options(told)) == 2, "Java takes the last"


def test_an_engine_in_the_job_server_is_not_asked(java, tmp_path, caplog):
    flags = [
        "--runner=FlinkRunner",
        f"--flink_job_server_jar={write_jar(tmp_path / 'server.jar')}",
        f"--job_server_java_launcher={java}",
    ]
    with caplog.at_level(logging.WARNING):
        facts = ask(flags)
    assert (facts.notes, facts.warnings, facts.parallelism) == ([], (), None)
    assert place_of(beam_options(flags)).is_this_machine


def test_a_device_cannot_be_chosen_for_a_job_that_is_only_staged(flags, job, capsys, tmp_path):
    staged = f"--output_executable_path={tmp_path}/job.jar"
    assert main(["run", job(inference={"device": "auto"}), *flags, staged]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "inference.device: auto is not known before the launch on a remote runner" in message
    assert "a job that is staged for another to run" in message
    assert "Write device: cuda (or mps, xpu), or device: cpu." in message
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "job.jar").exists()
