"""Test that new keys at their defaults leave fingerprints as they were."""

import json
from pathlib import Path

import pytest
from helpers import job_values
from pydantic import Field

from beam_inference.config.fields import Model
from beam_inference.config.job_file import parse_job
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.identity import FIRST_KEYS, identify
from beam_inference.job.resolved_job import ResolvedJob

FIRST = json.loads((Path(__file__).parent / "written_by_7b7144c/fingerprints.json").read_text())


def fingerprint_of(sections, **keys):
    operators = sections.pop("postprocess", [])
    values = job_values("in", "out", **sections) | {"postprocess": operators}
    config = parse_job(values, Path("/data")).model_dump(mode="json")
    if config["inference"]["seams"] == "exact" and config["inference"]["strategy"] == "auto":
        config["inference"]["strategy"] = "recompute"  # what the default was
    if config["output"]["encoding"] == "auto":
        config["output"]["encoding"] = "raw"  # what the default was
    box = BoundingBox((0, 0, 0), (64, 64, 64))
    job = {
        "config": config,
        **dict.fromkeys(("input_bounds", "roi", "output_bounds"), box),
        "input_channels": 1,
        "input_dtype": "uint8",
        "input_block_shape": (16, 16, 16),
        "voxel_size_nm": (8.0, 8.0, 8.0),
        "model_sha256": "identity",
        "engine": {"engine": "torch", "device": "cpu"},
        "working_set_bytes": 0,
        "versions": {},
        "numerics": 4,
        **keys,
    }
    return ResolvedJob.model_validate(job).fingerprint


@pytest.mark.parametrize("name", FIRST)
def test_the_fingerprint_is_that_of_7b7144c(name):
    assert fingerprint_of(FIRST[name]["sections"]) == FIRST[name]["fingerprint"]


class Smooth(Model):
    """A section of the first version, to which a key was added."""

    __module__ = "beam_inference.operators.smooth"

    operator: str = "smooth"
    sigma: float = 1.0
    new: int = Field(3, description="a later key")


def test_a_later_key_enters_only_where_it_is_not_the_default():
    assert identify(Smooth()) == {"operator": "smooth", "sigma": 1.0}
    assert identify(Smooth(new=3)) == identify(Smooth())
    assert identify(Smooth(new=4)) == {"operator": "smooth", "sigma": 1.0, "new": 4}


class Sharpen(Model):
    """Somebody else's operator."""

    operator: str = "sharpen"
    by: int = 2


class Select(Model):
    """Somebody else's operator, of the same name as one of ours, with a section in it."""

    operator: str = "pick"
    by: int = 2
    sharpen: Sharpen = Sharpen()


def test_an_operator_of_somebody_else_is_named_with_all_its_parameters():
    assert "Sharpen" not in FIRST_KEYS
    assert identify(Sharpen()) == {"operator": "sharpen", "by": 2}
    assert identify(Sharpen(by=3)) == {"operator": "sharpen", "by": 3}
    assert "Select" in FIRST_KEYS
    assert identify(Select()) == {"operator": "pick", "by": 2, "sharpen": identify(Sharpen())}


OWN = {"operator": "own", "function": "/data/ops.py:half", "output_channels": 1}
# computed before there were hashes
OWN_BY_PATH = "41b6013f4433af37654156e743f55f4e01b4c30a005c03cb4f3c72f65b860607"


@pytest.mark.parametrize("place", ["/data/", "/moved/", "gs://bucket/a/", "file:///a%20b/"])
def test_a_function_in_a_file_is_known_by_its_hash_and_not_by_its_folder(place):
    def fingerprint(function="/data/ops.py:half", sha256="a"):
        operators = [OWN | {"function": function}]
        sections = {"inference": {"threads": 1}, "postprocess": operators}
        return fingerprint_of(sections, operator_sha256={"postprocess.0": sha256})

    assert fingerprint(f"{place}ops.py:half") == fingerprint()
    assert fingerprint(f"{place}ops.py:half", "b") != fingerprint()
    assert fingerprint(f"{place}ops.py:other") != fingerprint()
    assert fingerprint(f"{place}other.py:half") != fingerprint()


def test_a_record_without_hashes_keeps_its_fingerprint():
    assert fingerprint_of({"inference": {"threads": 1}, "postprocess": [OWN]}) == OWN_BY_PATH
