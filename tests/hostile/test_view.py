"""The server of `view`: what it gives away, to whom, and under which attacks it goes on."""

from __future__ import annotations

import http.client
import json
import os
import socket
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest
from browser import served

from beam_inference.cli.main import command_parser


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    (root / "secret").write_text("secret")
    folder = root / "volume"
    (folder / "_beam_inference").mkdir(parents=True)
    (folder / "_beam_inference" / "job.json").write_text("secret")
    (folder / "info").write_text("{}")
    (folder / "block").write_bytes(bytes(range(100)))
    (folder / "page.html").write_text("<script>alert(1)</script>")
    (folder / "broken.gz").write_bytes(b"no gzip")
    (folder / "link").symlink_to(root / "secret")
    (folder / "up").symlink_to(root)
    os.mkfifo(folder / "fifo")
    os.link(folder / "block", folder / "hard")
    return folder


EVIL = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def address(folder):
    with served({"0": folder}, lambda base: {"layers": [{"name": EVIL, "source": base}]}) as url:
        yield urlsplit(url)


def send(address, path, method="GET", **headers):
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    connection.request(method, path.replace("TOKEN", address.path.strip("/")), headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_only_this_machine_is_listened_to_unless_asked(address):  # 352
    assert command_parser().parse_args(["view", "volume"]).bind == "127.0.0.1"
    assert address.hostname == "127.0.0.1"


def test_the_volume_is_served(address):  # 353
    assert send(address, "/TOKEN/data/0/block")[1] == bytes(range(100))


LEADING_OUT = [
    "../secret",
    "%2e%2e/secret",
    "..%2fsecret",
    "%2e%2e%2fsecret",
    "%252e%252e%252fsecret",
    "..%5csecret",
    "....//secret",
    "./../secret",
    "x/../../secret",
    "/etc/passwd",
    "//etc/passwd",
    "%2Fetc/passwd",
    "~/.bashrc",
    "link",
    "up/secret",
    "up/volume/../secret",
    "fifo",
    "",
    ".",
    "..",
    "_beam_inference/job.json",
    "_beam_inference",
    "%5fbeam_inference/job.json",
    "./_beam_inference/job.json",
    "a%00b",
    "%ff%fe",
    "a" * 5000,
    "a/" * 2000,
]


@pytest.mark.parametrize("path", LEADING_OUT)
def test_nothing_outside_is_served(address, path):  # 354
    response, body = send(address, f"/TOKEN/data/0/{path}")
    assert response.status in (400, 403, 404)
    assert b"secret" not in body
    assert b"root:" not in body


def test_a_hard_link_is_a_file_of_the_volume(address):  # 355, see docs/view.md
    assert send(address, "/TOKEN/data/0/hard")[0].status == 200


@pytest.mark.parametrize("path", ["../../secret", "%2e%2e/%2e%2e/secret", "../index.html/../.."])
def test_nothing_is_served_through_the_clients_folder(address, path):  # 356
    response, body = send(address, f"/TOKEN/v/_/{path}")
    assert response.status in (400, 403, 404)
    assert b"secret" not in body


@pytest.mark.parametrize(
    "path", ["/", "/data/0/info", "/state.json", "/v/_/", "/x/data/0/info", "/events/_"]
)
def test_nothing_is_served_without_the_token(address, path):  # 357
    assert send(address, path)[0].status == 404
    assert send(address, "/favicon.ico")[0].status == 204


def test_the_entrance_leads_where_the_browser_came_from(address):  # 358, see docs/view.md
    response, _ = send(address, "/TOKEN/", Host="evil.example.org")
    assert response.headers["Location"].startswith(f"http://evil.example.org{address.path}")
    assert send(address, "/", Host="evil.example.org")[0].status == 404


def raw(address, text):
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(text)
        return connection.recv(65536)


def test_the_host_injects_no_header(address):  # 359
    path = address.path.encode()
    for host in (b"a%0d%0aX-Evil: 1", b"a\rX-Evil: 1", b"a\tX-Evil: 1", b"a b", b"a\x00b"):
        answer = raw(address, b"GET " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert b"\nX-Evil" not in answer
        assert b"\rX-Evil" not in answer


def test_pages_of_a_volume_are_bytes(address):  # 360
    response, _ = send(address, "/TOKEN/data/0/page.html")
    assert response.headers["Content-Type"] == "application/octet-stream"
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "POST", "TRACE", "PROPFIND"])
@pytest.mark.parametrize("path", ["/TOKEN/data/0/block", "/TOKEN/state.json", "/TOKEN/"])
def test_nothing_can_be_changed(address, folder, method, path):  # 361
    assert send(address, path, method)[0].status == 405
    assert (folder / "block").read_bytes() == bytes(range(100))


@pytest.mark.parametrize(
    "asked", ["bytes=5-1", "bytes=-0", "bytes=99999-", "bytes=a-b", "bytes=0-1,5-6", "x", "bytes="]
)
def test_odd_ranges_are_answered(address, asked):  # 362
    assert send(address, "/TOKEN/data/0/block", Range=asked)[0].status in (200, 206, 416)


def test_a_broken_block_is_sent_as_it_is(address):  # 363
    assert send(address, "/TOKEN/data/0/broken")[1] == b"no gzip"


def test_other_pages_may_read_volumes_but_not_the_state(address):  # 364
    origin = {"Origin": "https://evil.example.org"}
    volume, _ = send(address, "/TOKEN/data/0/block", **origin)
    assert volume.headers["Access-Control-Allow-Origin"] == "*"
    state, _ = send(address, "/TOKEN/state.json", **origin)
    assert "Access-Control-Allow-Origin" not in state.headers


def test_half_open_requests_hinder_nobody(address):  # 365
    with ExitStack() as stack:
        for _ in range(200):
            connection = socket.create_connection((address.hostname, address.port), timeout=10)
            stack.enter_context(connection).sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        assert send(address, "/TOKEN/data/0/block")[0].status == 200


def test_a_long_request_line_is_refused(address):  # 404
    with suppress(ConnectionError):  # the server may end it before all is sent
        answer = raw(address, b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert not answer or answer.split()[1] in (b"400", b"414", b"431", b"404")
    assert send(address, "/TOKEN/data/0/block")[0].status == 200


def test_the_state_is_json_whatever_volumes_are_called(address):  # 405, see docs/view.md
    response, body = send(address, "/TOKEN/state.json")
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert json.loads(body)["layers"][0]["name"] == EVIL
