"""Zip archives of networks are judged by their directory, before anything of them is unpacked."""

import io
import os
import random
import struct
import zipfile

import pytest
import torch

from beam_inference.errors import ModelContractError
from beam_inference.models.archive import open_archive, open_packed


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "net.pt"
    torch.save({"a": torch.ones(3)}, path)
    return path


def check(path):
    with open_archive(path, "file") as archive:
        return archive.namelist()


def write(path, members, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def directory_of(content):
    """Where the directory begins, by the record at the end of an archive of Python's."""
    return struct.unpack_from("<L", content, len(content) - 6)[0]


def test_archives_of_pytorch_and_of_others_are_read(archive, tmp_path):
    assert "net/data.pkl" in check(archive)
    other = write(tmp_path / "o.pt", {"a/b": b"1" * 500}, compression=zipfile.ZIP_DEFLATED)
    assert check(other) == ["a/b"]


def test_archives_that_two_readers_could_read_in_two_ways_are_refused(archive, tmp_path):
    whole = archive.read_bytes()
    other = io.BytesIO()
    write(other, {"net/evil": b"1"})
    for name, content in {
        "bytes after the end": whole + b"\0",
        "another archive after it": whole + other.getvalue(),
        "another archive before it": other.getvalue() + whole,
        "a comment that holds an archive": whole[:-2]
        + struct.pack("<H", len(other.getvalue()))
        + other.getvalue(),
        "truncated": whole[: len(whole) // 2],
        "directory moved": whole[:-30] + b"\1" + whole[-29:],
    }.items():
        path = tmp_path / "bad.pt"
        path.write_bytes(content)
        with pytest.raises(ModelContractError, match="damaged, or no archive"):
            print(name, check(path))


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "a/../../evil", "a\\evil", "a/", "a\0b", "a\x1b[31mb", "a//b"]
)
def test_names_that_are_no_plain_paths_are_refused(tmp_path, name):
    path = tmp_path / "bad.pt"
    info = zipfile.ZipInfo("x")
    info.filename = name  # as it is: the constructor would cut it at a NUL
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, b"")
    with pytest.raises(ModelContractError, match="not a plain path"):
        check(path)


def test_two_members_of_one_name_are_refused(tmp_path):
    path = write(tmp_path / "bad.pt", {"a/data.pkl": b"1", "a/DATA.pkl": b"2"})
    with pytest.raises(ModelContractError, match="have one name"):
        check(path)


def test_encrypted_members_are_refused(tmp_path):
    path = write(tmp_path / "bad.pt", {"a/data.pkl": b"1"})
    content = bytearray(path.read_bytes())
    content[directory_of(content) + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(ModelContractError, match="encrypted"):
        check(path)


def test_members_that_unpack_into_too_much_are_refused(tmp_path):
    path = write(
        tmp_path / "bad.pt", {"a/data.pkl": bytes(300 << 20)}, compression=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(ModelContractError, match="unpacks into 314,572,800 bytes"):
        check(path)


def test_members_that_overlap_are_refused(tmp_path):
    path = write(tmp_path / "bad.pt", {"a/b": bytes(1000), "a/c": bytes(10)})
    content = bytearray(path.read_bytes())
    second = directory_of(content) + 46 + 3
    struct.pack_into("<2L", content, second + 20, 1000, 1000)
    struct.pack_into("<L", content, second + 42, 0)
    path.write_bytes(content)
    with pytest.raises(ModelContractError, match="overlap"):
        check(path)


def test_an_error_of_the_caller_is_not_taken_for_the_archive_s(archive):
    with pytest.raises(RuntimeError, match="mine"), open_archive(archive, "file"):
        raise RuntimeError("mine")


def check_packed(path):
    """Names of what lies on top of a zip file of any packer."""
    with open_packed(path) as top:
        return sorted(each.name for each in top.iterdir())


def test_packers_may_write_what_pytorch_never_does(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = b"a comment"
        archive.mkdir("folder")
        info = zipfile.ZipInfo("folder/file")
        info.extra = struct.pack("<2HL", 0x7875, 4, 0)
        archive.writestr(info, b"1" * 500)
        archive.writestr("Größe.txt", b"1")
    assert check_packed(path) == ["Größe.txt", "folder"]


@pytest.mark.parametrize(
    "name", ["../evil", "/evil", "a/../../evil", "a\\evil", "a\0b", "a\x1b[31mb", "a//b", "//"]
)
def test_packed_names_that_are_no_plain_paths_are_refused(tmp_path, name):
    path = tmp_path / "bad.zip"
    info = zipfile.ZipInfo("x")
    info.filename = name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(info, b"")
    with pytest.raises(ModelContractError, match="not a plain path"):
        check_packed(path)


def test_packed_names_of_many_folders_are_refused(tmp_path):
    """Python's library would list each of the folders above each: gigabytes of a small file."""
    for name in ("a/" * 30_000 + "b", "a" * 2000):
        path = write(tmp_path / "bad.zip", {name: b""})
        with pytest.raises(ModelContractError, match="is too long or too deep"):
            check_packed(path)


@pytest.mark.slow
def test_packed_members_that_unpack_into_too_much_are_refused(tmp_path):
    bomb = write(tmp_path / "bad.zip", {"a": bytes(300 << 20)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelContractError, match=r"unpacks into 314,572,800 bytes; at most 268,"):
        check_packed(bomb)
    sound = {"zeros": bytes(300 << 20), "weights": random.Random(0).randbytes(20 << 20)}
    path = write(tmp_path / "good.zip", sound, compression=zipfile.ZIP_DEFLATED)
    assert check_packed(path) == ["weights", "zeros"]


def test_packed_members_that_overlap_are_refused(tmp_path):
    path = write(tmp_path / "bad.zip", {"a": b"1" * 1000, "b": b"2" * 10})
    content = bytearray(path.read_bytes())
    struct.pack_into("<L", content, directory_of(content) + 47 + 42, 0)
    path.write_bytes(content)
    with pytest.raises(ModelContractError, match="its members overlap"):
        check_packed(path)


def test_a_packed_member_that_reaches_into_the_directory_is_refused(tmp_path):
    path = write(tmp_path / "bad.zip", {"a": b"1" * 10})
    content = bytearray(path.read_bytes())
    struct.pack_into("<2L", content, directory_of(content) + 20, 40, 40)
    path.write_bytes(content)
    with pytest.raises(ModelContractError, match="its members overlap"):
        check_packed(path)


def test_encrypted_packed_members_are_refused(tmp_path):
    path = write(tmp_path / "bad.zip", {"a": b"1"})
    content = bytearray(path.read_bytes())
    content[directory_of(content) + 8] |= 1
    path.write_bytes(content)
    with pytest.raises(ModelContractError, match="encrypted"):
        check_packed(path)


def test_other_ways_of_compression_are_refused(tmp_path):
    path = write(tmp_path / "bad.zip", {"a": b"1" * 500}, compression=zipfile.ZIP_LZMA)
    with pytest.raises(ModelContractError, match="compressed otherwise than by deflate"):
        check_packed(path)


def test_a_torn_zip_file_is_told(tmp_path):
    path = write(tmp_path / "bad.zip", {"a": b"1" * 500})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ModelContractError, match="is no zip file"):
        check_packed(path)
    with pytest.raises(ModelContractError, match="is no zip file"):
        check_packed(tmp_path / "absent.zip")


@pytest.mark.parametrize("kind", ["pipe", "device", "link"])
def test_a_zip_file_that_is_none_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "a.zip"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "absent")
    with pytest.raises(ModelContractError, match="is no zip file"), open_packed(path):
        pass
