"""Jobs whose files, stores or networks misbehave while they run, or between two launches.

Numbers are rows of the list of hostile cases. Each job is over the small random volume. Whatever
happens, no launch calls complete what is not; and once the trouble is over, the next one makes what
an undisturbed one does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fakes.s3 import KEYS, S3StandIn
from helpers import files_of, job_values, read_volume, write_job

from beam_inference.cli.main import main
from beam_inference.errors import BeamInferenceError
from beam_inference.launch.job_files import load_job
from beam_inference.launch.prepare import prepare
from beam_inference.worker.worker import Worker

pytestmark = pytest.mark.slow

Job = Callable[..., str]
STATE = "_beam_inference"


@pytest.fixture
def undisturbed(job: Job, tmp_path: Path) -> dict[str, bytes]:
    """The files of an undisturbed run, which are then removed."""
    assert main(["run", job()]) == 0
    files = files_of(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    return files


def _launch(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and text of a command, which never speaks of a defect."""
    capsys.readouterr()
    code = main([*words])
    said = capsys.readouterr()
    text = said.out + said.err
    assert "not foreseen" not in text
    assert "Traceback" not in text
    return code, text


# ------------------------------------------------------------------------------- files, mid-way


def _remove_blocks(output: Path) -> None:
    shutil.rmtree(output / "10_10_10")


def _replace_by_a_file(output: Path) -> None:
    shutil.rmtree(output)
    output.write_text("mine")


MID_WAY: dict[int, Callable[[Path], object]] = {
    177: shutil.rmtree,
    178: _remove_blocks,
    179: lambda output: shutil.rmtree(output / STATE),
    189: lambda output: shutil.rmtree(output / STATE / "receipts"),
    200: lambda output: (output / STATE / "job.json").unlink(),
    209: lambda output: (output / "info").unlink(),
    222: _replace_by_a_file,
}


@pytest.mark.parametrize("row", MID_WAY)
def test_what_is_deleted_mid_way(
    row: int,
    job: Job,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = job()
    output = tmp_path / "out"
    worker = Worker(prepare(load_job(path)))
    list(worker.infer_chunks(range(8)))
    MID_WAY[row](output)
    with suppress(BeamInferenceError):
        list(worker.infer_chunks(range(8, worker.job.plan.chunks.count)))
    if output.is_file():
        assert output.read_text() == "mine"
        output.unlink()
    code, text = _launch(capsys, "run", path)
    if code == 0 and files_of(output) != undisturbed:
        # Blocks that vanish are found by whoever reads them back, as guarantees.md says.
        assert row == 178
        assert _launch(capsys, "verify", path, "--deep")[0] == 1
        code = 2
    if code != 0:
        assert code in (1, 2), text
        assert _launch(capsys, "run", path, "--overwrite")[0] == 0
    assert files_of(output) == undisturbed
    assert _launch(capsys, "verify", path, "--deep")[0] == 0


@pytest.mark.parametrize("changed", ["network.py", "layers_of_234.py"])
def test_234_a_network_whose_source_changes_mid_way(
    job: Job, changed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "import torch\n\ndef network():\n    return torch.nn.Identity()\n"
    (tmp_path / changed).write_text(source)
    if changed != "network.py":  # a module beside it, which it imports
        (tmp_path / "network.py").write_text(f"from {Path(changed).stem} import network\n")
    path = job(model={"path": f"{tmp_path}/network.py:network"})
    worker = Worker(prepare(load_job(path)))
    list(worker.infer_chunks(range(8)))
    (tmp_path / changed).write_text(source.replace("Identity()", "ReLU()"))
    list(worker.infer_chunks(range(8, worker.job.plan.chunks.count)))
    code, text = _launch(capsys, "run", path)
    assert code == 2
    assert "model" in text
    (tmp_path / changed).write_text(source)
    assert _launch(capsys, "run", path)[0] == 0
    np.testing.assert_allclose(read_volume(tmp_path / "out"), read_volume(tmp_path / "in"), 0, 2e-3)


# ------------------------------------------------------------------------ files, between launches


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def _without_overlap(values: dict[str, Any]) -> None:
    values["config"]["inference"]["patch_overlap"] = [0, 0, 0]


BETWEEN: dict[int, tuple[Callable[[Path], object], str, int]] = {
    341: (lambda out: next((out / "10_10_10").glob("2-18_*_3-19")).unlink(), "run", 0),
    343: (_remove_blocks, "run", 2),
    386: (lambda out: _cut(out / STATE / "job.json"), "run", 2),
    389: (lambda out: (out / STATE / "job.json").write_text(""), "run", 2),
    394: (lambda out: _edit(out / STATE / "job.json", lambda v: v.update(foreign=1)), "run", 2),
    398: (lambda out: _edit(out / STATE / "job.json", _without_overlap), "run", 2),
    403: (lambda out: _cut(out / "info"), "run", 2),
    406: (lambda out: _edit(out / "info", lambda v: v.update(scales=[])), "run", 2),
    409: (lambda out: _edit(out / "info", lambda v: v.update(data_type="uint8")), "run", 2),
    416: (lambda out: _plant_strange_names(out / STATE / "receipts"), "run", 0),
    399: (lambda out: _cut(_any_block(out)), "verify --deep", 1),
    400: (lambda out: _change_last_byte(_any_block(out)), "verify --deep", 1),
    402: (lambda out: _any_block(out).unlink(), "verify --deep", 1),
}
"""What is done to a complete job, the command that comes then, and its exit code."""


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _any_block(output: Path) -> Path:
    return sorted((output / "10_10_10").iterdir())[5]


def _change_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _plant_strange_names(receipts: Path) -> None:
    (folder,) = receipts.glob("*/000000000")
    for name in ("notes.txt", "-1.json", "00000000000x.json", "1.json", "ü.json", ".json"):
        (folder / name).write_text("{}")


@pytest.mark.parametrize("row", BETWEEN)
def test_what_is_damaged_between_two_launches(
    row: int,
    job: Job,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = job()
    assert main(["run", path]) == 0
    damage, command, expected = BETWEEN[row]
    damage(tmp_path / "out")
    first, *flags = command.split()
    assert _launch(capsys, first, path, *flags)[0] == expected
    if expected:
        shutil.rmtree(tmp_path / "out")
        assert _launch(capsys, "run", path)[0] == 0
    assert files_of(tmp_path / "out") == undisturbed
    assert _launch(capsys, "verify", path, "--deep")[0] == 0


def test_430_an_input_that_is_gone(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job()
    assert main(["run", path]) == 0
    receipt = next((tmp_path / "out" / STATE / "receipts").rglob("*.json"))
    receipt.unlink()
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    assert _launch(capsys, "run", path)[0] == 2
    assert _launch(capsys, "verify", path)[0] == 1
    (tmp_path / "elsewhere").rename(tmp_path / "in")
    assert _launch(capsys, "run", path)[0] == 0


# ------------------------------------------------------------------------------------- networks

NETWORKS = """
import os
import torch


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        if self.calls <= 4:  # of the trial
            return batch
        {then}


def network():
    return Network()
"""

MISBEHAVIOURS: dict[str, tuple[str, tuple[int, ...]]] = {
    "422 ok": ("return batch", (0,)),
    "427 raises now and then": (
        "if self.calls % 5 == 0: raise RuntimeError('now and then')\n        return batch",
        (0, 3),
    ),
    "429 nan": ("return batch * torch.nan", (1, 2, 3)),
    "433 inf": ("return batch + torch.inf", (1, 2, 3)),
    "434 shape": ("return batch[..., :-1]", (1, 2, 3)),
    "435 dtype": ("return batch.to(torch.int64)", (0, 1, 3)),
    "436 none": ("return None", (1, 2, 3)),
    "438 list": ("return [batch]", (1, 2, 3)),
    "440 channels": ("return torch.cat([batch, batch], 1)", (1, 2, 3)),
    "443 raises always": ("raise RuntimeError('always')", (1, 3)),
    "444 exit": ("raise SystemExit(0)", (1, 3)),
    "446 stop": ("raise StopIteration", (1, 3)),
    "451 memory": ("raise MemoryError", (1, 3)),
    "450 more than there is": ("return batch + torch.empty(2**50)[0]", (1, 3)),
    "457 interrupted": ("raise KeyboardInterrupt", (1, 3, 130)),
    "461 in place": ("return batch.mul_(2).div_(2)", (0,)),
    "462 grad": ("torch.set_grad_enabled(True)\n        return batch", (0,)),
}
"""What a network does after its trial, and how the launch may end."""


@pytest.mark.parametrize("case", MISBEHAVIOURS)
def test_networks_that_misbehave_after_their_trial(
    case: str, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    then, codes = MISBEHAVIOURS[case]
    (tmp_path / "network.py").write_text(NETWORKS.format(then=then))
    model = {"path": f"{tmp_path}/network.py:network", "prediction_bound": 256}
    path = job(model=model, job={"attempts": 2})
    code, text = _launch(capsys, "run", path)
    assert code in codes, text
    is_complete = _launch(capsys, "verify", path)[0] == 0
    assert is_complete == (code == 0)
    if code == 0:
        result = read_volume(tmp_path / "out")
        np.testing.assert_allclose(result, read_volume(tmp_path / "in"), rtol=0, atol=2e-3)


HANGS = "import pathlib, time\n        pathlib.Path({here!r}).touch()\n        time.sleep(90)"


def test_250_a_second_signal_ends_a_launch_whose_network_hangs(job: Job, tmp_path: Path) -> None:
    here = tmp_path / "hangs"
    then = HANGS.format(here=str(here))
    (tmp_path / "network.py").write_text(NETWORKS.format(then=then))
    model = {"path": f"{tmp_path}/network.py:network", "prediction_bound": 256}
    command = [sys.executable, "-m", "beam_inference", "run", job(model=model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not here.exists():
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        process.terminate()
        time.sleep(2)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode not in (0, 2, 3)


# ----------------------------------------------------------------------------- inputs over HTTP


class _Handler(BaseHTTPRequestHandler):
    """Serves a folder, and does something else where a block is asked for."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if not path.is_file():
            self.answer(404, b"")
        elif "_" in path.name and path.parent != self.server.folder:
            self.server.blocks += 1
            self.server.misbehave(self, path.read_bytes())
        else:
            self.answer(200, path.read_bytes())

    do_HEAD = do_GET

    def answer(self, code: int, body: bytes, length: int | None = None, **headers: str) -> None:
        """Answer, maybe with another length than the body's."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        if length is not None and length > len(body):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    blocks = 0

    def __init__(self, folder: Path, misbehave: Callable[[_Handler, bytes], object]) -> None:
        self.folder = folder
        self.misbehave = misbehave
        super().__init__(("127.0.0.1", 0), _Handler)


def _every_fifth(code: int | None) -> Callable[[_Handler, bytes], object]:
    def answer(handler: _Handler, body: bytes) -> None:
        if handler.server.blocks % 5:
            handler.answer(200, body)
        elif code is None:
            handler.connection.close()
            handler.close_connection = True
        else:
            handler.answer(code, b"")

    return answer


def _late(handler: _Handler, body: bytes) -> None:
    time.sleep(0.3)
    handler.answer(200, body)


SERVERS: dict[str, tuple[Callable[[_Handler, bytes], object], tuple[int, ...]]] = {
    "375 ok": (lambda handler, body: handler.answer(200, body), (0,)),
    "377 errors": (_every_fifth(503), (0,)),
    "380 resets": (_every_fifth(None), (0,)),
    "382 forbidden": (lambda handler, body: handler.answer(403, b""), (1, 2, 3)),
    "387 a page instead": (lambda handler, body: handler.answer(200, b"<html>log in"), (2, 3)),
    "390 short": (lambda handler, body: handler.answer(200, body[: len(body) // 2]), (1, 2, 3)),
    "391 torn": (lambda handler, body: handler.answer(200, body[:-9], len(body)), (1, 2, 3)),
    "393 long": (lambda handler, body: handler.answer(200, body + b"more"), (1, 2, 3)),
    "395 slow": (_late, (0,)),
    "396 a loop": (
        lambda handler, body: handler.answer(302, b"", Location=handler.path),
        (1, 2, 3),
    ),
    "397 elsewhere": (
        lambda handler, body: handler.answer(302, b"", Location="http://127.0.0.1:1/x"),
        (1, 2, 3),
    ),
}
"""What a server answers where a block is asked for, and how the launch may end."""


@pytest.fixture
def serve(volume_in: Path) -> Iterator[Callable[[Callable[[_Handler, bytes], object]], str]]:
    """A function that serves the volume in some way; its URL."""
    servers: list[_Server] = []

    def start(misbehave: Callable[[_Handler, bytes], object]) -> str:
        server = _Server(volume_in, misbehave)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("case", SERVERS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_servers_that_misbehave(
    case: str,
    serve: Callable[[Callable[[_Handler, bytes], object]], str],
    job: Job,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    misbehave, codes = SERVERS[case]
    path = job(input={"path": serve(misbehave)}, job={"attempts": 2, "timeouts": {"read": 60}})
    code, text = _launch(capsys, "run", path)
    assert code in codes, text
    if (tmp_path / "out" / STATE).exists():
        assert (_launch(capsys, "verify", path)[0] == 0) == (code == 0)
    if code == 0:
        result = read_volume(tmp_path / "out")
        np.testing.assert_allclose(result, read_volume(tmp_path / "in"), rtol=0, atol=2e-3)


def test_385_a_block_that_is_not_found_is_an_absent_one(
    serve: Callable[[Callable[[_Handler, bytes], object]], str], job: Job, tmp_path: Path
) -> None:
    """The formats say so, and docs/guarantees.md under "Limits"."""
    path = job(input={"path": serve(lambda handler, body: handler.answer(404, b""))})
    assert main(["run", path]) == 0
    assert not read_volume(tmp_path / "out").any()


# ------------------------------------------------------------------------------------------- S3


def test_431_437_credentials_of_s3_that_are_absent_or_expire(
    volume_in: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with S3StandIn(["data"]) as s3:
        storage = {"s3": {"endpoint": s3.url, "region": "us-east-1", "credentials": "environment"}}
        values = job_values(volume_in, "s3://data/out", storage=storage)
        path = str(write_job(tmp_path / "job.yaml", values))
        for name in KEYS:
            monkeypatch.delenv(name, raising=False)
        code, text = _launch(capsys, "run", path)
        assert code == 2
        assert "credentials" in text.lower()
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        s3.expired = "/receipts/"
        code, text = _launch(capsys, "run", path)
        assert code in (1, 2)
        assert "ExpiredToken" in text
        assert _launch(capsys, "verify", path)[0] != 0
        s3.expired = ""
        assert _launch(capsys, "run", path)[0] == 0
        assert _launch(capsys, "verify", path, "--deep")[0] == 0


# ---------------------------------------------------------------------------------------- disks


def _mount(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system in memory")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB, which the output does not fit onto twice."""
    _mount(tmp_path / "disk", "size=1m")
    yield tmp_path / "disk"
    subprocess.run(["umount", "--lazy", str(tmp_path / "disk")], check=True)


def _remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def _job_on(disk: Path, volume: Path, tmp_path: Path) -> str:
    return str(write_job(tmp_path / "job.yaml", job_values(volume, disk / "out")))


def test_257_a_disk_that_becomes_full(
    disk: Path, volume_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _job_on(disk, volume_in, tmp_path)
    _remount(disk, "size=300k")
    assert _launch(capsys, "run", path)[0] in (1, 2)
    _remount(disk, "size=8m")
    assert _launch(capsys, "run", path)[0] == 0
    assert _launch(capsys, "verify", path, "--deep")[0] == 0
    np.testing.assert_allclose(read_volume(disk / "out"), read_volume(volume_in), rtol=0, atol=2e-3)


def test_259_262_263_285_a_disk_that_cannot_be_written(
    disk: Path, volume_in: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _remount(disk, "size=8m,ro")
    path = _job_on(disk, volume_in, tmp_path)
    assert _launch(capsys, "run", path)[0] == 2
    _remount(disk, "size=8m,rw")
    worker = Worker(prepare(load_job(path)))
    list(worker.infer_chunks(range(8)))
    _remount(disk, "ro")
    with pytest.raises(BeamInferenceError, match="(?i)read-only"):
        list(worker.infer_chunks(range(8, worker.job.plan.chunks.count)))
    _remount(disk, "rw")
    assert _launch(capsys, "run", path)[0] == 0
    _remount(disk, "ro")
    assert _launch(capsys, "run", path)[0] in (0, 2)
    assert _launch(capsys, "verify", path, "--deep")[0] == 0
    assert _launch(capsys, "status", path)[0] == 0


def test_266_271_levels_and_pyramids_onto_a_read_only_disk(
    disk: Path, volume_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(volume_in, disk / "v")
    _remount(disk, "ro")
    for words in (
        ["levels", str(volume_in), "--to", f"{disk}/levels.json"],
        ["pyramid", f"{disk}/v", "--levels", "1"],
    ):
        code, text = _launch(capsys, *words)
        assert code in (1, 2)
        assert "read-only" in text.lower()


# ---------------------------------------------------------------------------------- large batches


@pytest.mark.parametrize("size", [2**40, 10**9], ids=["29 345", "30 347"])
def test_batches_beyond_memory_are_refused(
    size: int, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(job(inference={"batch_size": size}))
    assert yaml.safe_load(path.read_text())["inference"]["batch_size"] == size
    code, text = _launch(capsys, "run", str(path))
    assert code == 2
    assert "GiB" in text
    assert "inference.batch_size" in text
    assert not (tmp_path / "out").exists()


def test_254_a_block_that_is_a_loop_of_links(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = next((tmp_path / "in").rglob("2-34_*_3-35"))
    content = block.read_bytes()
    block.unlink()
    block.symlink_to(block)
    path = job()
    assert _launch(capsys, "run", path)[0] == 3
    block.unlink()
    block.write_bytes(content)
    assert _launch(capsys, "run", path)[0] == 0
    assert _launch(capsys, "verify", path, "--deep")[0] == 0
