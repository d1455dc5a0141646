"""Functions of the user's in files: by path and by URL, known by their hashes."""

import http.server
import shutil
import tempfile
import threading
from functools import partial

import numpy as np
import pytest
import yaml
from fakes.gcs import GcsStandIn
from helpers import OF_RANGE, job_values, read_volume, write_job

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job, parse_job_text
from beam_inference.errors import ConfigError, ModelContractError, StateError, WorkerFault
from beam_inference.worker.worker import Worker

SOURCE = "def scaled(values):\n    return values * {}\n"


def own(function):
    return {"operator": "own", "function": function, "output_channels": 1}


def job_with(function, volume_in, folder):
    values = job_values(volume_in, folder / "out", inference={"patch_overlap": [0, 0, 0]})
    return parse_job(values | {"postprocess": [own(function)]}, folder)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder that a web server serves: the URL, the folder, and the paths that were asked for."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tmp_path / "served"
    folder.mkdir()
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            requests.append(self.path)

    handler = partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}", folder, requests
        server.shutdown()


def test_a_file_that_was_changed_between_launches_is_refused(volume_in, tmp_path):
    file = tmp_path / "ops.py"
    file.write_text(SOURCE.format(1))
    job = job_with("ops.py:scaled", volume_in, tmp_path)
    list(Worker(prepare(job)).infer_chunks([0]))
    file.write_text(SOURCE.format(2))
    with pytest.raises(StateError, match=r"(?s)another job.*postprocess\.0.*sha256"):
        prepare(job)
    file.write_text(SOURCE.format(1))
    prepare(job)


def test_a_worker_refuses_another_file_than_the_launch_had(volume_in, tmp_path):
    file = tmp_path / "ops.py"
    file.write_text(SOURCE.format(1))
    launch = prepare(job_with("ops.py:scaled", volume_in, tmp_path))
    file.write_text(SOURCE.format(2))
    with pytest.raises(WorkerFault, match="operators' files .*changed since"):
        Worker(launch)


def test_a_folder_that_was_moved_holds_the_same_job(volume_in, tmp_path):
    before = tmp_path / "before"
    before.mkdir()
    (before / "ops.py").write_text(SOURCE.format(1))
    first = prepare(job_with("ops.py:scaled", volume_in, before)).read_job()
    shutil.move(before, tmp_path / "after")
    again = prepare(job_with("ops.py:scaled", volume_in, tmp_path / "after")).read_job()
    assert again.fingerprint == first.fingerprint


def test_a_file_by_its_file_url(volume_in, tmp_path):
    (tmp_path / "o ps.py").write_text(SOURCE.format(3))
    url = (tmp_path / "o ps.py").as_uri()
    by_url = prepare(job_with(f"{url}:scaled", volume_in, tmp_path))
    by_path = prepare(job_with("o ps.py:scaled", volume_in, tmp_path))
    assert by_url.read_job().fingerprint == by_path.read_job().fingerprint
    list(Worker(by_url).infer_chunks(range(by_url.read_job().plan.chunks.count)))
    out = read_volume(tmp_path / "out")
    np.testing.assert_allclose(out, 3.0 * read_volume(volume_in), rtol=0, atol=3 * OF_RANGE)


def test_a_file_by_url_is_fetched_once_and_refused_where_it_was_changed(
    served, volume_in, tmp_path, capsys
):
    url, folder, requests = served
    (folder / "ops.py").write_text(SOURCE.format(2))
    values = job_values(volume_in, tmp_path / "out", inference={"patch_overlap": [0, 0, 0]})
    values["postprocess"] = [own(f"{url}/ops.py:scaled")]
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 0
    out = read_volume(tmp_path / "out")
    np.testing.assert_allclose(out, 2.0 * read_volume(volume_in), rtol=0, atol=2 * OF_RANGE)
    launch = prepare(parse_job(values, tmp_path))
    requests.clear()
    (folder / "ops.py").write_text(SOURCE.format(5))
    Worker(launch)
    assert requests == [], "this machine has it"
    capsys.readouterr()
    assert main(["run", job]) == 2
    assert "postprocess.0" in capsys.readouterr().err
    for copy in tmp_path.glob("beam_inference_models_*/*/ops.py"):
        copy.write_text("# damaged")
    with pytest.raises(ModelContractError, match=r"postprocess\.0: .* launched with .* changed"):
        Worker(launch)


def test_a_file_that_is_absent_is_named(volume_in, tmp_path):
    with pytest.raises(ModelContractError, match=r"postprocess\.0: there is no file .*/ops\.py"):
        prepare(job_with("ops.py:scaled", volume_in, tmp_path))


def test_a_job_in_a_bucket_with_its_file_beside_it(volume_in, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inference = {"patch_overlap": [0, 0, 0], "threads": 1}
    with GcsStandIn() as gcs:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        values = job_values(volume_in, tmp_path / "out", inference=inference)
        values |= {"postprocess": [own("ops.py:scaled")]}
        gcs.put("data", "jobs/ops.py", SOURCE.format(4).encode())
        gcs.put("data", "jobs/job.yaml", yaml.safe_dump(values).encode())
        assert main(["run", "gs://data/jobs/job.yaml"]) == 0
    out = read_volume(tmp_path / "out")
    np.testing.assert_allclose(out, 4.0 * read_volume(volume_in), rtol=0, atol=4 * OF_RANGE)


def test_a_file_beside_a_job_file_in_a_bucket():
    text = """
    input: {path: in}
    output: {path: out, dtype: float32}
    model: {path: identity}
    inference: {patch_shape: [8, 8, 8], chunk_shape: [8, 8, 8]}
    postprocess: [{operator: own, function: 'ops.py:scaled', output_channels: 1}]
    """
    (operator,) = parse_job_text(text, "gs://bucket/jobs", "job.yaml").postprocess
    assert operator.needed_files == ["gs://bucket/jobs/ops.py"]


@pytest.mark.parametrize(
    "url", ["https://me:hidden@host/ops.py:f", "https://host/ops.py?token=hidden/x.py:f"]
)
def test_a_url_with_credentials_is_refused_and_not_repeated(volume_in, tmp_path, url):
    with pytest.raises(ConfigError, match=r"postprocess\.0\.function: .*holds credentials") as said:
        job_with(url, volume_in, tmp_path)
    assert "hidden" not in str(said.value)
