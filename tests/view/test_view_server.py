"""What the server of `view` gives away, and what it does not."""

import gzip
import http.client
import json
from urllib.parse import urlsplit

import numpy as np
import pytest
from browser import served
from helpers import write_volume

from beam_inference.errors import ConfigError
from beam_inference.view.server import serve
from beam_inference.volumes.opening import open_volume


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("served")
    folder = tmp_path / "volume"
    (folder / "scale" / "_beam_inference").mkdir(parents=True)
    (folder / "_beam_inference").mkdir()
    (folder / "info").write_text("{}")
    (folder / "block").write_bytes(bytes(range(100)))
    (folder / "packed.gz").write_bytes(gzip.compress(b"voxels"))
    (folder / "_beam_inference" / "job.json").write_text("{}")
    (folder / "scale" / "_beam_inference" / "receipt").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "volume-too").mkdir()
    (tmp_path / "volume-too" / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "out").symlink_to(tmp_path)
    (folder / "within").symlink_to(folder / "block")
    (folder / "loop").symlink_to(folder / "loop")
    return folder


@pytest.fixture(scope="module")
def ask(folder):
    """Sends a request as it stands, with no path made canonical; TOKEN in it is the server's."""
    with served({"0": folder}, lambda base: {"base": base}) as url:
        parts = urlsplit(url)

        def request(path, method="GET", **headers):
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
            path = path.replace("TOKEN", parts.path.strip("/"))
            connection.request(
                method,
                path,
                headers={name.replace("_", "-"): value for name, value in headers.items()},
            )
            response = connection.getresponse()
            body = response.read()
            connection.close()
            return response, body

        yield request


def test_a_file_is_sent_whole_with_leave_to_read_it_from_any_page(ask):
    response, body = ask("/TOKEN/data/0/block")
    assert (response.status, body) == (200, bytes(range(100)))
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert response.headers["Content-Type"] == "application/octet-stream"
    response, body = ask("/TOKEN/data/0/info")
    assert response.headers["Content-Type"].startswith("application/json")
    response, body = ask("/TOKEN/data/0/block", "HEAD")
    assert (response.status, response.headers["Content-Length"], body) == (200, "100", b"")


@pytest.mark.parametrize(
    ("asked", "status", "start", "stop"),
    [
        ("bytes=10-19", 206, 10, 20),
        ("bytes=90-", 206, 90, 100),
        ("bytes=-16", 206, 84, 100),
        ("bytes=95-200", 206, 95, 100),
        ("bytes=0-99", 200, 0, 100),
        ("bytes=100-120", 416, 0, 0),
    ],
)
def test_ranges_of_bytes_are_sent(ask, asked, status, start, stop):
    response, body = ask("/TOKEN/data/0/block", Range=asked)
    assert (response.status, body) == (status, bytes(range(start, stop)))
    if status == 206:
        assert response.headers["Content-Range"] == f"bytes {start}-{stop - 1}/100"


def test_a_page_elsewhere_may_ask_for_ranges(ask):
    response, _ = ask(
        "/TOKEN/data/0/block",
        "OPTIONS",
        Access_Control_Request_Headers="range",
        Origin="https://a.b",
    )
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Headers"] == "range"


def test_a_block_that_is_not_there_is_404_and_may_come_later(ask, folder):
    response, _ = ask("/TOKEN/data/0/later")
    assert response.status == 404
    # else a page elsewhere would see a failure
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    (folder / "later").write_bytes(b"voxels")
    assert ask("/TOKEN/data/0/later")[1] == b"voxels"


def test_a_block_that_changes_is_sent_anew_and_only_then(ask, folder):
    (folder / "changing").write_bytes(b"one")
    tag = ask("/TOKEN/data/0/changing")[0].headers["ETag"]
    assert ask("/TOKEN/data/0/changing", If_None_Match=tag)[0].status == 304
    (folder / "changing").write_bytes(b"other")
    response, body = ask("/TOKEN/data/0/changing", If_None_Match=tag)
    assert (response.status, body) == (200, b"other")


def test_a_compressed_block_is_sent_under_the_name_without_its_suffix(ask):
    response, body = ask("/TOKEN/data/0/packed", Range="bytes=0-1")
    assert (response.status, response.headers["Content-Encoding"]) == (200, "gzip")
    assert gzip.decompress(body) == b"voxels"


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/TOKEN/data/0/../secret",
            "/TOKEN/data/0/%2e%2e/secret",
            "/TOKEN/data/0/..%2fsecret",
            "/TOKEN/data/0/link",
        ),
        *("/TOKEN/data/0/out/secret", "/TOKEN/data/0//etc/passwd", "/TOKEN/data/0/%2Fetc/passwd"),
        *(
            "/TOKEN/data/0/../volume-too/secret",
            "/TOKEN/data/0/",
            "/TOKEN/data/0/scale",
            "/TOKEN/data/0/loop",
        ),
        *("/TOKEN/data/0/_beam_inference/job.json", "/TOKEN/data/0/scale/_beam_inference/receipt"),
        *(
            "/TOKEN/data/1/block",
            "/wrong/data/0/block",
            "/data/0/block",
            "/",
            "/state.json",
            "/TOKEN/data/0/a%00b",
        ),
        *(
            "/TOKEN/v/_/../../../secret",
            "/TOKEN/v/_/%2e%2e/__init__.py",
            "/TOKEN/data/0/" + "a" * 5000,
        ),
    ],
)
def test_nothing_else_is_given_away(ask, path):
    response, body = ask(path)
    assert response.status in (403, 404), body
    assert b"secret" not in body
    assert b"root:" not in body


def test_a_link_that_stays_in_the_volume_is_followed(ask):
    assert ask("/TOKEN/data/0/within")[1] == bytes(range(100))


def test_the_entrance_leads_to_the_client_and_its_state_by_the_host_that_was_asked(ask):
    response, _ = ask("/TOKEN/", Host="a.b:9")
    base, _, state = response.headers["Location"].partition("/v/_/#!")
    assert (response.status, state) == (302, f"{base}/state.json")
    assert base.startswith("http://a.b:9/")
    assert json.loads(ask("/TOKEN/state.json", Host="a.b:9")[1]) == {"base": f"{base}/data"}
    assert b"<html>" in ask("/TOKEN/v/_/")[1]


def test_blocks_as_cloud_volume_writes_them_are_read_right_through_the_server(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, (20, 40, 50), dtype=np.uint8)
    write_volume(tmp_path / "volume", array)
    for block in (tmp_path / "volume").rglob("*-*_*-*_*-*"):
        block.with_name(f"{block.name}.gz").write_bytes(gzip.compress(block.read_bytes()))
        block.unlink()
    with served({"0": tmp_path / "volume"}, dict) as url:
        volume = open_volume(f"{url}data/0")
        assert np.array_equal(volume.read(volume.bounds)[0], array)


def test_an_older_client_is_told_of_a_group_as_it_knows_it(ask, folder, tmp_path):
    """Groups of OME-Zarr 0.5 are sent as its last draft, too; all else is sent as it is."""
    write_volume(tmp_path / "em", np.zeros((8, 8, 8), np.uint8), format="ome_zarr")
    group = json.loads((tmp_path / "em" / "zarr.json").read_text())
    array = tmp_path / "em" / "0" / "zarr.json"
    for name, text in (
        ("group", json.dumps(group)),
        ("array", array.read_text()),
        ("damaged", "{"),
        ("plain", json.dumps({"node_type": "group", "attributes": {"ome": []}})),
    ):
        (folder / name).mkdir()
        (folder / name / "zarr.json").write_text(text)
        response, body = ask(f"/TOKEN/data/0/{name}/zarr.json")
        assert response.headers["Content-Type"] == "application/json"
        assert int(response.headers["Content-Length"]) == len(body)
        if name != "group":
            assert body == text.encode()
            continue
        told = json.loads(body)
        (image,) = told["attributes"].pop("multiscales")
        assert told == group
        assert image == {**group["attributes"]["ome"]["multiscales"][0], "version": "0.5-dev"}
        assert (
            ask(f"/TOKEN/data/0/{name}/zarr.json", If_None_Match=response.headers["ETag"])[0].status
            == 304
        )
        assert ask(f"/TOKEN/data/0/{name}/zarr.json", "HEAD")[1] == b""
    with (folder / "damaged" / "zarr.json").open("wb") as holes:
        holes.truncate(2**31)
    assert ask("/TOKEN/data/0/damaged/zarr.json")[0].status == 500
    assert ask("/TOKEN/data/0/nowhere/zarr.json")[0].status == 404
    assert ask("/TOKEN/data/0/_beam_inference/zarr.json")[0].status == 404


@pytest.mark.parametrize(
    ("bind", "port"), [("127.0.0.1", None), ("no.such.host.invalid", 0), ("203.0.113.1", 0)]
)
def test_an_address_that_cannot_be_had_is_told(ask, folder, bind, port):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .* --port"):
            serve(
                folder,
                {"0": folder},
                dict,
                bind,
                taken.getsockname()[1] if port is None else port,
                lambda url: None,
            )
