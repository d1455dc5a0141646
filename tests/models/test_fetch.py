"""A network's files by URL: fetched once, by their hashes, and refused where they were changed."""

import http.server
import tempfile
import threading
from functools import partial

import numpy as np
import pytest
from helpers import OF_RANGE, job_values, read_volume, write_job

from beam_inference.cli.main import main
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import model_sha256
from beam_inference.models.loading import load_network

SOURCE = "def network():\n    return lambda batch: {} * batch\n"


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


def test_a_source_file_is_fetched_once_and_refused_where_it_was_changed(served):
    url, folder, requests = served
    (folder / "net.py").write_text(SOURCE.format(2))
    model = Network(path=f"{url}/net.py:network")
    launched = local_model(model)
    sha256 = model_sha256(launched)
    network = load_network(launched)
    assert network.network(np.float32(3)) == 6
    requests.clear()
    (folder / "net.py").write_text(SOURCE.format(5))
    assert local_model(model, sha256=sha256) == launched, "this machine has it"
    assert requests == []
    launched_file = launched.path.rpartition(":")[0]
    with open(launched_file, "w") as file:
        file.write("# damaged")
    with pytest.raises(ModelContractError, match="the job was launched with .* changed since"):
        local_model(model, sha256=sha256)


def test_a_job_whose_network_is_a_source_file_by_url(served, volume_in, tmp_path, capsys):
    url, folder, _ = served
    (folder / "net.py").write_text(SOURCE.format(2))
    model = {"path": f"{url}/net.py:network"}
    values = job_values(volume_in, tmp_path / "out", model=model, inference={"engine": "auto"})
    job = str(write_job(tmp_path / "job.yaml", values))
    assert main(["run", job]) == 0
    expected = 2.0 * read_volume(volume_in)
    np.testing.assert_allclose(read_volume(tmp_path / "out"), expected, rtol=0, atol=2 * OF_RANGE)
    (folder / "net.py").write_text(SOURCE.format(3))
    assert main(["run", job]) == 2
    assert "model.sha256" in capsys.readouterr().err
