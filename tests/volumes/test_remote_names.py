"""Test which files of a store or a web server a glob, a range of numbers and a list name."""

import uuid

import pytest
from fakes.gcs import GcsStandIn
from fakes.web_files import WebFiles

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.volumes.kvstores import LOCAL, open_kvstore
from beam_inference.volumes.remote_files import find_remote_file
from beam_inference.volumes.remote_names import (
    folder_of_files,
    is_glob,
    list_remote_files,
    names_files,
)


def test_names_are_decoded_once():
    with GcsStandIn("data") as gcs:
        storage = Storage.model_validate({"gcs": {"endpoint": gcs.url}})
        for name in ("s/a b%.png", "s/c.png", "s/deep/d.png", "t.png", "s/", "s/deep/"):
            gcs.put("data", name, name.encode())
        urls = list_remote_files("gs://data/s/*.png", storage)
        assert urls == ["gs://data/s/a%20b%25.png", "gs://data/s/c.png"]
        assert find_remote_file(urls[0], storage).read_whole(100) == b"s/a b%.png"
        assert list_remote_files("gs://data/*/*/?.png", storage) == ["gs://data/s/deep/d.png"]
        assert list_remote_files("gs://data/s/*", storage) == urls
        assert list_remote_files("gs://data/s/a%20b%25*", storage) == urls[:1]
        gcs.put("data", "s/a*b.png", b"")
        assert list_remote_files("gs://data/s/a%2ab.*", storage) == ["gs://data/s/a%2Ab.png"]


def test_web_servers_are_not_listed():
    with pytest.raises(VolumeError, match=r"do not list.*z\{000\.\.499\}\.tif.*names\.txt.*wget"):
        list_remote_files("https://host/*.png", LOCAL)


def test_wildcards_ranges_and_lists_stand_in_paths_only():
    assert is_glob("gs://bucket/s?.png")
    assert not is_glob("https://host/em?x=1")
    assert not is_glob("http://[::1]:80/em.npy")
    assert folder_of_files("s3://bucket/em/s[0-9]/a.png") == "s3://bucket/em/"
    assert folder_of_files("https://host/em/a{0..9}/b.png") == "https://host/em/"
    for url in ("https://host/z{00..11}.tif", "https://host/em/names.txt", "s3://b/z{0..9}"):
        assert names_files(url)
    for url in ("https://host{1..2}/z.tif", "https://host/z{0.5}.tif", "https://names.txt"):
        assert not names_files(url)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{0..2}", ["0", "1", "2"]),
        ("{00..100}", [f"{n:03d}" for n in range(101)]),
        ("{5..5}", ["5"]),
    ],
)
def test_a_range_counts_as_shells_count(numbers, expected):
    urls = list_remote_files(f"https://host/a/z{numbers}.tif", LOCAL)
    assert urls == [f"https://host/a/z{number}.tif" for number in expected]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://host/z{9..0}.tif", "a range that counts up"),
        ("https://host/z{0..99999999999}.tif", "of 1,000,000 files at most"),
        ("https://host/z{0..9}_{0..9}.tif", "expected one range"),
        ("gs://bucket/z{0..9}*.tif", "expected one range"),
    ],
)
def test_other_ranges_are_refused(url, message):
    with pytest.raises(VolumeError, match=message):
        list_remote_files(url, LOCAL)


def list_of(text):
    """What a list of names in a store in memory gives, without the folder's URL."""
    folder = f"memory://{uuid.uuid4().hex}/em"
    open_kvstore(folder).write("names.txt", text).result()
    urls = list_remote_files(f"{folder}/names.txt", LOCAL)
    return [url.removeprefix(f"{folder}/") for url in urls]


def test_a_list_names_files_beside_it():
    text = "\ufeffz 1.png\r\n./z2.png\n\nbelow/z%3.png".encode()
    assert list_of(text) == ["z%201.png", "z2.png", "below/z%253.png"]
    with WebFiles({"/em/names.txt": b"a.png\nb.png\n"}) as web:
        urls = list_remote_files(f"{web.url}/em/names.txt", LOCAL)
    assert urls == [f"{web.url}/em/a.png", f"{web.url}/em/b.png"]


@pytest.mark.parametrize(
    "name",
    [
        "../a.png",
        "/etc/passwd",
        "sub/../../a.png",
        "http://host/a.png",
        "a//b.png",
        "..",
        "9" * 5000,
    ],
)
def test_a_list_names_no_files_elsewhere(name):
    with pytest.raises(VolumeError, match=r"which is no name of a file in its folder memory://"):
        list_of(f"z1.png\n{name}\n".encode())


def test_other_files_are_no_lists():
    with pytest.raises(VolumeError, match="no text in UTF-8"):
        list_of(b"\xff\xfe\x00")
    with pytest.raises(VolumeError, match=r"lists 'a\.png' twice"):
        list_of(b"a.png\nb.png\na.png")
    with pytest.raises(VolumeError, match="there is nothing at"):
        list_remote_files(f"memory://{uuid.uuid4().hex}/names.txt", LOCAL)
