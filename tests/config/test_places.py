"""Places of jobs, and that two names of one place are told to be one."""

import os
from pathlib import Path

import pytest

from beam_inference.config.job_file import parse_job
from beam_inference.config.places import Places, places_of_job, real_place

JOB = {
    "input": {"path": "em"},
    "output": {"path": "map"},
}


def test_the_places_of_a_job():
    values = {
        **JOB,
        "mask": {"path": "tissue"},
        "model": {"path": "identity", "normalize": {"levels": "em.json"}},
        "outputs": {
            "second": {"path": "second", "preview": {"scale": [2, 2, 2], "value_range": [0, 1]}}
        },
        "job": {"state_path": "state"},
        "inference": {"patch_shape": [8, 8, 8], "patch_overlap": [0, 0, 0], "chunk_shape": "auto"},
    }
    places = places_of_job(parse_job(values, Path("/d")))
    assert set(places.read) == {f"file:///d/{name}" for name in ("em", "tissue", "em.json")}
    written = {"map", "second", "state", "second_preview"}
    assert set(places.written) == {f"file:///d/{name}" for name in written}


@pytest.mark.parametrize(
    "name", ["link", "link/.", "sub/../em", "./em", "%65m", "around/em", "em/", "em|zarr3:"]
)
def test_names_of_one_local_place(tmp_path, name):
    (tmp_path / "em").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("em")
    (tmp_path / "around").symlink_to(tmp_path)
    place = str(tmp_path / "em")
    assert real_place(f"file://{tmp_path}/{name}") == os.path.realpath(place)
    written = Places((), (Path(place).as_uri(),))
    url = f"file://{tmp_path}/{name}"
    assert Places((url,), ()).reads_of(written) == url
    assert Places((), (f"{url.partition('|')[0].rstrip('/')}/8_8_8",)).writes_of(written)


def test_names_of_one_place_in_a_bucket():
    assert real_place("gs://bucket/a%62c/") == real_place("gs://bucket/abc")
    assert real_place("gs://bucket/a/../b") != real_place("gs://bucket/b"), "names of objects"
    assert real_place("gs://one/a") != real_place("s3://one/a") != real_place("s3://two/a")
    assert Places(("gs://b/a",), ()).reads_of(Places((), ("gs://b/ab",))) is None
