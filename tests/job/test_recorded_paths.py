"""Recorded paths lead back to their files, and name neither people nor credentials."""

import getpass
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import StateError
from beam_inference.job.recorded_paths import RecordedPaths

LOCAL = RecordedPaths("file:///data/run%201/out")
REMOTE = RecordedPaths("gs://bucket/run/out")


@pytest.mark.parametrize(
    ("path", "recorded"),
    [
        ("/data/run 1/em", "../em"),
        ("/data/run 1/out/mask", "mask"),
        ("/data/nets/a.pt2", "../../nets/a.pt2"),
        ("/scratch/em", "../../../scratch/em"),
        ("/home/alice/em", "…/em"),
        ("/Users/alice/lab/em", "…/em"),
        ("/nfs/HOMES/alice/nets/a.ts", "…/a.ts"),
        ("/home/alice", "…/unknown"),
        (f"/scratch/{getpass.getuser()}/em", "…/em"),
        (f"{Path.home()}/em", "…/em"),
        ("file:///data/run%201/em%25", "../em%"),
        ("gs://bucket/em", "gs://bucket/em"),
        ("https://host/em?x=1#y", "https://host/em"),
        ("s3://key:secret@bucket/em", "s3://…@bucket/em"),
    ],
)
def test_a_path_is_recorded_relative_to_its_volume(path, recorded):
    assert LOCAL.record_file(path) == recorded


@pytest.mark.parametrize("path", ["/data/em", "file:///data/em", "/home/alice/em"])
def test_a_volume_in_a_store_names_local_files_by_their_last_name(path):
    assert REMOTE.record_file(path) == "…/em"


def test_what_lies_in_one_home_is_found_from_there():
    paths = RecordedPaths("file:///home/alice/run/out")
    assert paths.record_file("/home/alice/em") == "../../em"
    assert paths.record_file("/home/bob/em") == "…/em"
    moved = RecordedPaths("file:///home/bob/mine/run/out")
    assert moved.find_file("../../em", "input.path") == "/home/bob/mine/em"


def test_drivers_in_a_url_stay():
    url = "file:///data/run%201/em|zarr3:"
    assert LOCAL.record_volume(url) == "../em|zarr3:"
    assert LOCAL.find_volume("../em|zarr3:", "input.path") == url
    assert REMOTE.record_volume("gs://bucket/em|zarr3:") == "gs://bucket/em|zarr3:"


def test_a_path_that_was_left_out_is_told_with_the_flag_that_names_it():
    with pytest.raises(StateError, match=r"called em\. .* --file input.path=PATH"):
        LOCAL.find_volume("…/em", "input.path")


def test_a_spec_keeps_its_places_and_loses_who_opens_them():
    spec = {
        "driver": "stack",
        "context": {"aws_credentials": {"type": "profile", "profile": "alice"}},
        "layers": [
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": "/data/run 1/em/"}},
            {"driver": "zarr3", "kvstore": "file:///data/run%201/b/"},
            {"driver": "zarr3", "kvstore": {"driver": "s3", "bucket": "b", "path": "em/"}},
            {"driver": "n5", "kvstore": {"driver": "gcs", "bucket": "b", "user_project": "p"}},
            {"driver": "n5", "kvstore": "https://host/em/?token=1"},
        ],
    }
    recorded = LOCAL.record_spec(spec)
    assert recorded == {
        "driver": "stack",
        "layers": [
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": "../em/"}},
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": "../b/"}},
            {"driver": "zarr3", "kvstore": {"driver": "s3", "bucket": "b", "path": "em/"}},
            {"driver": "n5", "kvstore": {"driver": "gcs", "bucket": "b"}},
            {"driver": "n5", "kvstore": "https://host/em/"},
        ],
    }
    found = LOCAL.find_spec(recorded, "input.path")["layers"]
    assert found[0] == spec["layers"][0]
    assert found[1]["kvstore"] == {"driver": "file", "path": "/data/run 1/b/"}
    assert found[2:] == recorded["layers"][2:]


@pytest.mark.parametrize(
    "more",
    [
        {"endpoint": "http://attacker"},
        {"host_header": "private.s3.amazonaws.com"},
        {"aws_credentials": {"type": "profile", "profile": "alice"}},
        {"context": {"aws_credentials": {"type": "environment"}}},
        {"aws_credentials#x": {}},
        {"user_project": "somebodys"},
        {"create": True},
        {"delete_existing": True},
        {"headers": ["authorization: Bearer x"]},
        {"coordinator": {"address": "attacker:1"}},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_record_says_what_is_read_and_not_how(more):
    """Whoever wrote the record could otherwise have our credentials sent to a host of theirs."""
    store = {"driver": "s3", "bucket": "b", "path": "em/"}
    for spec in (
        {"driver": "zarr", "kvstore": store | more},
        {"driver": "zarr", "kvstore": store} | more,
        {
            "driver": "cast",
            "base": {"driver": "zarr", "kvstore": {"driver": "zip", "base": store | more}},
        },
        {"driver": "stack", "layers": [{"driver": "n5", "kvstore": store | more}]},
    ):
        with pytest.raises(StateError, match=r"may not say: .* --file input.path=PATH"):
            LOCAL.find_spec(spec, "input.path")


@pytest.mark.parametrize("region", ["x@attacker:1/", "attacker.example", "x#", 5, ["eu"]])
def test_a_region_names_no_host(region):
    store = {"driver": "s3", "bucket": "b", "path": "em/", "aws_region": "eu-central-1"}
    spec = {"driver": "zarr", "kvstore": store}
    assert LOCAL.find_spec(spec, "input.path") == spec
    with pytest.raises(StateError, match="which is none"):
        LOCAL.find_spec(spec | {"kvstore": store | {"aws_region": region}}, "input.path")


def test_a_spec_in_somebodys_home_is_left_out():
    for kvstore in ({"driver": "file", "path": "/home/alice/em/"}, "file:///home/alice/em|zip:"):
        recorded = LOCAL.record_spec({"driver": "zarr3", "kvstore": kvstore})
        assert "alice" not in str(recorded)
        with pytest.raises(StateError, match="called em"):
            LOCAL.find_spec(recorded, "input.path")


NAMES = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="/\0|"), min_size=1, max_size=8
).filter(lambda name: name not in (".", "..") and ":" not in name)
PATHS = st.lists(NAMES, min_size=1, max_size=5).map(lambda parts: f"/{'/'.join(parts)}")


@given(PATHS, PATHS)
def test_every_recorded_path_leads_back_or_says_nothing(volume, path):
    paths = RecordedPaths(Path(volume).as_uri())
    recorded = paths.record_volume(Path(path).as_uri())
    if recorded.startswith("…/") and not path.startswith("/…"):
        return
    assert paths.find_volume(recorded, "input.path") == Path(path).as_uri()
    assert not os.path.isabs(recorded)
