"""Nothing waits for ever: reads, writes and networks that hang."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.cli.main import main
from beam_inference.errors import StalledReadError, TransientReadError, WorkerFault
from beam_inference.volumes import remote_files
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume


class _HangsAtBlocks(SimpleHTTPRequestHandler):
    """Serves the metadata of volumes, and never answers where blocks are asked for."""

    def __init__(self, *parts: Any, ended: threading.Event, directory: str) -> None:
        self._ended = ended
        super().__init__(*parts, directory=directory)

    def do_GET(self) -> None:
        if re.search(r"/\d+-\d+_\d+-\d+_", self.path):
            self._ended.wait()
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hanging_url(volume_in: Path) -> Iterator[str]:
    """URL of a volume whose blocks never come."""
    ended = threading.Event()
    handler = partial(_HangsAtBlocks, ended=ended, directory=str(volume_in))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        ended.set()  # a thread that outlives this test would write into the next ones' output


def test_a_read_that_hangs_is_given_up(hanging_url: str) -> None:
    volume = open_volume(hanging_url)
    with pytest.raises(StalledReadError, match="is not there after 0.2 s"):
        volume.read(volume.bounds, timeout=0.2)


def test_a_store_that_hangs_ends_the_launch(
    hanging_url: str, job: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = job(input={"path": hanging_url}, job={"timeouts": {"read": 0.3}})
    assert main(["run", path]) == 1
    out = capsys.readouterr().out
    assert "Is the store still there?" in out
    assert "Traceback" not in out


class _Drips(BaseHTTPRequestHandler):
    """Sends the first byte of a file at once, and the others one by one."""

    def do_GET(self) -> None:
        start, _, stop = self.headers["Range"].removeprefix("bytes=").partition("-")
        last = min(int(stop or 49_999), 49_999)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{last}/50000")
        self.send_header("Content-Length", str(last + 1 - int(start)))
        self.send_header("ETag", '"one"')
        self.end_headers()
        with suppress(OSError):  # once nobody waits any more
            for _ in range(int(start), last + 1):
                self.wfile.write(b" ")
                time.sleep(0.05 if last > int(start) else 0)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


def test_a_server_that_sends_byte_after_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_files, "PATIENCE_SECONDS", 0.3)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Drips) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = remote_files.find_remote_file(f"http://127.0.0.1:{server.server_port}/a", LOCAL)
        with pytest.raises(TransientReadError, match="no answer in time"):
            file.read(0, 100)
        with pytest.raises(TransientReadError, match="no answer in time"):
            file.read_tail(100)
        server.shutdown()


def test_row_277_an_input_block_that_is_a_pipe(job: Callable[..., str], tmp_path: Path) -> None:
    block = next((tmp_path / "in").rglob("2-34_*_3-35"))
    content = block.read_bytes()
    block.unlink()
    os.mkfifo(block)
    path = job()
    assert main(["run", path]) == 3
    block.unlink()
    block.write_bytes(content)
    assert main(["run", path]) == 0
    assert main(["verify", path, "--deep"]) == 0


class _NeverWritten:
    """A store whose writes are never done."""

    def __init__(self, store: object) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def __getitem__(self, region: object) -> _NeverWritten:
        return self

    def write(self, array: object) -> _NeverWritten:
        return self

    def result(self, timeout: float) -> None:
        raise TimeoutError


def test_a_write_that_hangs_is_given_up(tmp_path: Path) -> None:
    write_volume(tmp_path / "out", np.ones((8, 8, 8), np.uint8))
    volume = open_volume(f"file://{tmp_path}/out")
    volume = replace(volume, store=_NeverWritten(volume.store))
    with pytest.raises(WorkerFault, match="is not done after 5 s"):
        volume.write(volume.bounds, np.ones((1, 8, 8, 8), np.uint8), timeout=5)


@pytest.mark.parametrize("make", [os.mkfifo, pytest.param(os.mkdir, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["owners.json", "job.json", "receipts/*/*/*02.json"])
def test_a_state_file_that_is_none(
    name: str,
    make: Callable[[Path], None],
    job: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = job()
    assert main(["run", path]) == 0
    (file,) = (tmp_path / "out/_beam_inference").glob(name)
    file.unlink()
    make(file)
    assert main(["run", path]) in (1, 2)
    told = capsys.readouterr()
    assert "it is a folder, a pipe or the like. Remove it" in told.out + told.err


def test_metadata_that_are_a_pipe(volume_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (volume_in / "info").unlink()
    os.mkfifo(volume_in / "info")
    assert main(["convert", str(volume_in), str(volume_in.parent / "a.npy")]) == 2
    assert "info is no file, but a pipe or the like" in capsys.readouterr().err
