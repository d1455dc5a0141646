"""Small copies beside float outputs, against NumPy on the output that is stored."""

import numpy as np
import pytest
from helpers import do_job, job_values, read_volume, write_job, write_volume
from oracles.downsampling import level_above

from beam_inference import prepare
from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.launch.planned_job import plan_job
from beam_inference.view.layers import view_of
from beam_inference.volumes.opening import open_volume

SHAPE = (27, 50, 61)
PREVIEW = {"scale": [2, 4, 4], "value_range": [0, 200]}
WAYS = [([16, 32, 32], "recompute"), ([32, 16, 48], "exchange"), ([16, 32, 32], "exchange")]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    array = np.random.default_rng(7).integers(0, 256, SHAPE).astype(np.uint8)
    return write_volume(tmp_path_factory.mktemp("in"), array, block_shape=(16, 16, 16))


def values_of(source, out, way=WAYS[0], preview=None, **sections):
    chunk_shape, strategy = way
    output = {"preview": preview or PREVIEW} | sections.pop("output", {})
    inference = {"chunk_shape": chunk_shape, "strategy": strategy}
    return job_values(source, out, output=output, inference=inference, **sections)


def expected(output, start, scale, value_range, dtype=np.uint8):
    """The preview of an output: means in float64, then the full range of the dtype."""
    means = level_above(output, start, scale, "mean").astype(np.float64)
    low, high = value_range
    share = np.clip((means - low) / (high - low), 0, 1)
    return share * np.iinfo(dtype).max


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", ["precomputed", "zarr3"])
def test_a_preview_is_the_mean_of_its_cells(tmp_path, source, way, format):
    job = do_job(values_of(source, tmp_path / "out", way, output={"format": format}), tmp_path)
    found = read_volume(tmp_path / "out_preview")
    assert (found.shape, found.dtype) == ((1, 14, 13, 16), np.uint8)
    wanted = expected(read_volume(tmp_path / "out"), (0, 0, 0), (2, 4, 4), (0, 200))
    assert np.abs(found - wanted).max() <= 0.5 + 1e-4
    volume = open_volume(f"file://{tmp_path}/out_preview")
    assert volume.voxel_size_nm == (20, 40, 40)
    assert job.plan.chunks.count > 1


def test_its_bits_are_those_of_any_chunks(tmp_path, source):
    arrays = []
    for number, way in enumerate(WAYS):
        do_job(values_of(source, tmp_path / str(number), way), tmp_path)
        arrays.append(read_volume(tmp_path / f"{number}_preview"))
    assert all(np.array_equal(arrays[0], other) for other in arrays[1:])


def test_a_part_of_a_volume_with_an_offset_has_a_preview_there(tmp_path, source):
    roi = {"start": [2, 4, 8], "stop": [18, 36, 61]}
    preview = {"scale": [2, 4, 4], "dtype": "uint16", "value_range": [0, 300]}
    preview["path"] = str(tmp_path / "small")
    do_job(values_of(source, tmp_path / "out", WAYS[1], preview, roi=roi), tmp_path)
    volume = open_volume(f"file://{tmp_path}/small")
    assert volume.bounds.start == (1, 1, 2)
    output = read_volume(tmp_path / "out")
    wanted = expected(output, (2, 4, 8), (2, 4, 4), (0, 300), np.uint16)
    assert np.abs(volume.read(volume.bounds) - wanted).max() <= 0.6


def test_a_preview_begins_where_its_output_does(tmp_path):
    """Also where that is between voxels, as after resampling; OME-Zarr keeps it."""
    array = np.random.default_rng(0).integers(0, 200, (24, 32, 32), np.uint8)
    write_volume(tmp_path / "in", array, (2, 0, 0), voxel_size_nm=(8.0, 8.0, 8.0))
    sections = {"input": {"resample": {"voxel_size_nm": [24, 8, 8]}}}
    preview = {"scale": [1, 2, 2], "value_range": [0, 200]}
    output = {"format": "ome_zarr"}
    values = values_of(
        tmp_path / "in", tmp_path / "out", preview=preview, output=output, **sections
    )
    do_job(values, tmp_path)
    for name in ("out", "out_preview"):
        volume = open_volume(f"file://{tmp_path}/{name}")
        begin = volume.bounds.start[0] + volume.origin.rest[0]
        assert begin * volume.voxel_size_nm[0] == pytest.approx(16), name


@pytest.mark.parametrize("way", WAYS[:2])
def test_verify_knows_of_it(tmp_path, source, way, capsys):
    values = values_of(source, tmp_path / "out", way)
    do_job(values, tmp_path)
    path = str(write_job(tmp_path / "job.yaml", values))
    assert main(["verify", path, "--deep", "--recompute", "1"]) == 0
    preview = open_volume(f"file://{tmp_path}/out_preview")
    box = preview.bounds
    assert len(list((tmp_path / "out_preview").rglob("*.shard"))) == 2 * 4 * 4
    next((tmp_path / "out_preview").rglob("*.shard")).unlink()
    capsys.readouterr()
    assert main(["verify", path, "--deep"]) == 1
    assert "output.preview: its blocks at" in capsys.readouterr().out
    assert main(["verify", path, "--recompute", "1"]) == 1
    assert "output.preview: " in capsys.readouterr().out
    assert preview.read(box).shape == (1, *box.shape)


def test_a_finished_job_without_it_is_another_job(tmp_path, source):
    values = values_of(source, tmp_path / "out")
    with_preview = do_job(values, tmp_path)
    moved = values_of(source, tmp_path / "out", preview=PREVIEW | {"path": str(tmp_path / "else")})
    config = plan_job(parse_job(moved, tmp_path)).config
    assert config.output.preview_path == f"file://{tmp_path}/else"
    assert "path" not in with_preview.identity["output"]["preview"]
    del values["output"]["preview"]
    with pytest.raises(StateError, match=r"output\.preview: None here"):
        prepare(parse_job(values, tmp_path))


def test_the_viewer_shows_it(tmp_path, source):
    values = values_of(source, tmp_path / "out")
    do_job(values, tmp_path)
    view = view_of(parse_job(values, tmp_path), [], patches=False)
    layers = {layer["name"]: layer for layer in view.state(None, 10)["layers"]}
    assert {"output", "output.preview"} <= layers.keys()
    assert f"{tmp_path}/out_preview" in str(layers["output.preview"]["source"])


@pytest.mark.parametrize(
    ("preview", "message"),
    [
        ({"scale": [2, 3, 4]}, r"does not divide .*on y, .*Nearest on y: 2 or 4"),
        ({"scale": [32, 4, 4]}, r"Nearest on z: 8 or 16"),
    ],
)
def test_scales_that_cut_blocks_are_refused_with_those_that_fit(tmp_path, source, preview, message):
    with pytest.raises(ConfigError, match=message):
        prepare(parse_job(values_of(source, tmp_path / "out", preview=PREVIEW | preview), tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_start_that_it_does_not_divide_is_refused(tmp_path, source):
    roi = {"start": [3, 0, 0], "stop": list(SHAPE)}
    values = values_of(source, tmp_path / "out", roi=roi)
    with pytest.raises(ConfigError, match=r"on z is no multiple of 2"):
        prepare(parse_job(values, tmp_path))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"dtype": "uint8", "value_range": [0, 1]}, "preview is a copy of float32 values"),
        ({"preview": {"scale": [2, 2, 2]}}, r"output\.preview\.value_range is needed"),
        ({"preview": {"scale": [2, 2, 2], "value_range": [1, 0]}}, "low < high"),
    ],
)
def test_previews_that_cannot_be_are_refused(tmp_path, source, output, message):
    with pytest.raises(ConfigError, match=message):
        parse_job(values_of(source, tmp_path / "out", output=output), tmp_path)


def test_another_volume_in_its_place_is_refused(tmp_path, source):
    write_volume(tmp_path / "out_preview", np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(VolumeError, match="exists and differs from the job"):
        prepare(parse_job(values_of(source, tmp_path / "out"), tmp_path))
    assert not (tmp_path / "out").exists()


def test_it_lies_apart_from_the_output(tmp_path, source):
    preview = PREVIEW | {"path": str(tmp_path / "out" / "small")}
    with pytest.raises(ConfigError, match=r"output\.preview\.path .* is output"):
        prepare(parse_job(values_of(source, tmp_path / "out", preview=preview), tmp_path))
