"""Test that files in object stores are read in parts, and that a change of them is noticed."""

import uuid

import pytest
from fakes.web_files import WebFiles

from beam_inference.errors import PermanentReadError, VolumeError, WorkerFault
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.remote_files import (
    BUFFER_BYTES,
    find_remote_file,
)


def put(name, content):
    """Write a file into a store of its own in memory, and return its URL."""
    folder = f"memory://{uuid.uuid4().hex}"
    open_kvstore(folder).write(name, content).result()
    return f"{folder}/{name}"


@pytest.mark.parametrize(
    "size", [1, 2**14 - 1, 2**14, 2**14 + 1, 2**16, 2**16 + 1, 2**18 + 1, 10**6, 3 * 2**20]
)
def test_the_size_of_a_file_is_found_out(size):
    content = bytes(range(251)) * (size // 251 + 1)
    file = find_remote_file(put("a.bin", content[:size]), LOCAL)
    assert file.size == size
    assert file.holds(size - 1)
    assert not file.holds(size)
    with file.open() as stream:
        assert stream.read() == content[:size]
        stream.seek(-1, 2)
        assert stream.read(5) == content[size - 1 : size]
        stream.seek(size // 2)
        assert stream.read(100) == content[size // 2 : min(size, size // 2 + 100)]


def test_parts_come_in_their_order():
    content = bytes(i % 251 for i in range(100_000))
    file = find_remote_file(put("a.bin", content), LOCAL)
    parts = [(start, start + 7) for start in range(90_000, 0, -1013)]
    assert list(file.read_parts(parts)) == [content[a:b] for a, b in parts]
    assert file.read_whole(100_000) == content
    with pytest.raises(PermanentReadError, match="has more than 99,999 bytes"):
        file.read_whole(99_999)
    with pytest.raises(PermanentReadError, match="cannot read memory://"):
        file.read(99_990, 100_001)


def test_headers_are_read_by_few_small_requests():
    content = bytes(10**6)
    with WebFiles({"/a.bin": content}) as web:
        with find_remote_file(f"{web.url}/a.bin", LOCAL).open() as stream:
            for place in (500_000, 0, 500_100, 8, 500_050):
                stream.seek(place)
                stream.read(100)
        assert web.sent["/a.bin"] <= 3 * BUFFER_BYTES


def test_a_file_that_is_changed_or_removed_is_noticed():
    url = put("a.bin", b"0123456789")
    folder, _, name = url.rpartition("/")
    file = find_remote_file(url, LOCAL)
    open_kvstore(folder).write(name, b"9876543210").result()
    with pytest.raises(WorkerFault, match="was changed since"):
        file.read(0, 4)
    open_kvstore(folder).write(name, None).result()
    with pytest.raises(WorkerFault, match="was removed since"):
        file.read(0, 4)


def test_what_cannot_be_read_in_parts_is_refused():
    with pytest.raises(VolumeError, match="there is nothing at memory://"):
        find_remote_file("memory://nothing/a.bin", LOCAL)
    with pytest.raises(VolumeError, match="is empty"):
        find_remote_file(put("a.bin", b""), LOCAL)
    with (
        WebFiles({"/a.bin": b"0123"}, has_ranges=False) as web,
        pytest.raises(VolumeError, match="sends whole files only.*Copy it here first"),
    ):
        find_remote_file(f"{web.url}/a.bin", LOCAL)
