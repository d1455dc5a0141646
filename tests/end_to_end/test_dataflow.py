"""Dataflow, as far as it can be seen without Google: the real runner submits to a stand-in, and
what it has staged is executed, by the installed package alone, with Dataflow's retries, over a
Cloud Storage that fails now and then.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from fakes.dataflow import DONE, FAILED, DataflowStandIn, Job
from fakes.gcs import GcsStandIn, error_response
from fib25_job import NETWORKS, affinity_job, run_affinities
from oracles.downsampling import level_above

from beam_inference.config.storage import Storage
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.opening import open_volume

ROOT = Path(__file__).parents[2]
IMAGE = "region-docker.pkg.dev/p/r/beam-inference:1"
ROI = {"start": [0, 0, 0], "stop": [32, 96, 96]}
CHUNK = (16, 48, 48)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The package as pip installs it, alone in a folder: what an image has."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    source.mkdir()
    for name in ("beam_inference", "setup.py", "pyproject.toml", "README.md"):
        (source / name).symlink_to(ROOT / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder / "site"),
    ]
    subprocess.run([*command, str(source)], check=True, timeout=100)
    return folder / "site"


class FaultyGcs(GcsStandIn):
    """Some receipts cannot be written at first: what a worker cannot absorb."""

    refuse = 0
    refused = 0

    def _answer(self, request):
        if "receipts" in request.target and request.method == "POST" and self.refused < self.refuse:
            self.refused += 1
            return error_response(403, "forbidden", "injected, and not to be retried")
        return super()._answer(request)


class Google:
    """Stand-ins for its services, and an image that runs in this machine's processes."""

    def __init__(self, gcs: FaultyGcs, site: Path, folder: Path) -> None:
        self.gcs = gcs
        self.site = site
        self.folder = folder
        self.reports: list[dict] = []
        self.logs = ""

    def environment(self, **more: str) -> dict[str, str]:
        """Environment of a process in the image, which can import only what is installed there."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if "PYTHON" not in key and "STORAGE" not in key
        }
        return kept | {"PYTHONPATH": str(self.site), "NO_GCE_CHECK": "true"} | more

    def launcher(self, *flags: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
        """``templates/main.py``, copied out of the checkout as the image has it."""
        entry = self.folder / "main.py"
        entry.write_text(NO_CREDENTIALS + (ROOT / "templates" / "main.py").read_text())
        return subprocess.run(
            [sys.executable, str(entry), *flags],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment(STORAGE_EMULATOR_HOST=self.gcs.url),
            timeout=timeout,
        )

    def work(self, job: Job) -> str:
        """What Dataflow does: fetches the staged pipeline and runs it in the image."""
        options = job.body["environment"]["sdkPipelineOptions"]["options"]
        bucket, _, name = options["pipelineUrl"].removeprefix("gs://").partition("/")
        (self.folder / "pipeline.pb").write_bytes(self.gcs.get(bucket, name))
        worker = self.folder / "dataflow_worker.py"
        worker.write_text((ROOT / "tests" / "fakes" / "dataflow_worker.py").read_text())
        done = subprocess.run(
            [sys.executable, str(worker), str(self.folder / "pipeline.pb")],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment(),
            timeout=110,
        )
        self.logs += done.stdout + done.stderr
        if done.returncode:
            return FAILED
        self.reports.append(json.loads(done.stdout.splitlines()[-1]))
        return DONE


@contextmanager
def google(installed: Path, folder: Path, **faults: float) -> Iterator[Google]:
    with FaultyGcs(["bucket"], **faults) as gcs:
        yield Google(gcs, installed, folder)


def upload_job(gcs: GcsStandIn, source: Path, **sections: dict) -> None:
    """The volume, the network and the job file, as users have them in a bucket."""
    for path in filter(Path.is_file, source.rglob("*")):
        gcs.put("bucket", f"em/{path.relative_to(source)}", path.read_bytes())
    for name in ("fib25.py", "fib25.safetensors"):
        gcs.put("bucket", f"jobs/{name}", (NETWORKS / name).read_bytes())
    values = affinity_job(Path("../em"), Path("../out"), CHUNK, roi=ROI)
    values["model"] |= {"path": "fib25.py:fib25_network", "weights": "fib25.safetensors"}
    for section, keys in sections.items():
        values.setdefault(section, {}).update(keys)
    gcs.put("bucket", "jobs/job.yaml", yaml.safe_dump(values).encode())


def result_of(gcs: GcsStandIn) -> np.ndarray:
    volume = open_volume(
        "gs://bucket/out", storage=Storage.model_validate({"gcs": {"endpoint": gcs.url}})
    )
    return volume.read(volume.bounds)


# Beam would look for Google's credentials for twenty seconds, whatever --no_auth says.
NO_CREDENTIALS = (
    "from apache_beam.internal.gcp import auth\nauth._Credentials._credentials_init = True\n"
)

FLAGS = (
    "--job=gs://bucket/jobs/job.yaml",
    "--runner=DataflowRunner",
    "--project=my-project",
    "--region=us-central1",
    "--no_auth",
    "--job_name=affinities",
    "--temp_location=gs://bucket/temp",
    "--staging_location=gs://bucket/staging",
    f"--sdk_container_image={IMAGE}",
)


def test_the_submitted_graph_is_executed_with_retries_and_gives_the_same_bytes(
    installed, fib25, tmp_path
):
    local, _ = run_affinities(
        tmp_path / "local.yaml", affinity_job(fib25, tmp_path / "local", CHUNK, roi=ROI)
    )
    with (
        google(installed, tmp_path, fail_rate=0.05, latency=0.002, seed=3) as cloud,
        DataflowStandIn(cloud.work) as dataflow,
    ):
        upload_job(cloud.gcs, fib25)
        cloud.gcs.refuse = 3
        run = cloud.launcher(*FLAGS, f"--dataflow_endpoint={dataflow.url}", "--max_num_workers=4")
        assert run.returncode == 0, run.stdout + run.stderr + cloud.logs
        assert "8 of 8 chunks done" in run.stdout
        np.testing.assert_array_equal(result_of(cloud.gcs), local)
        assert cloud.gcs.refused == 3, "three attempts of a bundle ended with an error"
        assert cloud.reports, cloud.logs
        # Of an attempt that failed, the stand-in counts the chunks that were done before, too: how
        # many these are depends on which request of which thread was refused.
        assert 8 <= cloud.reports[0]["counters"]["chunks_done"] <= 4 * 8
        assert sum(cloud.gcs.failures.values()) > 2
        (job,) = dataflow.jobs.values()
    environment = job.body["environment"]
    (pool,) = environment["workerPools"]
    assert {image["containerImage"] for image in pool["sdkHarnessContainerImages"]} == {IMAGE}
    assert pool["autoscalingSettings"]["maxNumWorkers"] == 4
    assert pool["packages"] == [] or all(
        "pickled_main_session" not in p["name"] for p in pool["packages"]
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_a_job_file_leaves_open_is_decided_by_a_job_before_the_job(installed, fib25, tmp_path):
    left_open = {"device": "auto", "engine": "auto", "batch_size": "auto", "chunk_shape": "auto"}
    with google(installed, tmp_path) as cloud, DataflowStandIn(cloud.work) as dataflow:
        upload_job(cloud.gcs, fib25, inference=left_open)
        flags = (*FLAGS, f"--dataflow_endpoint={dataflow.url}", "--max_num_workers=4")
        run = cloud.launcher(*flags, timeout=300)
        assert run.returncode == 0, run.stdout + run.stderr + cloud.logs
        trial, job = dataflow.jobs.values()
        decided = json.loads(cloud.gcs.get("bucket", "out/_beam_inference/job.json"))
        assert not [name for name in cloud.gcs.names("bucket", "out") if name.endswith(".answer")]
        again = cloud.launcher(*flags)
        assert again.returncode == 0, again.stdout + again.stderr
        assert len(dataflow.jobs) == 2, "all is done, and nobody is asked"
    assert [each.body["name"] for each in (trial, job)] == ["affinities-trial", "affinities"]
    (pool,) = trial.body["environment"]["workerPools"]
    assert pool["autoscalingSettings"]["maxNumWorkers"] == 1
    assert decided["config"]["inference"]["device"] == "cpu"
    assert decided["patch_seconds"] > 0


@pytest.mark.slow
def test_a_gpu_job_as_the_flex_launcher_starts_it(installed, fib25, tmp_path):
    """Its pipeline is staged for Dataflow to launch: nothing waits, and nothing is judged yet."""
    with google(installed, tmp_path) as cloud:
        upload_job(cloud.gcs, fib25, inference={"device": "cuda"})
        run = cloud.launcher(
            *FLAGS,
            "--template_location=gs://bucket/staging/template_launches/1/job_object",
            "--gpu=t4",
            "--gpu_driver=",
            "--overwrite=false",
            "--roi=0x0x0:16x96x96",
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "staged at gs://bucket/staging/template_launches/1/job_object" in run.stdout
        assert "worker_accelerator=type:nvidia-tesla-t4;count:1;install-nvidia-driver" in run.stderr
        body = json.loads(cloud.gcs.get("bucket", "staging/template_launches/1/job_object"))
        resolved = json.loads(cloud.gcs.get("bucket", "out/_beam_inference/job.json"))
    options = body["environment"]["sdkPipelineOptions"]["options"]
    assert any("worker_accelerator" in option for option in options["dataflow_service_options"])
    assert "no_use_multiple_sdk_containers" in options["experiments"]
    assert options["number_of_worker_harness_threads"] == 2
    assert body["environment"]["workerPools"][0]["machineType"].startswith("n1-")
    assert resolved["roi"] == {"start": [0, 0, 0], "stop": [16, 96, 96]}
    assert resolved["config"]["inference"]["device"] == "cuda"


@pytest.mark.slow
def test_a_staged_template_is_judged_by_its_own_last_step(installed, fib25, tmp_path):
    """A Flex Template's launcher ends before its job, so quarantined chunks must fail the job."""
    with google(installed, tmp_path) as cloud:
        upload_job(cloud.gcs, fib25, job={"max_failed_chunks": 0})
        block = next(name for name in cloud.gcs.names("bucket", "em/10") if "_" in name)
        cloud.gcs.put("bucket", block, cloud.gcs.get("bucket", block)[:10])
        run = cloud.launcher(*FLAGS, "--template_location=gs://bucket/template")
        assert run.returncode == 0, run.stdout + run.stderr
        body = json.loads(cloud.gcs.get("bucket", "template"))
        assert cloud.work(Job("1", "affinities", "p", "us-central1", body)) == FAILED
        assert "job.max_failed_chunks allows 0" in cloud.logs
        assert cloud.gcs.get("bucket", "out/_beam_inference/quarantine.jsonl").count(b"\n") == 8


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_staged_template_goes_on_with_the_pyramid(installed, fib25, tmp_path):
    """Scales are made by stages of the staged graph, for the launcher is gone by then."""
    with google(installed, tmp_path, fail_rate=0.02, latency=0.002, seed=5) as cloud:
        upload_job(cloud.gcs, fib25, output={"pyramid": {"levels": 2}})
        storage = Storage.model_validate({"gcs": {"endpoint": cloud.gcs.url}})
        run = cloud.launcher(*FLAGS, "--template_location=gs://bucket/template")
        assert run.returncode == 0, run.stdout + run.stderr
        assert len(volume_at("gs://bucket/out", storage).scales) == 1
        body = json.loads(cloud.gcs.get("bucket", "template"))
        assert cloud.work(Job("1", "affinities", "p", "us-central1", body)) == DONE, cloud.logs
        volumes = [open_volume("gs://bucket/out", scale=k, storage=storage) for k in range(3)]
        base, *levels = [volume.read(volume.bounds) for volume in volumes]
    for level in levels:
        base = level_above(base, (0, 0, 0), (2, 2, 2), "mean")
        np.testing.assert_array_equal(level, base)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([f for f in FLAGS if "sdk_container_image" not in f], "needs --sdk_container_image"),
        ([*FLAGS, "--project=p"], "Invalid Project ID"),
        ([*FLAGS, "--gpu=t4"], "device: cpu with --gpu=t4"),
        ([*FLAGS, "--input=/data/em"], "remote workers cannot reach"),
        (
            [*FLAGS, "--set=inference.device=auto", "--template_location=gs://bucket/template"],
            "inference.device: auto is not known before the launch on a remote",
        ),
        (
            [*FLAGS, "--model=/home/me/net.ts", "--set=model.weights=null"],
            "remote workers cannot reach",
        ),
    ],
)
def test_what_could_not_work_there_is_refused_before_anything_is_created(
    monkeypatch, tmp_path, flags, message, capsys
):
    from beam_inference.cli.main import run_with_flags

    with GcsStandIn(["bucket"]) as gcs:
        upload_job(gcs, tmp_path)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        assert run_with_flags(flags) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not gcs.names("bucket", "out")


def test_the_image_has_the_package_and_nothing_of_the_checkout(installed, tmp_path):
    code = (
        "import importlib.util as u, beam_inference, beam_inference.demo, pathlib; "
        "print(beam_inference.__file__); assert all(u.find_spec(name) is None for name in "
        "('benchmarks', 'templates', 'helpers')); assert "
        "(pathlib.Path(beam_inference.demo.__file__).parent / 'tissue.safetensors').is_file()"
    )
    cloud = Google(None, installed, tmp_path)
    run = partial(
        subprocess.run, cwd=tmp_path, env=cloud.environment(), capture_output=True, text=True
    )
    done = run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
