"""Packages on Hugging Face, from a local server: fetched by commit, kept, and refused by name."""

import logging
import shutil
import warnings
from pathlib import Path

import cellmap_packages as made
import pytest
from fakes.hugging_face import files_of_folder, serve_repository
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.launch.job_files import load_job
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import model_sha256
from beam_inference.models.hugging_face import fetch_repository, parse_address

pytest.importorskip("huggingface_hub")

FIRST = "1" * 40
SECOND = "2" * 40
NAME = "cellmap/mito"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with two commits of a package, and a cache of its own."""
    folder = made.make_package(tmp_path / "package")
    (folder / "training.zarr").write_bytes(b"large")
    files = files_of_folder(folder)
    changed = files | {"metadata.json": files["metadata.json"].replace(b'"mito"', b'"new"')}
    fetch_repository.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve_repository(NAME, {FIRST: files, SECOND: changed}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
    fetch_repository.cache_clear()


def hash_of(path):
    """Hash of a network, wherever it lies."""
    return model_sha256(local_model(Network(path=path, output_channels=2)))


def test_a_repository_is_its_files(server, tmp_path):
    folder = fetch_repository(f"hf://{NAME}@{FIRST}")
    assert folder.name == FIRST
    assert sorted(path.name for path in folder.iterdir()) == ["metadata.json", "model.ts"]
    assert hash_of(f"hf://{NAME}@{FIRST}") == hash_of(str(tmp_path / "package"))
    assert hash_of(f"hf://{NAME}@{SECOND}") != hash_of(str(tmp_path / "package"))


def test_a_commit_is_fetched_once(server):
    fetch_repository(f"hf://{NAME}@{FIRST}")
    fetch_repository.cache_clear()
    server.requests.clear()
    fetch_repository(f"hf://{NAME}@{FIRST}")
    assert not [request for request in server.requests if request.endswith("model.ts")]


def test_without_a_revision_the_commit_is_told(server, caplog):
    with caplog.at_level(logging.WARNING):
        assert fetch_repository(f"hf://{NAME}").name == SECOND
    assert f"write hf://{NAME}@{SECOND} to keep it" in caplog.text


def test_init_names_the_commit(server, tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 16), dtype=np.uint8)
    write_volume(tmp_path / "em", image, voxel_size_nm=(16, 16, 16))
    assert main(["init", "--model", f"hf://{NAME}", "--input", "em"]) == 0
    model = load_job("job.yaml").model
    assert model.path == f"hf://{NAME}@{SECOND}"
    assert model.sha256 == hash_of(f"hf://{NAME}@{SECOND}")
    assert main(["run", "job.yaml"]) == 0
    assert main(["verify", "job.yaml", "--recompute", "1"]) == 0
    assert SECOND in (tmp_path / "prediction" / "_beam_inference" / "job.json").read_text()


def test_another_commit_than_the_job_began_with_is_refused(server):
    digest = hash_of(f"hf://{NAME}@{FIRST}")
    network = Network(path=f"hf://{NAME}@{SECOND}", output_channels=2, sha256=digest)
    with pytest.raises(ModelContractError, match=r"the job says model\.sha256"):
        model_sha256(local_model(network))


@pytest.mark.parametrize("path", [f"hf://{NAME}@{'3' * 40}", "hf://cellmap/absent"])
def test_what_is_absent_is_told(path, server):
    with pytest.raises(ModelContractError, match=f"model.path {path} cannot be fetched"):
        fetch_repository(path)


def test_a_server_that_does_not_answer_is_told(tmp_path, monkeypatch):
    fetch_repository.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelContractError, match="cannot be fetched"):
        fetch_repository(f"hf://{NAME}")


@pytest.mark.parametrize(
    "path",
    [
        "hf://mito",
        "hf://a/b/c",
        "hf://../b",
        "hf://a/b@",
        "hf://a/b@-x",
        "hf://a/..",
        "hf:a/b",
        "hf://a/b@main/../../../../../c",
    ],
)
def test_addresses_that_are_none_are_refused(path):
    with pytest.raises(ModelContractError, match="expected hf://organisation/repository"):
        parse_address(path)


def test_a_download_that_was_cut_off_is_not_taken_for_a_package(server, monkeypatch):
    """Of huggingface_hub before 2.0 it was, where the server did not answer afterwards."""
    folder = fetch_repository(f"hf://{NAME}")
    (folder / "model.ts").unlink()
    fetch_repository.cache_clear()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelContractError, match="cannot be fetched: .* is incomplete"):
        fetch_repository(f"hf://{NAME}")


@pytest.mark.parametrize(
    ("headers", "description", "told"),
    [
        ({"ETag": '"../../outside"'}, {}, "names a file's content"),
        ({"ETag": "/outside"}, {}, "names a file's content"),
        ({"X-Linked-Etag": '"../outside"'}, {}, "names a file's content"),
        ({"X-Repo-Commit": "../outside"}, {}, "names the commit '../outside'"),
        ({}, {"sha": "../../outside"}, "names the commit '../../outside'"),
        ({}, {"sha": FIRST[1:]}, "expected 40 hex digits"),
        ({}, {"sha": "\x1b" * 40}, "names the commit '.x1b"),
        ({"Content-Encoding": "gzip"}, {}, "packs its answer"),
        ({"Content-Length": ""}, {}, "does not say how long a file is"),
        ({}, {"tags": ["a" * (4 << 20)]}, "more than 4,194,304 bytes"),
    ],
)
def test_a_server_that_answers_otherwise(server, tmp_path, headers, description, told):
    server.headers = headers
    server.description = description
    before = set(tmp_path.iterdir())
    with pytest.raises(ModelContractError, match=told):
        fetch_repository(f"hf://{NAME}")
    kept = {path for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert not [path for path in kept if path.name in ("metadata.json", "model.ts")]
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "cache"}


def test_a_file_that_is_longer_than_the_disk(server, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with (
        warnings.catch_warnings(action="ignore"),  # of the library, which goes on
        pytest.raises(ModelContractError, match="bytes, and 3 are free"),
    ):
        fetch_repository(f"hf://{NAME}")


def test_files_are_not_left_to_xet(server):
    """A program of its own would ask the servers that an answer names, without our bounds."""
    link = f'<{server.url}/xet-auth>; rel="xet-auth"'
    server.headers = {"X-Xet-Hash": "0" * 64, "Link": link}
    folder = fetch_repository(f"hf://{NAME}")
    assert (folder / "model.ts").read_bytes() == server.commits[SECOND]["model.ts"]
    assert not [path for path in server.requests if "xet" in path]


def test_addresses_are_told_without_their_credentials(server, capfd, caplog):
    """Not by the library either, which has a handler of its own for its log."""
    address = "http://user:PASSWORD@127.0.0.1:9/x?X-Amz-Signature=SIGNATURE"
    server.redirects = {"model.ts": address}
    with pytest.raises(ModelContractError, match="cannot be fetched") as refusal:
        fetch_repository(f"hf://{NAME}")
    told = f"{refusal.value}{capfd.readouterr()}{caplog.text}"
    assert "PASSWORD" not in told
    assert "SIGNATURE" not in told


def test_a_listing_that_never_ends(server, monkeypatch):
    monkeypatch.setattr("beam_inference.models.hub_client.LISTING_SECONDS", -1)
    with pytest.raises(ModelContractError, match="for more than|takes more than"):
        fetch_repository(f"hf://{NAME}")


@pytest.mark.parametrize(
    "headers",
    [{"Retry-After": "100000"}, {"RateLimit": '"api";r=0;t=100000'}],
    ids=lambda headers: next(iter(headers)),
)
def test_a_server_that_wants_to_be_left_alone_for_a_day(server, headers):
    server.refusal = headers
    with pytest.raises(ModelContractError, match="asked again in 100,000 s"):
        fetch_repository(f"hf://{NAME}")


def test_pages_without_an_end(server, monkeypatch):
    from huggingface_hub import HfApi

    from beam_inference.models import hub_client

    server.has_pages = True
    monkeypatch.setattr(hub_client, "MOST_PAGES", 20)
    hub_client.bound_answers(Path("."))
    with pytest.raises(ModelContractError, match="more than 20 pages"):
        list(HfApi(endpoint=server.url).list_repo_tree(NAME, revision=FIRST))
    monkeypatch.setattr(hub_client, "MOST_PAGES", 10**6)
    monkeypatch.setattr(hub_client, "MOST_LISTING_BYTES", 5_000)
    hub_client.bound_answers(Path("."))
    with pytest.raises(ModelContractError, match="more than 5,000 bytes"):
        list(HfApi(endpoint=server.url).list_repo_tree(NAME, revision=FIRST))


def answer_of(url, length, status=200, **headers):
    """An answer to a request, whose body is blanks."""
    import httpx2

    body = (b" " * (1 << 20) for _ in range(length >> 20))
    return httpx2.Response(
        status, headers=headers, content=body, request=httpx2.Request("GET", url)
    )


ROOTS = ["http://host", "http://host/mirror", "http://host/artifactory/api/huggingfaceml/repo"]


@pytest.mark.parametrize("root", ROOTS)
def test_listings_are_bounded_wherever_they_lie(root, tmp_path):
    from beam_inference.models.hub_client import _Bounds

    bounds = _Bounds(tmp_path)
    listing = f"{root}/api/models/a/b/revision/main"
    with pytest.raises(ModelContractError, match="more than 4,194,304 bytes"):
        bounds(answer_of(listing, 8 << 20))
    bounds(answer_of(listing, 0, 307, location="/elsewhere"))
    with pytest.raises(ModelContractError, match="more than 4,194,304 bytes"):
        bounds(answer_of("http://host/elsewhere", 8 << 20, **{"content-length": str(8 << 20)}))
    for name in ("model.ts", "api/models/model.ts"):
        with pytest.raises(ModelContractError, match="does not say how long a file is"):
            bounds(answer_of(f"{root}/a/b/resolve/main/{name}", 8 << 20))
