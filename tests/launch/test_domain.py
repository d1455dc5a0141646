"""Jobs whose lattice lies in a box of its own: their ROI may be enlarged, and no bit changes."""

import json

import numpy as np
import pytest
from helpers import POSITION, job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.enlargement import enlarge_job
from beam_inference.job.state import State

SHAPE = (24, 64, 80)
SMALL = {"start": [0, 32, 32], "stop": [16, 64, 64]}
LARGE = {"start": [0, 0, 0], "stop": [24, 64, 80]}


@pytest.fixture
def write(tmp_path):
    """Write a job file with a ROI; returns its path."""
    array = np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)
    write_volume(tmp_path / "in", array)

    def write_roi(roi, domain="volume", name="out", strategy="recompute", **sections):
        sections = {"model": POSITION, "inference": {"strategy": strategy}} | sections
        values = job_values("in", name, **sections)
        values["roi"] = roi if domain is None else {**roi, "domain": domain}
        return str(write_job(tmp_path / f"{name}.yaml", values))

    return write_roi


def test_the_voxels_of_another_size_have_no_domain(write, capsys):
    sections = {"output": {"voxel_size_nm": [10, 20, 20]}, "model": {"path": "identity"}}
    path = write({"start": [0, 0, 0], "stop": [16, 16, 16]}, **sections)
    assert "roi.domain is for outputs with the voxels" in refused(capsys, "plan", path)


def run(capsys, path):
    capsys.readouterr()
    assert main(["run", path, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    capsys.readouterr()
    assert main(list(words)) == 2
    return capsys.readouterr().err


def fingerprint(folder):
    return State(f"file://{folder}/_beam_inference").load_job().fingerprint


@pytest.mark.parametrize(
    "strategy", ["recompute", pytest.param("exchange", marks=pytest.mark.slow)]
)
def test_a_larger_roi_computes_what_is_new_with_the_same_bits(write, tmp_path, capsys, strategy):
    path = write(SMALL, strategy=strategy)
    assert run(capsys, path)["done"] == 1
    before = fingerprint(tmp_path / "out")
    path = write(LARGE, strategy=strategy)
    assert "was launched with roi" in refused(capsys, "verify", path)
    outcome = run(capsys, path)
    assert (outcome["chunks"], outcome["done"], outcome["done_by_this_launch"]) == (12, 12, 11)
    assert fingerprint(tmp_path / "out") == before
    assert main(["verify", path, "--deep"]) == 0
    assert run(capsys, path)["done_by_this_launch"] == 0
    whole = write_job(tmp_path / "whole.yaml", job_values("in", "whole", model=POSITION))
    assert main(["run", str(whole)]) == 0
    np.testing.assert_array_equal(read_volume(tmp_path / "out"), read_volume(tmp_path / "whole"))


@pytest.mark.slow
def test_chunks_that_grow_are_done_again_and_a_killed_enlargement_is_too(write, tmp_path, capsys):
    """Two of four chunks end with the former ROI, inside of chunks of now."""
    path = write({"start": [0, 32, 0], "stop": [24, 64, 48]})
    assert run(capsys, path)["done"] == 4
    state = State(f"file://{tmp_path}/out/_beam_inference")
    earlier = state.load_job()
    job = earlier.with_roi(BoundingBox((0, 0, 0), SHAPE))
    enlarge_job(state, earlier, job, ())
    assert state.of(job).count_receipts(0, 12) == 2
    state.replace_job(earlier)  # as if it had been killed before the last write
    outcome = run(capsys, write(LARGE))
    assert (outcome["done"], outcome["done_by_this_launch"]) == (12, 10)


def test_other_rois_are_refused(write, capsys):
    assert run(capsys, write(SMALL))["done"] == 1
    smaller = {"start": [0, 32, 32], "stop": [16, 48, 64]}
    assert "may be enlarged only" in refused(capsys, "run", write(smaller))
    shifted = {"start": [0, 16, 32], "stop": [16, 64, 64]}
    err = refused(capsys, "run", write(shifted))
    assert "The next one before is [0, 0, 32]" in err
    assert run(capsys, write(SMALL, None, "plain"))["done"] == 1
    err = refused(capsys, "run", write(LARGE, None, "plain"))
    assert "can be only if the first launch had roi.domain" in err


@pytest.mark.slow
def test_records_of_before_name_no_chunks_of_now(write, tmp_path, capsys):
    assert run(capsys, write(SMALL))["done"] == 1
    record = {
        "chunk": 0,
        "box": SMALL,
        "fingerprint": fingerprint(tmp_path / "out"),
    }
    (tmp_path / "quarantine.jsonl").write_text(json.dumps(record))
    words = ("--chunks", str(tmp_path / "quarantine.jsonl"))
    err = refused(capsys, "run", write(LARGE), *words)
    assert "when the job had another roi" in err


@pytest.mark.parametrize(
    ("roi", "sections", "message"),
    [
        ({"context": [1, 1, 1]}, {}, "remove one of them"),
        ({"domain": {"start": [0, 0, 0], "stop": [8, 64, 64]}}, {}, "is not inside domain"),
        ({"domain": "input"}, {}, "roi.domain: input should be 'volume'"),
        ({}, {"inference": {"seams": "crop"}}, "does not go with inference.seams: crop"),
        ({}, {"input": {"box": LARGE}}, "does not go with input.box"),
    ],
)
def test_domains_that_cannot_be_are_refused(tmp_path, roi, sections, message):
    values = job_values("in", "out", **sections)
    values["roi"] = {**SMALL, "domain": "volume", **roi}
    with pytest.raises(ConfigError, match=message):
        parse_job(values, tmp_path)
