"""Operators are looked up by name among what is installed, whoever brings them."""

import json

import numpy as np
import pytest
from extension import run_with_extension
from helpers import job_values, read_volume, write_job, write_volume
from scipy import ndimage

from beam_inference.cli.main import main
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.config.operators import Operator
from beam_inference.errors import ConfigError
from beam_inference.job.resolved_job import ResolvedJob

INPUT = np.random.default_rng(0).integers(0, 256, (24, 40, 36), dtype=np.uint8)

OPERATORS = {
    "none": [],
    "smooth": [{"operator": "smooth", "sigma": [0, 1.5, 2]}],
    "select": [{"operator": "select", "channels": [2, 0]}],
    "threshold": [{"operator": "threshold", "at": 0.5}],
    "argmax": [{"operator": "argmax"}],
    "vote": [
        {"operator": "smooth", "sigma": [1, 1, 1]},
        {"operator": "argmax", "background": 0.25},
    ],
    "own": [
        {
            "operator": "own",
            "function": "package.module:function",
            "output_channels": 1,
            "halo": [0, 1, 2],
        }
    ],
}
DTYPES = {"threshold": "uint8", "argmax": "uint8", "vote": "uint16"}
FINGERPRINTS = {  # computed by the code of 7b7144c
    "none": "355d56c1cb92f3c7ef00b025b6483aad98121376e0ee87a545ee844082994114",
    "smooth": "401e659492366a4aaa95dd4e9af65207d1dec33dada8e88e24d880fd7e985778",
    "select": "fde9ab0646392e4ae54179385c95f4d43e32ae080f1bb89012967b7b07007682",
    "threshold": "d2a52c556553aad8553f96412a6023f30c53f7142b5dfb967a24b888d75b9205",
    "argmax": "5f929704dc02bdeffdd05f45726daaafcd84a417196fd5fa836cff1ea4c0a6bf",
    "vote": "4fcc76ee8adcf73bea5e6dee4683d200c6b7ff93242c80f3ab77f0c419bc9e02",
    "own": "1f93bc9b5653d963ad34e386967fd97d185c55183dee545c94817314c300fc99",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_fingerprints_of_jobs_begun_earlier_stay(name):
    box = {"start": [0, 0, 0], "stop": [40, 48, 64]}
    output = {
        "path": "file:///out",
        "dtype": DTYPES.get(name, "float32"),
        "block_shape": [16, 16, 16],
        "format": "zarr3" if name == "argmax" else "precomputed",
        "encoding": "raw",  # what the defaults were
        "shard_shape": None,
    }
    inference = {
        "seams": "recompute",
        "patch_shape": [8, 16, 16],
        "patch_overlap": [0, 4, 4],
        "chunk_shape": [16, 32, 32],
        "device": "cpu",
        "engine": "torch",
        "threads": 1,
    }
    config = {
        "input": {"path": "file:///in"},
        "output": output,
        "model": {"path": "identity", "input_channels": 3, "output_channels": 3},
        "inference": inference,
        "postprocess": OPERATORS[name],
    }
    job = ResolvedJob.model_validate(
        {
            "config": parse_job(config, "/").model_dump(mode="json"),
            "input_bounds": box,
            "input_channels": 3,
            "input_dtype": "uint8",
            "input_block_shape": [16, 16, 16],
            "roi": box,
            "output_bounds": box,
            "voxel_size_nm": [40, 4, 4],
            "model_sha256": "m",
            "engine": {"engine": "identity"},
            "working_set_bytes": 0,
            "versions": {},
            "numerics": 4,
        }
    )
    assert job.fingerprint == FINGERPRINTS[name]


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ({}, "postprocess.0.operator: None is not among the installed operators: affine, argm"),
        ({"operator": ["smooth"]}, r"postprocess.0.operator: \['smooth'\] is not among"),
        ("smooth", "postprocess.0: expected a mapping such as .*; found 'smooth'"),
        ({"operator": "smooth"}, "postprocess.0.sigma: missing"),
        (
            {"operator": "smooth", "sigma": [0, 1, 1], "sigm": 1},
            r"postprocess.0.sigm: unknown key; did you mean 'sigma'\?",
        ),
        (
            {"operator": "smooth", "sigma": [0, -1, "x"]},
            "(?s)postprocess.0.sigma.1: .*greater than .*; found -1\n.*sigma.2: .*number.*'x'",
        ),
        (
            {"operator": "threshold", "at": 1, "of": 2},
            "postprocess.0.of: unknown key; known keys: operator, at",
        ),
    ],
)
def test_a_wrong_key_is_named_with_what_was_expected(tmp_path, operator, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(job_values("in", "out") | {"postprocess": [operator]}, tmp_path)


def test_a_job_with_operators_survives_json(tmp_path):
    smooth = {"operator": "smooth", "sigma": [0, 1, 2]}
    values = job_values("in", "out", model={"input_channels": 3, "output_channels": 3})
    job = parse_job(
        values | {"postprocess": [smooth, {"operator": "select", "channels": [2]}]}, tmp_path
    )
    again = JobConfig.model_validate_json(job.model_dump_json())
    assert again == job
    assert [type(each) for each in again.postprocess] == [type(each) for each in job.postprocess]
    assert job.model_dump(mode="json")["postprocess"][0] == smooth


def test_the_schema_lists_what_is_installed():
    schema = JobConfig.model_json_schema()
    choices = schema["properties"]["postprocess"]["items"]["discriminator"]["mapping"]
    assert list(choices) == [
        "affine",
        "argmax",
        "clip",
        "own",
        "regions",
        "select",
        "sigmoid",
        "smooth",
        "softmax",
        "threshold",
    ]
    assert schema["$defs"]["Smooth"]["properties"]["sigma"]["type"] == "array"


class Doubled(Operator):
    """An operator of which nothing but its function is said."""

    def make_function(self):
        return lambda values: 2 * values


def test_what_an_operator_does_not_say_is_assumed_with_care():
    operator = Doubled(operator="doubled")
    assert operator.halo_zyx == (0, 0, 0)
    assert operator.channels_after(3) == 3
    assert not operator.gives_labels
    assert operator.bytes_per_voxel(3) == 24
    with pytest.raises(NotImplementedError, match="operator doubled gives labels"):
        operator.largest_label(3)


def median_job(tmp_path, name, chunk_shape):
    write_volume(tmp_path / "in", INPUT)
    inference = {"chunk_shape": chunk_shape, "patch_overlap": [0, 0, 0]}
    values = job_values(tmp_path / "in", tmp_path / name, inference=inference)
    values["postprocess"] = [{"operator": "median", "radius": [1, 2, 0]}]
    return str(write_job(tmp_path / f"{name}.yaml", values))


@pytest.mark.parametrize(
    "chunk_shape", [[16, 16, 16], pytest.param([32, 48, 48], marks=pytest.mark.slow)]
)
def test_an_operator_that_another_package_brings(tmp_path, chunk_shape):
    job = median_job(tmp_path, "out", chunk_shape)
    ran = run_with_extension(tmp_path / "site", "run", job)
    assert ran.returncode == 0, ran.stderr
    expected = ndimage.median_filter(INPUT, (3, 5, 1), mode="nearest")
    np.testing.assert_allclose(read_volume(tmp_path / "out")[0], expected, rtol=1e-6)
    record = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert record["config"]["postprocess"] == [{"operator": "median", "radius": [1, 2, 0]}]
    assert record["versions"]["beam-inference-example"] == "0.1"


@pytest.mark.parametrize("seams", ["recompute", "exchange"])
@pytest.mark.parametrize(
    ("depth", "lattice"),
    [(24, "stride"), (24, "pad"), (6, "stride")],  # patches end with it, or hang over its end
)
def test_at_the_volumes_ends_operators_repeat_the_last_voxel(tmp_path, depth, lattice, seams):
    """What a patch answers beyond the volume is of filler."""
    image = INPUT[:depth]
    write_volume(tmp_path / "in", image)
    settings = {
        "chunk_shape": [16, 16, 16],
        "patch_shape": [10, 16, 14],
        "patch_overlap": [2, 4, 4],
        "lattice": lattice,
        "seams": seams,
    }
    values = job_values(
        tmp_path / "in", tmp_path / "out", input={"fill": "constant"}, inference=settings
    )
    values["postprocess"] = [{"operator": "smooth", "sigma": [1, 1, 1.5]}]
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    expected = ndimage.gaussian_filter(image.astype(float), (1, 1, 1.5), mode="nearest", truncate=4)
    np.testing.assert_allclose(read_volume(tmp_path / "out")[0], expected, rtol=1e-4)


def test_without_that_package_the_job_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="'median' is not among the installed operators"):
        parse_job(
            job_values("in", "out") | {"postprocess": [{"operator": "median", "radius": 1}]},
            tmp_path,
        )
