"""What a job file of several steps may say, and which step needs which."""

import re
from pathlib import Path

import pytest

from beam_inference.config.steps import (
    Places,
    check_order,
    needed_steps,
    split_steps,
)
from beam_inference.errors import ConfigError
from beam_inference.launch.job_files import load_job, load_job_file

JOB = {"input": {"path": "em"}, "output": {"path": "map"}, "model": {"path": "identity"}}
SHARED = {"inference": {"device": "cpu", "patch_shape": [8, 8, 8]}}


def split(steps, *overrides, only=None, **shared):
    return split_steps({"steps": steps, **shared}, "job.yaml", overrides, only)


def test_a_step_is_a_job_with_what_all_share_or_a_command():
    steps = split(
        {"map": {**JOB, "inference": {"device": "cuda"}}, "o": "segment 'a b' c"}, **SHARED
    )
    assert steps["map"] == {**JOB, "inference": {"device": "cuda", "patch_shape": [8, 8, 8]}}
    assert steps["o"] == ("segment", "a b", "c")
    assert split({"o": "beam-inference levels em --to em.json"})["o"][0] == "levels"


def test_overrides_are_for_all_jobs_for_one_or_for_what_they_name():
    two = {"a": JOB, "b": JOB, "c": "levels em --to em.json"}
    steps = split(two, "inference.device=cpu", "steps.b.output.path=other")
    assert [steps[name]["inference"]["device"] for name in "ab"] == ["cpu", "cpu"]
    assert [steps[name]["output"]["path"] for name in "ab"] == ["map", "other"]
    steps = split(two, "output.path=other", only="b")
    assert [steps[name]["output"]["path"] for name in "ab"] == ["map", "other"]
    assert split({"a": JOB, "c": "levels em --to x"}, "input.path=x")["a"]["input"]["path"] == "x"
    with pytest.raises(ConfigError, match=re.escape("--set steps.NAME.input.path=…")):
        split(two, "input.path=x")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([JOB], "expected the steps by names of yours"),
        ({}, "expected the steps by names of yours"),
        ({"a b": JOB}, "a name has letters"),
        ({1: JOB}, "a name has letters"),
        ({"a": ["levels"]}, "expected a job (its keys) or a command"),
        ({"a": "levels 'em"}, "No closing quotation"),
        ({"a": ""}, "found no word"),
    ],
)
def test_what_is_no_step_is_refused(steps, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        split(steps)


def test_volumes_belong_into_a_step():
    with pytest.raises(ConfigError, match="write it into the step"):
        split({"a": JOB}, volumes="*.zarr")


CHAIN = {
    "levels": Places(("f/em",), ("f/em.json",)),
    "map": Places(("f/em", "f/em.json"), ("f/map",)),
    "coarse": Places(("f/map",), ("f/map",), is_added=True),
    "objects": Places(("f/map",), ("f/objects",)),
    "other": Places(("f/em",), ("f/mapped",)),
}


def test_a_step_needs_what_it_reads_and_what_that_needs():
    assert needed_steps(CHAIN, "objects") == ["levels", "map", "coarse"]
    assert needed_steps(CHAIN, "coarse") == ["levels", "map"]
    assert needed_steps(CHAIN, "other") == []
    check_order(CHAIN, "job.yaml")


def test_an_order_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="put map before objects"):
        check_order({name: CHAIN[name] for name in ("objects", "map")}, "job.yaml")
    with pytest.raises(ConfigError, match="map and twin both write f/map/x"):
        check_order({"map": CHAIN["map"], "twin": Places((), ("f/map/x",))} | {}, "job.yaml")


FILE = """
steps:
  map: {input: {path: em}, output: {path: map}}
  cohort:
    volumes: [{name: a, input: map}]
    output: {path: "out/{name}"}
    job: {state_path: state}
  objects: segment map objects --threshold 1 --low 0 --high 1
model: {path: identity}
inference: {patch_shape: [8, 8, 8], patch_overlap: [0, 0, 0], chunk_shape: [8, 8, 8]}
"""


def test_a_step_may_have_volumes_and_is_named_where_one_job_is_meant(tmp_path):
    file = Path(tmp_path / "job.yaml")
    file.write_text(FILE)
    assert list(load_job_file(file).jobs) == ["map", "cohort"]
    assert load_job(file, step="map").output.path == f"file://{tmp_path}/map"
    assert load_job(file, volume="a", step="cohort").output.path == f"file://{tmp_path}/out/a"
    for step, message in [
        (None, "name it with --step, one of map, cohort"),
        ("maps", "did you mean 'map'"),
        ("objects", "the step is the command segment map objects"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_job(file, step=step)
    file.write_text(FILE.replace("steps:", "stepps:"))
    with pytest.raises(ConfigError, match="has no key steps"):
        load_job(file, step="map")
