"""Formats are looked up by name among what is installed, whoever brings them."""

import json

import numpy as np
import pytest
import tensorstore as ts
from extension import run_with_extension
from helpers import OF_RANGE, job_values, read_volume, write_job, write_volume

from beam_inference.config.formats import get_format, installed_formats
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.config.plugins import list_plugins
from beam_inference.errors import ConfigError

INPUT = np.random.default_rng(0).integers(0, 256, (16, 32, 32), dtype=np.uint8)


def test_every_installed_format_is_a_value_of_its_name():
    assert [each.name for each in installed_formats()] == list(list_plugins("formats"))
    assert {each.name for each in installed_formats() if each.has_shards} == {
        "precomputed",
        "zarr3",
        "ome_zarr",
    }
    assert {each.name for each in installed_formats() if each.is_multiscale} == {
        "precomputed",
        "ome_zarr",
        "ome_zarr_0.4",
    }
    with pytest.raises(ConfigError, match="'tiff' is not among the installed formats: n5, "):
        get_format("tiff")
    with pytest.raises(ConfigError, match=r"\. Did you mean zarr2 or zarr3\?$"):
        get_format("zarr")
    with pytest.raises(ConfigError, match=r"Did you mean ome_zarr"):
        get_format("OME-Zarr")


def test_the_schema_lists_what_is_installed():
    schema = JobConfig.model_json_schema()["$defs"]["Output"]["properties"]["format"]
    assert schema["enum"] == list(list_plugins("formats"))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"format": 3}, "output.format: .*string; found 3"),
        (
            {"format": "zarr3", "dtype": "uint8", "value_range": [0, 1], "encoding": "png"},
            "encoding: png is for precomputed volumes of uint8",
        ),
        (
            {"encoding": "compressed_segmentation"},
            "compressed_segmentation is for precomputed volumes of uint32 or uint64",
        ),
        (
            {"format": "n5", "shard_shape": [32, 32, 32]},
            "n5 has no shards: .* write one of ome_zarr, precomputed, zarr3",
        ),
        ({"shard_shape": [24, 32, 32]}, "must be a multiple of block_shape"),
    ],
)
def test_what_a_format_does_not_hold_is_refused(tmp_path, output, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(job_values("in", "out", output=output), tmp_path)


@pytest.mark.slow
def test_a_job_into_a_format_that_another_package_brings(tmp_path):
    write_volume(tmp_path / "in", INPUT)
    inference = {"patch_overlap": [0, 0, 0], "chunk_shape": [16, 32, 32]}
    output = {"format": "zarr3_blosc", "shard_shape": [16, 32, 32]}
    values = job_values(tmp_path / "in", tmp_path / "out", inference=inference, output=output)
    job = str(write_job(tmp_path / "job.yaml", values))
    for words in (["run", job], ["verify", job]):
        ran = run_with_extension(tmp_path / "site", *words)
        assert ran.returncode == 0, ran.stderr
    np.testing.assert_allclose(read_volume(tmp_path / "out")[0], INPUT, rtol=0, atol=OF_RANGE)
    store = ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/out/"}).result()
    assert "blosc" in json.dumps(store.codec.to_json())
    record = json.loads((tmp_path / "out/_beam_inference/job.json").read_text())
    assert record["config"]["output"]["format"] == "zarr3_blosc"
    assert record["versions"]["beam-inference-example"] == "0.1"


@pytest.mark.slow
def test_a_conversion_into_a_format_that_another_package_brings(tmp_path):
    url = write_volume(tmp_path / "in", INPUT)
    words = ["convert", url, f"file://{tmp_path}/out", "--format=zarr3_blosc"]
    ran = run_with_extension(tmp_path / "site", *words)
    assert ran.returncode == 0, ran.stderr
    np.testing.assert_array_equal(read_volume(tmp_path / "out")[0], INPUT)
    again = run_with_extension(tmp_path / "site", "pyramid", f"file://{tmp_path}/out")
    assert again.returncode == 2
    assert "is a single zarr3 array, which has no place for scales" in again.stderr
