"""Files of a training: whole or as they were, and of one launch at a time."""

import fcntl
import os
import resource
import signal
import socket
from functools import partial

import pytest
import torch

from beam_inference.errors import ConfigError, StateError, WorkerFault
from beam_inference.training.output_files import (
    LOCK,
    draft_of,
    has_token,
    hold_folder,
    refuse_odd_names,
    replace_files,
)


def test_all_files_are_written_before_the_first_takes_its_place(tmp_path):
    (tmp_path / "a.txt").write_text("before")
    seen = []

    def write_second(draft):
        seen.append((tmp_path / "a.txt").read_text())
        draft.write(b"second")

    replace_files(tmp_path, {"a.txt": lambda draft: draft.write(b"first"), "b.txt": write_second})
    assert seen == ["before"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.txt": "first",
        "b.txt": "second",
    }


def test_files_take_their_places_in_order(tmp_path):
    (tmp_path / "b.txt" / "in the way").mkdir(parents=True)
    files = {name: lambda draft: draft.write(b"new") for name in ("a.txt", "b.txt", "c.txt")}
    with pytest.raises(WorkerFault, match="Is a directory"):
        replace_files(tmp_path, files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt"]


@pytest.fixture
def small_files():
    """No file may become larger than 4 KiB, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    "write",
    [
        lambda draft: draft.write(bytes(5000)),
        lambda draft: draft.write(bytes(50_000)),
        partial(torch.save, {"a": torch.zeros(100_000)}),
        partial(torch.save, [torch.zeros(n) for n in range(100)]),
    ],
    ids=["little", "much", "a large tensor", "many tensors"],
)
def test_a_full_disk_is_told_and_leaves_the_files_as_they_were(tmp_path, write):
    (tmp_path / "a.txt").write_text("before")
    files = {"a.txt": lambda draft: draft.write(b"first"), "b.txt": write}
    with pytest.raises(WorkerFault, match=r"cannot write .*b\.txt: File too large"):
        replace_files(tmp_path, files)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "before"


def test_other_errors_of_who_writes_stay_what_they_are(tmp_path):
    def fail(_draft):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        replace_files(tmp_path, {"a.txt": fail})
    assert not [*tmp_path.iterdir()]


def test_a_draft_in_whose_place_a_link_lies_changes_nothing_else(tmp_path):
    (tmp_path / "precious").write_text("precious")
    draft_of(tmp_path / "a.txt").symlink_to(tmp_path / "precious")
    replace_files(tmp_path, {"a.txt": lambda draft: draft.write(b"first")})
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "a.txt").read_text() == "first"


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


ODD = {
    "a link": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a device or a socket": make_socket,
}


@pytest.mark.parametrize(("kind", "make"), ODD.items(), ids=ODD)
@pytest.mark.parametrize("name", ["a.txt", "a.unfinished"])
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, kind, make, name):
    monkeypatch.chdir(tmp_path)
    refuse_odd_names(tmp_path, ["a.txt"], ["b"])
    make(tmp_path / name)
    with pytest.raises(StateError, match=f"{name} is {kind}"):
        refuse_odd_names(tmp_path, ["a.txt"], ["b"])


def test_a_file_for_a_folder_is_refused(tmp_path):
    (tmp_path / "b").write_text("file")
    with pytest.raises(StateError, match="b is a file; expected a folder"):
        refuse_odd_names(tmp_path, ["a.txt"], ["b"])
    refuse_odd_names(tmp_path / "b", ["a.txt"], [])  # which hold_folder refuses


def test_one_launch_holds_a_folder_until_it_ends(tmp_path):
    folder = tmp_path / "new"
    with hold_folder(folder, "1"):
        assert has_token(folder, "1")
        assert not has_token(folder, "2")
        with (
            pytest.raises(StateError, match="another launch trains into"),
            hold_folder(folder, "2"),
        ):
            pass
        assert has_token(folder, "1")
    assert not [*folder.iterdir()]
    assert not has_token(folder, "1")
    with hold_folder(folder, "2"):
        assert has_token(folder, "2")


def test_the_lock_of_a_killed_launch_keeps_nobody_away(tmp_path):
    child = os.fork()
    if child == 0:
        descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / LOCK).exists()
    with hold_folder(tmp_path, "1"):
        assert has_token(tmp_path, "1")


@pytest.mark.parametrize("kind", ["pipe", "hard link"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(tmp_path, kind):
    (tmp_path / "precious").write_text("precious")
    if kind == "pipe":
        os.mkfifo(tmp_path / LOCK)
    else:
        (tmp_path / LOCK).hardlink_to(tmp_path / "precious")
    with pytest.raises(StateError, match="cannot write"), hold_folder(tmp_path, "1"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"
    assert not has_token(tmp_path, "1")


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(StateError, match="cannot write"), hold_folder(tmp_path, "1"):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    refused = pytest.raises(ConfigError, match="cannot make the folder")
    with refused, hold_folder(tmp_path / "file", "1"):
        pass
