"""Settings that reach every store, names that need decoding, stores that do not answer."""

import shutil
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import zarr
from fakes.http_stand_in import HttpStandIn, Response
from helpers import DATAFLOW, write_volume
from numcodecs import Shuffle

from beam_inference.beam.dataflow_gpus import runner_name
from beam_inference.beam.flags import beam_options
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Storage
from beam_inference.errors import BeamInferenceError, ConfigError, VolumeError
from beam_inference.foreign_text import holds_credentials
from beam_inference.job import state
from beam_inference.job.state import State
from beam_inference.volumes import kvstores as stores
from beam_inference.volumes.kvstores import (
    LOCAL,
    one_line,
    read_file,
    storage_of_environment,
    with_settings,
)
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.remote_files import find_remote_file

S3 = Storage.model_validate({"s3": {"endpoint": "http://localhost:9000", "region": "eu-west-1"}})


def test_settings_reach_every_s3_store_of_a_spec_that_names_none_itself():
    reached = {"endpoint": "http://localhost:9000", "aws_region": "eu-west-1"}
    plain = with_settings("s3://bucket/em/", S3)
    assert plain == {"driver": "s3", "bucket": "bucket", "path": "em/", **reached}
    nested = with_settings({"driver": "zarr3", "kvstore": "s3://bucket/em/"}, S3)
    assert nested == {"driver": "zarr3", "kvstore": plain}
    own = {"driver": "s3", "bucket": "bucket", "endpoint": "http://elsewhere"}
    assert with_settings(own, S3) == own
    assert with_settings("s3://bucket/em/", Storage()) == "s3://bucket/em/"
    assert with_settings({"driver": "stack", "layers": [{"kvstore": "s3://bucket/em/"}]}, S3)[
        "layers"
    ] == [{"kvstore": plain}]


def test_the_environment_completes_settings_but_is_held_to_the_same_rule():
    environment = {
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_REGION": "r",
        "STORAGE_EMULATOR_HOST": "http://g",
    }
    found = storage_of_environment(Storage(), environment)
    assert (found.s3.endpoint, found.s3.region, found.gcs.endpoint) == (
        "http://a",
        "r",
        "http://g",
    )
    assert storage_of_environment(S3, environment).s3 == S3.s3
    with pytest.raises(ConfigError, match=r"\$AWS_ENDPOINT_URL holds credentials") as error:
        storage_of_environment(Storage(), {"AWS_ENDPOINT_URL": "http://user:planted@host"})
    assert "planted" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "holds"),
    [
        ("https://user:planted@host/em", True),
        ("s3://AKIA:abc/planted+x@bucket/em", True),
        ("https://host/em?auth=planted", True),
        ("https://host/em?tok%65n=planted", True),
        ("http://localhost:8080/a@b", False),
        ("http://localhost:8080", False),
        ("gs://bucket/a:b/c", False),
        ("gs://bucket/net.py:factory", False),
        ("https://host/em?version=3", False),
    ],
)
def test_which_urls_hold_credentials(url, holds):
    assert holds_credentials(url) == holds


@pytest.mark.parametrize(
    "override",
    [
        "input=https://user:planted@host/em",
        "storage.s3=AKIA:planted",
        "storage.s3.concurrency=planted",
        (
            'input={"spec": {"driver": "zarr3", "kvstore": {"driver": "http", "Headers": ["x:'
            ' planted"]}}}'
        ),
        'input={"spec": {"driver": "zarr3", "aws_credentials": {"secret": "planted"}}}',
    ],
)
def test_what_may_be_secret_is_not_repeated(job, capsys, override):
    assert main(["run", job(), "--set", override]) == 2
    assert "planted" not in "".join(capsys.readouterr())


def test_names_with_spaces_and_umlauts(job, tmp_path, capsys):
    path = Path(job())
    folder = tmp_path / "my jobs ä"
    folder.mkdir()
    chunks = folder / "some chunks.txt"
    chunks.write_text("1\n2\n")
    shutil.copy(path, folder / "my job.yaml")
    assert read_file(chunks.as_uri()) == b"1\n2\n"
    assert main(["run", (folder / "my job.yaml").as_uri(), "--chunks", str(chunks)]) == 0
    assert "2 of 2 chunks done" in capsys.readouterr().out


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(VolumeError, match="does not exist"):
        read_file(f"file://{tmp_path}/nothing")


def values(**sections):
    inference = {"patch_shape": "8x8x8", "chunk_shape": "16x16x16"}
    return {
        "input": {"path": "../em"},
        "output": {"path": "out"},
        "model": {"path": "identity"},
    } | {
        "inference": inference,
        **sections,
    }


def test_paths_of_commands_are_as_they_read(monkeypatch, tmp_path):
    """A shell puts the home folder in, where it is meant."""
    monkeypatch.chdir(tmp_path)
    for name in ("~", "~nobody", "./~nobody", "~/a"):
        assert stores.url_of(name) == Path(f"{tmp_path}/{name}").as_uri()


def test_relative_paths_of_a_job_in_a_bucket_stay_in_it():
    job = parse_job(values(model={"path": "net.py:make", "weights": "../w.pt"}), "gs://bucket/jobs")
    assert (job.input.path, job.output.path) == ("gs://bucket/em", "gs://bucket/jobs/out")
    assert (job.model.path, job.model.weights) == (
        "gs://bucket/jobs/net.py:make",
        "gs://bucket/w.pt",
    )
    with pytest.raises(ConfigError, match="leads out of gs://bucket"):
        parse_job(values(), "gs://bucket")
    with pytest.raises(ConfigError, match="can only be read from"):
        parse_job(values(input={"path": "em"}), "http://host/jobs")


def test_a_store_that_accepts_and_never_answers(monkeypatch):
    monkeypatch.setattr(stores, "PATIENCE_SECONDS", 1)
    with socket.create_server(("localhost", 0)) as silent:
        threading.Thread(target=silent.listen, daemon=True).start()
        storage = Storage.model_validate(
            {"gcs": {"endpoint": f"http://localhost:{silent.getsockname()[1]}"}}
        )
        with pytest.raises(VolumeError, match="no answer in time"):
            read_file("gs://bucket/file", storage, 1)


class Answers(HttpStandIn):
    """Gives one answer to every request, while it is entered."""

    def __init__(self, response):
        super().__init__()
        self._response = response

    def _receive(self, request):
        return self._response


@pytest.mark.parametrize("code", [301, 302, 307])
def test_a_server_that_sends_requests_on_is_told_of(code):
    """TensorStore does not follow, and has no word for it."""
    elsewhere = Response(code, headers={"Location": "file:///etc/passwd"})
    what = rf"sends the request on to another address \(HTTP code {code}\), which is not followed"
    with Answers(elsewhere) as server:
        with pytest.raises(VolumeError, match=what):
            open_volume(f"{server.url}/em")
        with pytest.raises(BeamInferenceError, match=what):
            find_remote_file(f"{server.url}/em.npy", LOCAL)


def test_a_server_that_forbids_what_is_absent():
    with (
        Answers(Response(403)) as server,
        pytest.raises(VolumeError, match="Forbidden .*Of what is absent, the server must"),
    ):
        open_volume(f"{server.url}/em")


def test_filters_of_zarr_are_named(tmp_path):
    zarr.create_array(
        tmp_path / "em", shape=(4, 4, 4), dtype="uint16", zarr_format=2, filters=[Shuffle(2)]
    )
    with pytest.raises(VolumeError, match="encoded with filters of zarr v2, which cannot be read"):
        open_volume(str(tmp_path / "em"))


def test_a_state_folder_that_never_answers_is_told_of(monkeypatch, job, capsys):
    monkeypatch.setattr(state, "PATIENCE_SECONDS", 1)
    with socket.create_server(("localhost", 0)) as silent:
        storage = f"storage.gcs.endpoint=http://localhost:{silent.getsockname()[1]}"
        assert main(["status", job(), "--output=gs://bucket/out", "--set", storage]) in (1, 2)
    assert "no answer in time" in capsys.readouterr().err


def test_a_volume_named_with_its_driver(tmp_path):
    array = np.arange(16**3, dtype=np.uint16).reshape(16, 16, 16)
    url = write_volume(tmp_path / "v", array)
    assert open_volume(f"{url}|neuroglancer-precomputed:").bounds.shape == (16, 16, 16)


def test_copies_among_the_receipts_are_no_receipts(job, tmp_path, capsys):
    path = job()
    assert main(["run", path]) == 0
    receipts = sorted((tmp_path / "out" / "_beam_inference" / "receipts").rglob("*.json"))
    shutil.copy(receipts[3], receipts[3].with_name("000000000003 (copy).json"))
    assert main(["status", path]) == 0
    receipts[5].write_text("")
    assert main(["status", path]) == 1
    assert main(["verify", path]) == 1
    out = capsys.readouterr().out
    assert "17 of 18 chunks have a receipt" in out
    assert "wrong:" in out
    state = State(f"file://{tmp_path}/out/_beam_inference")
    assert len(state.of(state.load_job()).read_receipts(range(18))) == 17


@pytest.mark.parametrize(
    "name", ["dataflow", "Dataflow", "DataflowRunner", "apache_beam.runners.DataflowRunner"]
)
def test_a_runner_is_the_same_by_all_its_names(name):
    assert runner_name(name) == "dataflowrunner"


@pytest.mark.parametrize("flags", [["--runner=dataflow"], ["--runner", "Dataflow"]])
def test_dataflow_needs_its_image_by_whatever_name(flags):
    with pytest.raises(ConfigError, match="needs --sdk_container_image"):
        beam_options([*flags, *DATAFLOW[2:]])


def test_a_template_is_for_dataflow_only():
    with pytest.raises(ConfigError, match="--template_location stages a job for Dataflow"):
        beam_options(["--template_location=/tmp/t"])


def test_a_folder_that_cannot_be_created_is_named_as_people_write_it():
    error = ValueError(
        "PERMISSION_DENIED: Failed to create directory: "
        '"/a/out\\x00_b\\x00\\x31\\x36\\x1b.started": '
        "Read-only file system"
    )
    assert '"/a/out/_b/16\\x1b.started": Read-only' in one_line(error)
