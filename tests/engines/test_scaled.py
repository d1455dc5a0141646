"""Networks whose output is finer than their input, in whole jobs."""

import numpy as np
import pytest
import torch
import toy_networks
from helpers import job_values, read_volume, toy, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.config.job_file import parse_job
from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.scaled import scale_output
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.parts import open_input
from beam_inference.launch.planned_job import plan_job
from beam_inference.volumes.opening import open_volume

IMAGE = np.random.default_rng(1).integers(1, 256, (12, 15, 22), dtype=np.uint8)
START = (4, -3, 5)
SIZE = (16.0, 16.0, 16.0)
FINER = toy(
    "finer",
    output_channels=2,
    output_scale=[2, 2, 2],
    crop_margin=[2, 2, 2],
    voxel_size_nm=list(SIZE),
    normalize="unit",
)
INPUT = {"fill": "symmetric"}


@pytest.fixture
def image(tmp_path):
    write_volume(tmp_path / "in", IMAGE, START, voxel_size_nm=SIZE, block_shape=(8, 8, 16))
    return tmp_path / "in"


def whole(image):
    """What the network gives of the whole image at once."""
    padded = np.pad(image.astype(np.float32), 1, mode="symmetric")
    with torch.inference_mode():
        return toy_networks.finer()(torch.from_numpy(padded)[None, None])[0].numpy()


def test_each_voxel_of_a_network_is_taken_once():
    values = np.arange(2 * 6 * 4, dtype=np.float32).reshape(1, 1, 2, 6, 4)
    taken = scale_output(lambda batch: batch, NumpyDevice(), (1, 3, 2))(values)
    np.testing.assert_array_equal(taken, values[:, :, :, ::3, ::2])


def run(tmp_path, image, name, **sections):
    values = job_values(image, tmp_path / name, input=INPUT, model=FINER, **sections)
    assert main(["run", str(write_job(tmp_path / f"{name}.yaml", values))]) == 0
    return read_volume(tmp_path / name)


@pytest.mark.parametrize(
    ("strategy", "engine"),
    [
        ("recompute", "torch"),
        ("exchange", "torch"),
        pytest.param("exchange", "openvino", marks=pytest.mark.slow),
    ],
)
def test_a_job_gives_the_finer_voxels(tmp_path, image, strategy, engine):
    if engine != "torch":
        pytest.importorskip(engine)
    found = [
        run(
            tmp_path,
            image,
            f"out{shape[2]}",
            inference={"chunk_shape": shape, "strategy": strategy, "engine": engine},
        )
        for shape in ([16, 16, 16], [32, 32, 48])
    ]
    np.testing.assert_array_equal(*found)
    out = open_volume(str(tmp_path / "out16"))
    assert out.voxel_size_nm == (8.0, 8.0, 8.0)
    assert out.bounds == BoundingBox((8, -6, 10), (32, 24, 54))
    expected = whole(IMAGE / np.float32(255))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-6 * np.ptp(expected))


def test_the_input_may_be_resampled_as_well(tmp_path):
    """Stored at 16 nm, seen at 32 nm, and answered at 16 nm."""
    source = write_volume(tmp_path / "in", IMAGE, (4, -4, 6), voxel_size_nm=SIZE)
    size = {"voxel_size_nm": [32, 32, 32]}
    keys = INPUT | {"resample": {"order": 1}}
    as_seen = parse_job(job_values(source, tmp_path / "out", input=keys, model=size), tmp_path)
    seen = open_input(as_seen)
    assert seen.bounds.shape == (6, 8, 11)
    job = str(
        write_job(
            tmp_path / "job.yaml",
            job_values(source, tmp_path / "out", input=keys, model=FINER | size),
        )
    )
    assert main(["run", job]) == 0
    expected = whole(seen.read(seen.bounds)[0] / np.float32(255))
    found = read_volume(tmp_path / "out")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.ptp(expected))
    assert main(["verify", job, "--recompute", "1"]) == 0


def test_a_volume_that_begins_inside_a_voxel_of_the_network_is_refused(tmp_path, image):
    keys = INPUT | {"resample": {"order": 1}}
    model = FINER | {"voxel_size_nm": [32, 32, 32]}
    with pytest.raises(ConfigError, match="between the voxels that the network sees"):
        open_input(
            parse_job(job_values(image, tmp_path / "out", input=keys, model=model), tmp_path)
        )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"inference": {"patch_shape": [8, 16, 15]}}, "inference.patch_shape"),
        ({"roi": {"start": [8, -6, 11], "stop": [32, 24, 54]}}, "roi.start"),
        ({"inference": {"lattice": "spread"}}, "lattice: spread"),
        ({"inference": {"seams": "crop"}}, "seams: crop"),
        ({"input": {"fill": "reflect"}}, "write symmetric"),
        ({"inference": {"patch_shape": [26, 16, 16]}}, "inside a voxel of the network"),
        ({"model": {"voxel_size_nm": [8, 8, 8]}}, "objects of another size"),
    ],
)
def test_what_would_cut_voxels_is_refused(tmp_path, image, sections, message):
    parts = {"input": INPUT, "model": FINER}
    parts |= {key: parts.get(key, {}) | keys for key, keys in sections.items()}
    with pytest.raises(ConfigError, match=message):
        plan_job(parse_job(job_values(image, tmp_path / "out", **parts), tmp_path))
