"""Locks that others hold: waited for, but not for ever."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from beam_inference.config.storage import Storage
from beam_inference.errors import ModelContractError
from beam_inference.volumes import conditional_writes, fetch
from beam_inference.volumes.file_locks import hold_lock, lock_file
from beam_inference.volumes.kvstores import open_kvstore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the locked file lies."""
    return tmp_path / "lock"


@pytest.fixture
def holder(path: Path) -> Iterator[int]:
    """Somebody else who holds the lock: its open file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield descriptor
    os.close(descriptor)


def test_a_lock_that_is_given_back_is_had(path: Path, holder: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    threading.Timer(0.3, fcntl.flock, (holder, fcntl.LOCK_UN)).start()
    start = time.monotonic()
    lock_file(descriptor, path, 60)
    assert 0.2 < time.monotonic() - start < 30
    with path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


@pytest.mark.usefixtures("holder")
def test_one_that_is_never_given_back_is_named(path: Path) -> None:
    with path.open() as file, pytest.raises(TimeoutError, match=f"the lock on {path} for 0.3 s"):
        lock_file(file.fileno(), path, 0.3)


def test_a_held_lock_is_given_back_and_its_file_removed(path: Path) -> None:
    with hold_lock(path, 0.3):
        with pytest.raises(TimeoutError, match=f"the lock on {path}"), hold_lock(path, 0.3):
            pass
        assert path.exists()
    assert not path.exists()
    with hold_lock(path, 0.3):
        pass


def test_who_waits_for_a_held_lock_has_the_file_of_that_name(path: Path) -> None:
    with hold_lock(path, 0.3):
        waiting = threading.Thread(target=_note_file, args=(path, seen := []))
        waiting.start()
        time.sleep(0.2)
        assert not seen
    waiting.join()
    assert seen == [True]


def _note_file(path: Path, seen: list[bool]) -> None:
    with hold_lock(path, 60):
        seen.append(path.exists())


def test_a_conditional_write_does_not_wait_for_a_stopped_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditional_writes, "PATIENCE_SECONDS", 0.3)
    url = f"file://{tmp_path}"
    store = open_kvstore(url)
    store.write("a", "1").result()
    generation = store.read("a").result().stamp.generation
    with (tmp_path / "a.guard").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="a.guard"):
            conditional_writes.replace_value(store, "a", url, "2", generation)
    assert store.read("a").result().value == b"1"


def test_nor_does_a_file_that_is_to_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "TRANSFER_SECONDS", 0.3)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = tmp_path / f"beam_inference_models_{os.getuid()}"
    folder.mkdir(mode=0o700)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelContractError, match=r"model.path: another process has held"):
            fetch.fetch_file("http://localhost:9/net.pt", "model.path", Storage())
