"""Test that jobs on object stores give the bytes of local files and leave no secrets."""

import logging
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import yaml
from fakes.gcs import GcsStandIn
from fakes.s3 import KEYS, S3StandIn
from helpers import TOYS, job_values, read_volume

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.opening import open_volume


@pytest.fixture
def trained(tmp_path):
    """A network as TorchScript, random but fixed."""
    import torch

    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv3d(4, 2, 1)
    )
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.script(network).save(str(tmp_path / "network.ts"))
    return tmp_path / "network.ts"


def values_of(source, output, network, **sections):
    return job_values(
        source,
        output,
        model={"path": str(network), "output_channels": 2, "activation": "sigmoid"},
        inference={"threads": 1},
        **sections,
    )


@pytest.fixture
def local(volume_in, trained, tmp_path):
    """The result on local files."""
    (tmp_path / "local.yaml").write_text(
        yaml.safe_dump(values_of(volume_in, tmp_path / "local", trained))
    )
    assert main(["run", str(tmp_path / "local.yaml")]) == 0
    return read_volume(tmp_path / "local")


def upload(folder, put):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put(f"{folder.name}/{path.relative_to(folder)}", path.read_bytes())


def read_remote(url, **storage):
    volume = open_volume(url, storage=Storage.model_validate(storage))
    return volume.read(volume.bounds)


def test_everything_on_google_cloud_storage(volume_in, trained, local, monkeypatch, capsys):
    with GcsStandIn(["data"], fail_rate=0.05, latency=0.002, seed=1) as gcs:
        upload(volume_in, partial(gcs.put, "data"))
        gcs.put("data", "jobs/network.ts", trained.read_bytes())
        values = values_of("../in", "gs://data/out", "network.ts")
        gcs.put("data", "jobs/job.yaml", yaml.safe_dump(values).encode())
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)  # for the job file itself, too
        assert main(["run", "gs://data/jobs/job.yaml"]) == 0
        np.testing.assert_array_equal(
            read_remote("gs://data/out", gcs={"endpoint": gcs.url}), local
        )
        assert main(["verify", "gs://data/jobs/job.yaml", "--deep"]) == 0
        gcs.put("data", "chunks", b"3\n5\n")
        assert main(["run", "gs://data/jobs/job.yaml", "--chunks", "gs://data/chunks"]) == 0
        assert len(gcs.names("data", "out/_beam_inference/receipts/")) == 18
        assert sum(gcs.failures.values()) > 5
        capsys.readouterr()
        assert main(["show", "gs://data/out"]) == 0
        assert "gs://data/in" in capsys.readouterr().out
        again = ["reproduce", "gs://data/out", "--sample", "0.2"]
        assert main(again) == 2
        assert "gs://data/jobs/network.ts" in capsys.readouterr().err
        assert main([*again, "--trust_code"]) == 0
        state = "gs://data/out/_beam_inference"
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        delete_folder(state, storage)
        assert main([*again, "--trust_code"]) == 0
        assert not gcs.names("data", "out/_beam_inference/")


@pytest.mark.slow
def test_everything_on_s3_and_no_secret_is_left(
    volume_in, trained, local, tmp_path, monkeypatch, caplog, capfd
):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with S3StandIn(["data"], fail_rate=0.05, latency=0.002) as s3:
        client = s3.client()
        upload(volume_in, lambda name, body: client.put_object(Bucket="data", Key=name, Body=body))
        client.put_object(Bucket="data", Key="network.ts", Body=trained.read_bytes())
        storage = {"s3": {"endpoint": s3.url, "region": "us-east-1", "credentials": "environment"}}
        values = values_of("s3://data/in", "s3://data/out", "s3://data/network.ts", storage=storage)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
        caplog.set_level(logging.DEBUG)
        for client_of_this_test in ("botocore", "boto3", "urllib3"):
            caplog.set_level(logging.WARNING, client_of_this_test)
        # A block that is no block: errors are told and recorded, too.
        block = next(name for name in s3.names("data", "in/10") if "_" in name)
        whole = client.get_object(Bucket="data", Key=block)["Body"].read()
        client.put_object(Bucket="data", Key=block, Body=whole[:100])
        assert main(["run", str(tmp_path / "job.yaml"), "--debug"]) == 3
        client.put_object(Bucket="data", Key=block, Body=whole)
        assert main(["run", str(tmp_path / "job.yaml")]) == 0
        np.testing.assert_array_equal(read_remote("s3://data/out", **storage), local)
        assert main(["verify", str(tmp_path / "job.yaml"), "--deep"]) == 0
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
        assert main(["reproduce", "s3://data/out", "--sample", "0.1", "--trust_code"]) == 0
        assert s3.requests["failed"] > 5
        told = caplog.text + "".join(capfd.readouterr())
        written = [
            client.get_object(Bucket="data", Key=key)["Body"].read()
            for key in s3.names("data", "out/")
        ]
    assert "quarantined" in told
    for secret in KEYS.values():
        assert secret not in told
        assert not any(secret.encode() in content for content in written)


@pytest.mark.parametrize(
    "url",
    [
        "https://user:planted@host/em",
        "https://host/em?X-Goog-Signature=planted",
        "s3://key:planted@bucket/em",
    ],
)
def test_credentials_in_a_url_are_refused_without_repeating_them(job, capsys, url):
    assert main(["run", job(input={"path": url})]) == 2
    told = "".join(capsys.readouterr())
    assert "holds credentials" in told
    assert "planted" not in told


@pytest.mark.parametrize("where", ["job", "--chunks"])
def test_credentials_in_a_url_on_the_command_line_are_refused(job, capsys, where):
    url = "https://host/file?token=planted"
    assert main(["run", url] if where == "job" else ["run", job(), "--chunks", url]) == 2
    told = "".join(capsys.readouterr())
    assert "holds credentials" in told
    assert "planted" not in told


def test_credentials_in_a_spec_are_refused(job, capsys):
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "http",
            "base_url": "http://host",
            "headers": ["Authorization: planted"],
        },
    }
    assert main(["run", job(input={"path": None, "spec": spec})]) == 2
    told = "".join(capsys.readouterr())
    assert "holds credentials" in told
    assert "planted" not in told


class _Folder(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path):
    """The test's folder over HTTP; its URL."""
    server = ThreadingHTTPServer(("localhost", 0), partial(_Folder, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_input_model_and_job_file_over_http(volume_in, trained, local, served, tmp_path):
    values = values_of("in", tmp_path / "out", "network.ts")
    values["output"]["path"] = f"file://{tmp_path}/out"
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
    assert main(["run", f"{served}/job.yaml"]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), local)


@pytest.mark.slow
def test_a_store_that_is_not_there_is_told_of_soon(job, capsys):
    path = job(
        input={"path": "gs://bucket/em"}, storage={"gcs": {"endpoint": "http://localhost:1"}}
    )
    assert main(["run", path]) == 2
    assert re.search("cannot (read|open) gs://bucket/em", capsys.readouterr().err)


def test_a_network_is_fetched_once_and_again_if_its_copy_is_damaged(
    trained, served, tmp_path, monkeypatch
):
    from beam_inference.config.network import Network
    from beam_inference.errors import ModelContractError
    from beam_inference.models.fetch import local_model
    from beam_inference.models.hashes import model_sha256

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    model = Network(path=f"{served}/network.ts")
    first = local_model(model)
    sha256 = model_sha256(first)
    moved = trained.rename(tmp_path / "elsewhere")
    assert local_model(model, sha256=sha256) == first  # from the cache: it cannot be fetched
    with pytest.raises(ModelContractError, match="does not exist"):
        local_model(model)
    shutil.copy(moved, trained)
    with open(first.path, "ab") as file:
        file.write(b"damage")
    assert model_sha256(local_model(model, sha256=sha256)) == sha256
    trained.write_bytes(b"another")
    with open(first.path, "ab") as file:
        file.write(b"damage")
    with pytest.raises(ModelContractError, match="changed since"):
        local_model(model, sha256=sha256)


def test_a_worker_refuses_a_network_that_was_changed_since_launch(volume_in, trained, tmp_path):
    from beam_inference.config.job_file import parse_job
    from beam_inference.errors import WorkerFault
    from beam_inference.launch.prepare import prepare
    from beam_inference.worker.worker import Worker

    launch = prepare(parse_job(values_of(volume_in, tmp_path / "out", trained), tmp_path))
    trained.write_bytes(trained.read_bytes() + b" ")
    with pytest.raises(WorkerFault, match="changed since"):
        Worker(launch)


@pytest.mark.slow
def test_factories_come_from_object_stores_too(volume_in, served, tmp_path):
    shutil.copy(TOYS, tmp_path / "toys.py")
    values = job_values(volume_in, tmp_path / "out", model={"path": f"{served}/toys.py:same"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
    code = "import sys; from beam_inference.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", str(tmp_path / "job.yaml")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_blocks_that_neighbouring_chunks_share_are_read_once_in_a_run(
    volume_in, local, trained, tmp_path, monkeypatch
):
    def requests(name):
        with GcsStandIn(["bucket"]) as gcs:
            upload(volume_in, partial(gcs.put, "bucket"))
            values = values_of("gs://bucket/in", tmp_path / name, trained, job={"run_length": 6})
            values["storage"] = {"gcs": {"endpoint": gcs.url}}
            (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
            assert main(["run", str(tmp_path / "job.yaml")]) == 0
            np.testing.assert_array_equal(read_volume(tmp_path / name), local)
            return gcs.requests["GET media"]

    kept = requests("kept")
    monkeypatch.setattr(ResolvedJob, "cached_input_bytes", lambda self, threads: [0])
    without = requests("not-kept")
    print(kept, without)
    assert kept < 0.6 * without
