"""Jobs on real clusters of Flink and Spark, of two hosts on this machine: make flink-test, make
spark-test.

PYFLINK_ENVIRONMENT and PYSPARK_ENVIRONMENT name environments with apache-flink-libraries and
pyspark; FLINK_JOB_SERVER_JAR and SPARK_JOB_SERVER_JAR the job servers, which Beam downloads where
they are not named.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from clusters.flink import FlinkOnHosts, flink_on_hosts
from clusters.hosts import free_ports, listens, wait_until
from clusters.memory_limits import no_more_memory
from clusters.page import commands_of, with_names
from clusters.programs import job_server_flags, package_of, skip_if_refused
from clusters.results import keep_result
from clusters.spark import SparkOnHosts, spark_on_hosts
from helpers import files_of, read_volume, truncated, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.job.state import State

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]


@dataclass
class Engine:
    """A cluster, and the flags that lead to it."""

    name: str
    cluster: FlinkOnHosts | SparkOnHosts
    flags: list[str]
    worker: str
    master: str

    @property
    def column(self):
        """Heading of its column in the table of results."""
        count = len(self.cluster.hosts)
        return f"{self.name}, {'two hosts' if count == 2 else 'one host'}"

    @property
    def flags_of_long_tasks(self):
        """Flags with two tasks for all chunks: one that is repeated has done some of them."""
        if isinstance(self.cluster, FlinkOnHosts):
            return self.flags
        return [*self.flags, "--job_server_jvm_property=-Dspark.default.parallelism=2"]

    def start_host(self, host):
        """Start a host's worker and pool."""
        if isinstance(self.cluster, FlinkOnHosts):
            self.cluster.start_task_manager(host)
        else:
            self.cluster.start_worker(host)

    def start_master(self):
        """Start the JobManager or the master."""
        if isinstance(self.cluster, FlinkOnHosts):
            self.cluster.start_job_manager()
        else:
            self.cluster.start_master()

    def wait_for_workers(self):
        """Wait until all hosts are at their master's disposal, with all slots free."""
        if isinstance(self.cluster, FlinkOnHosts):
            wait_until(self._is_idle, "all slots free")

    def count_jobs(self):
        """How many jobs the engine was given since it began."""
        if isinstance(self.cluster, FlinkOnHosts):
            return len(self.cluster.cluster.jobs())
        return self.cluster.here.log("master").count("Registered app ")

    def _is_idle(self):
        managers = self.cluster.cluster.task_managers()
        free = sum(manager.free_slots for manager in managers)
        return len(managers) == len(self.cluster.hosts) and free == 2


def flink_engine(folder):
    pyflink = package_of("PYFLINK_ENVIRONMENT", "pyflink")
    with flink_on_hosts(pyflink, folder) as cluster:
        jar = job_server_flags("Flink", folder)
        yield Engine("Flink 1.19.3", cluster, [*cluster.flags, *jar], "taskmanager", "jobmanager")


def spark_engine(folder):
    pyspark = package_of("PYSPARK_ENVIRONMENT", "pyspark")
    with spark_on_hosts(pyspark, folder) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_LOCAL_IP", cluster.here.address)
        yield Engine(
            "Spark 3.5.6",
            cluster,
            [*cluster.flags, *job_server_flags("Spark", folder)],
            "worker",
            "master",
        )


@pytest.fixture(scope="module", params=["Flink", "Spark"])
def engine(request, tmp_path_factory):
    """A cluster, for all tests of this module; each leaves it as it found it."""
    folder = tmp_path_factory.mktemp(request.param)
    make = flink_engine if request.param == "Flink" else spark_engine
    engines = make(folder)
    engine = next(engines)
    try:
        skip_if_refused(engine.flags)
        yield engine
    finally:
        engines.close()


@pytest.fixture
def result(engine):
    """A function that keeps the result of a row, with the seconds since the test began."""
    engine.wait_for_workers()
    begun = time.monotonic()

    def keep(row, outcome="the same bytes"):
        keep_result(engine.column, row, time.monotonic() - begun, outcome)

    return keep


def receipts_of(output):
    state = State(f"file://{output}/_beam_inference")
    job = state.load_job()
    return [] if job is None else state.of(job).read_receipts(range(job.plan.chunks.count))


def start(path, flags):
    return subprocess.Popen(
        [sys.executable, "-m", "beam_inference", "run", path, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_receipts(run, output, count=2):
    wait_until(lambda: run.poll() is not None or len(receipts_of(output)) >= count, "receipts", 200)
    assert run.poll() is None, run.communicate()


def end_well(run, expected, output):
    """Wait for a launch that ends with the same bytes."""
    out, err = run.communicate(timeout=500)
    assert run.returncode == 0, out + err
    np.testing.assert_array_equal(read_volume(output), expected)
    return out + err


def test_both_hosts_work_without_being_told(engine, slow_job, tmp_path, capsys, result):
    path, expected = slow_job
    assert main(["run", path, *engine.flags]) == 0
    told = capsys.readouterr()
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    if engine.worker == "taskmanager":
        assert "2 of 2 slots free: --parallelism=2" in told.err
        assert "/#/job/running/" in told.err
    assert len({receipt.worker for receipt in receipts_of(tmp_path / "out")}) >= 2
    result("`strategy: recompute`")


def test_the_commands_of_the_page(engine, conv_job, tmp_path, result):
    path, expected = conv_job
    kind = engine.name.partition(" ")[0]
    names = {
        "job.yaml": path,
        "jobmanager:8081": engine.cluster.master,
        "spark://master:7077": engine.cluster.master,
        "this-host": engine.cluster.here.address,
    }
    runs = 0
    before = engine.count_jobs()
    for command in commands_of(f"A {kind} cluster"):
        words = with_names(command, names)
        if words[:3] == ["MALLOC_ARENA_MAX=1", "python", "-m"]:
            pools = [host.processes["pool"].args for host in engine.cluster.hosts]
            assert all(pool[-len(words) + 2 :] == words[2:] for pool in pools)
        elif words[0] == "beam-inference":
            # where the job server is, and what Java 17 needs
            told = {word.partition("=")[0] for word in words}
            more = [flag for flag in engine.flags if flag.partition("=")[0] not in told]
            java = [flag for flag in engine.flags if "extraJavaOptions" in flag]
            assert main([*words[1:], *more, *java]) == 0
            np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
            runs += 1
        else:
            file = engine.cluster.folder / f"flink-{engine.cluster.here.address}/config.yaml"
            assert words[0] in file.read_text(), "a setting of the cluster"
    assert runs == 1
    assert engine.count_jobs() > before
    result("the commands of this page")


def flink_job_server(engine):
    """The jar of the job server that a variable names."""
    jars = [flag for flag in engine.flags if flag.startswith("--flink_job_server_jar=")]
    if not jars:
        pytest.skip("FLINK_JOB_SERVER_JAR names no job server")
    return jars[0].partition("=")[2]


def test_the_job_server_of_the_page(engine, conv_job, tmp_path, monkeypatch, result):
    flink = only_flink(engine)
    monkeypatch.delattr("beam_inference.beam.job_server.ServerProcess")  # no other one is started
    path, expected = conv_job
    jar = flink_job_server(engine)
    ports = dict(zip(("8099", "8098", "8097"), map(str, free_ports(3)), strict=True))
    names = {
        "job.yaml": path,
        "jobmanager:8081": flink.master,
        "flink-job-server.jar": jar,
        **ports,
    }
    servers, _, run, _ = commands_of("A job server that you keep")
    flink.here.start("jobserver", with_names(servers, names))
    try:
        wait_until(lambda: listens("localhost", int(ports["8099"])), "the job server")
        assert main(with_names(run, names)[1:]) == 0
    finally:
        flink.here.kill("jobserver")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    result("a job server that you keep, as on this page")


def test_exchange_with_its_pyramid(engine, conv_exchange_job, tmp_path, result):
    path, expected = conv_exchange_job
    before = engine.count_jobs()
    assert main(["run", path, *engine.flags, "--set", "output.pyramid={levels: 1}"]) == 0
    assert engine.count_jobs() > before
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    result("`strategy: exchange`, and a pyramid")


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "IN", "OUT", "--block_shape", "16,16,16"],
        ["components", "IN", "OUT", "--threshold", "200"],
        ["segment", "AFFINITIES", "OUT", "--threshold", "150", "--low", "60", "--high", "250"],
        ["pyramid", "OUT", "--num-scales", "2"],
    ],
    ids=lambda words: words[0],
)
def test_commands_on_volumes(engine, words, volume_in, tmp_path, result):
    array = read_volume(volume_in)[0]
    write_volume(tmp_path / "affinities", np.stack([array] * 3), (3, -5, 2))

    def run(target, flags):
        names = {
            "IN": str(volume_in),
            "AFFINITIES": str(tmp_path / "affinities"),
            "OUT": str(tmp_path / target),
        }
        if words[0] == "pyramid":
            write_volume(tmp_path / target, array, (3, -5, 2))
        assert main([*(names.get(word, word) for word in words), *flags]) == 0

    run("here", [])
    before = engine.count_jobs()
    run("there", engine.flags)
    assert engine.count_jobs() > before
    here = files_of(tmp_path / "here")
    assert here
    assert files_of(tmp_path / "there") == here
    result(f"`{words[0]}`")


def test_steps_one_after_the_other(engine, conv_job, tmp_path, result):
    _, expected = conv_job
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())
    steps = {
        "map": job,
        "objects": "components out objects --channel 0 --threshold 0.1 --block_shape 16,16,16",
        "pyramid": "pyramid objects --num-scales 1",
    }
    path = str(write_job(tmp_path / "steps.yaml", {"steps": steps}))
    before = engine.count_jobs()
    assert main(["run", path, *engine.flags]) == 0
    assert engine.count_jobs() >= before + len(steps)
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    there = files_of(tmp_path / "objects")
    shutil.rmtree(tmp_path / "objects")
    assert main(["run", path, "--step", "objects"]) == 0
    assert main(["run", path, "--step", "pyramid"]) == 0
    assert files_of(tmp_path / "objects") == there
    result("steps: a job, `components`, `pyramid`")


def test_a_launch_on_this_machine_joins(engine, longer_job, tmp_path, result):
    path, expected = longer_job
    with start(path, engine.flags) as there:
        wait_for_receipts(there, tmp_path / "out", 1)
        with start(path, []) as here:
            told = [end_well(run, expected, tmp_path / "out") for run in (here, there)]
    done = [int(re.search(r"\((\d+) by this launch\)", each)[1]) for each in told]
    assert sum(done) == 18, "each chunk once"
    assert all(done), "both did some"
    result("a `run` on this machine joins the one that is under way")


def test_a_corrupt_block_is_quarantined(engine, conv_job, volume_in, tmp_path, result):
    path, expected = conv_job
    with truncated(next(volume_in.glob("*/*_*-*_*"))):
        assert main(["run", path, *engine.flags]) == 3
    list_file = str(tmp_path / "out/_beam_inference/quarantine.jsonl")
    assert main(["run", path, *engine.flags, "--chunks", list_file]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    result("a corrupt block: exit 3, then only its chunks")


def assert_kept(before, output):
    """What was done before a worker was lost was not done again."""
    after = {receipt.chunk: receipt for receipt in receipts_of(output)}
    assert all(after[receipt.chunk] == receipt for receipt in before), "done once, kept"


def test_a_worker_process_is_killed(engine, slow_job, tmp_path, result):
    path, expected = slow_job
    with start(path, engine.flags_of_long_tasks) as run:
        wait_for_receipts(run, tmp_path / "out")
        before = receipts_of(tmp_path / "out")
        os.kill(int(before[0].worker.rpartition(":")[2]), signal.SIGKILL)
        end_well(run, expected, tmp_path / "out")
    assert_kept(before, tmp_path / "out")
    result("a worker process killed")


def test_a_worker_passes_its_memory_limit(engine, slow_job, tmp_path, result):
    path, expected = slow_job
    with no_more_memory(f"bi{os.getpid()}") as deny, start(path, engine.flags_of_long_tasks) as run:
        wait_for_receipts(run, tmp_path / "out")
        before = receipts_of(tmp_path / "out")
        pid = int(before[0].worker.rpartition(":")[2])
        deny(pid)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the kernel ends it", 60)
        end_well(run, expected, tmp_path / "out")
    assert_kept(before, tmp_path / "out")
    result("a worker process ended by its memory limit (cgroup)")


def test_a_host_is_lost_and_comes_back(engine, slow_job, tmp_path, result):
    if len(engine.cluster.hosts) < 2:
        pytest.skip("there is one host: no network namespaces here")
    path, expected = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out")
        host = engine.cluster.hosts[1]
        host.lose()
        time.sleep(5)
        engine.start_host(host)
        end_well(run, expected, tmp_path / "out")
    result("a host lost, and back after five seconds")


def test_the_job_server_is_killed(engine, slow_job, tmp_path, result):
    path, expected = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out")
        # the watchdog is the launch's child, the server the watchdog's
        (watchdog,) = children_of(run.pid, "server_watchdog")
        (server,) = children_of(watchdog, "java")
        os.kill(server, signal.SIGKILL)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 1, out + err
    assert "to do what is missing" in out
    with start(path, engine.flags) as run:
        end_well(run, expected, tmp_path / "out")
    result("our job server killed: exit 1, and `run` again")


def test_a_job_server_that_the_user_started_is_killed(engine, slow_job, tmp_path, result):
    flink = only_flink(engine)
    path, expected = slow_job
    endpoint = flink.start_job_server(flink_job_server(engine))
    with start(path, [*engine.flags, f"--job_endpoint={endpoint}"]) as run:
        wait_for_receipts(run, tmp_path / "out")
        flink.here.kill("jobserver")
        out, err = run.communicate(timeout=120)
    assert run.returncode == 1, out + err
    assert "to do what is missing" in out
    with start(path, engine.flags) as run:
        end_well(run, expected, tmp_path / "out")
    result("a job server of yours killed: exit 1, and `run` again")


def children_of(pid, word):
    """Children of a process with a word in their command."""
    found = []
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for each in child.read_text().split():
            if word.encode() in Path(f"/proc/{each}/cmdline").read_bytes():
                found.append(int(each))
    return found


def test_the_launcher_is_killed_and_another_one_ends_the_job(engine, slow_job, tmp_path, result):
    path, expected = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out")
        run.kill()
    with start(path, engine.flags) as run:
        told = end_well(run, expected, tmp_path / "out")
    if engine.worker == "taskmanager":
        assert "slot" in told
    result("the launcher killed (SIGKILL), and `run` at once again")


def test_the_master_is_killed(engine, slow_job, tmp_path, result):
    if engine.name.startswith("Spark"):
        pytest.skip("a Spark master without recoveryMode forgets the job, which then waits")
    path, expected = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out")
        engine.cluster.here.kill(engine.master)
        time.sleep(2)
        engine.start_master()
        out, err = run.communicate(timeout=500)
    outcome = "goes on" if run.returncode == 0 else f"exit {run.returncode}, and `run` again"
    for host in engine.cluster.hosts:
        host.lose()
        engine.start_host(host)
    engine.wait_for_workers()
    if run.returncode != 0:
        assert "to do what is missing" in out, err
        with start(path, engine.flags) as run:
            end_well(run, expected, tmp_path / "out")
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    result("the JobManager or the master killed, and back", outcome)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(engine, slow_job, times, tmp_path, result):
    path, expected = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out")
        for _ in range(times):
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.5)
        begun = time.monotonic()
        out, err = run.communicate(timeout=90)
    assert run.returncode == 130, out + err
    is_gentle = times == 1  # a second one ends the launch where it stands
    assert ("to do what is missing" in out) == is_gentle
    assert "it is cancelled" not in out + err, "the workers have read the request"
    result(f"Ctrl-C {('once', 'twice')[times - 1]}", f"{time.monotonic() - begun:.0f} s later 130")
    with start(path, engine.flags) as run:
        end_well(run, expected, tmp_path / "out")


def only_flink(engine):
    if not isinstance(engine.cluster, FlinkOnHosts):
        pytest.skip("of Flink only")
    return engine.cluster


def test_a_host_that_does_not_come_back(engine, slow_job, tmp_path, result):
    """Flink waits for its slot: a stop cancels the job, and less parallelism ends it."""
    flink = only_flink(engine)
    if len(flink.hosts) < 2:
        pytest.skip("there is one host: no network namespaces here")
    path, expected = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out")
        flink.hosts[1].lose()
        time.sleep(15)  # until the JobManager notices
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130, out + err
    wait_until(lambda: len(flink.cluster.task_managers()) == 1, "the other host is given up")
    with start(path, engine.flags) as run:
        told = end_well(run, expected, tmp_path / "out")
    assert "1 of 1 slot free: --parallelism=1" in told
    engine.start_host(flink.hosts[1])
    result("a host lost for good: Ctrl-C, and `run` on the others")


def test_a_stop_while_the_job_waits_for_slots_cancels_it(engine, slow_job, result):
    flink = only_flink(engine)
    path, _ = slow_job
    with start(path, [*engine.flags, "--parallelism=3"]) as run:
        wait_until(lambda: any(not job.is_over for job in flink.cluster.jobs()), "a job", 100)
        time.sleep(2)
        os.killpg(run.pid, signal.SIGINT)
        begun = time.monotonic()
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130, out + err
    assert "--parallelism=3, but only 2 of 2 slots free" in err
    assert "nothing of the job runs: it is cancelled" in out + err
    assert all(job.is_over for job in flink.cluster.jobs())
    assert time.monotonic() < begun + 30
    result("Ctrl-C while it waits for slots", "cancelled, exit 130")


def test_a_job_cancelled_on_its_page_is_told(engine, slow_job, tmp_path, result):
    flink = only_flink(engine)
    path, _ = slow_job
    with start(path, engine.flags) as run:
        wait_for_receipts(run, tmp_path / "out", 1)
        (job,) = [job for job in flink.cluster.jobs() if not job.is_over]
        flink.cluster.cancel(job)
        out, err = run.communicate(timeout=100)
    assert run.returncode == 1, out + err
    assert "the job was cancelled on its engine, not by this launch" in out
    result("cancelled on Flink's page", "told, exit 1")


@pytest.mark.parametrize("way", ["REST", "command line"])
def test_a_jar_that_was_written_runs(engine, way, conv_job, tmp_path, capsys, result):
    flink = only_flink(engine)
    path, expected = conv_job
    jar = tmp_path / "job.jar"
    assert main(["run", path, *engine.flags, f"--output_executable_path={jar}"]) == 0
    assert f"staged at {jar}" in capsys.readouterr().out
    if way == "REST":
        run_by_rest(flink.cluster.url, jar)
    else:
        folder = flink.folder / f"flink-{flink.here.address}"
        command = ["java", "-cp", flink.class_path, "org.apache.flink.client.cli.CliFrontend"]
        command += ["run", "--detached", "-m", flink.master, str(jar)]
        subprocess.run(command, check=True, env=os.environ | {"FLINK_CONF_DIR": str(folder)})
    wait_until(lambda: len(receipts_of(tmp_path / "out")) == 18, "all chunks", 300)
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    result(f"`--output_executable_path`, run by {way}")


def run_by_rest(url, jar):
    boundary = "a-boundary"
    head = (
        f"--{boundary}\r\nContent-Disposition: form-data; name=jarfile; filename=job.jar\r\n"
        "Content-Type: application/java-archive\r\n\r\n"
    )
    body = head.encode() + jar.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    form = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/jars/upload", body, form)) as got:
        uploaded = json.load(got)["filename"].rpartition("/")[2]
    request = urllib.request.Request(f"{url}/jars/{uploaded}/run", b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=120) as got:
        assert json.load(got)["jobid"]


def test_an_uber_jar(engine, conv_job, tmp_path, monkeypatch, result):
    only_flink(engine)
    path, expected = conv_job
    monkeypatch.delattr("beam_inference.beam.job_server.ServerProcess")  # it needs none
    assert main(["run", path, *engine.flags, "--flink_submit_uber_jar"]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), expected)
    result("`--flink_submit_uber_jar`")
