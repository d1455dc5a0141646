"""Compare pyramids with those of igneous, which has its own environment (requirements.txt)."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import plan_pyramid
from beam_inference.volumes.kvstores import LOCAL

PYTHON = os.environ.get("IGNEOUS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="IGNEOUS_PYTHON names no Python with igneous: make igneous-test"
    ),
]


@pytest.fixture(scope="module")
def real(shared_data):
    """By name: electron micrographs and neurons of the fly's medulla, 250³ voxels."""
    labels = np.load(shared_data / "fib25_medulla_train2_labels.npz")["labels"]
    return {
        "image": np.load(shared_data / "fib25_medulla_train2_image.npy"),
        "labels": labels.astype(np.uint64) * 2**40 + 1,
        "maps": np.load(shared_data / "fib25_medulla_train2_image.npy").astype(np.float32) / 255,
    }


# Of even numbers of rows and columns, where planes are halved alone: tinybrain 1.7 averages others
# wrongly.
@pytest.mark.parametrize(
    ("name", "factor", "start", "shape"),
    [
        ("image", (2, 2, 2), (16, -8, 24), (97, 101, 75)),
        ("image", (1, 2, 2), (0, 4, 8), (33, 152, 140)),
        ("maps", (2, 2, 2), (0, 0, 0), (130, 151, 149)),
        ("maps", (1, 2, 2), (7, -8, 8), (33, 152, 140)),
        ("labels", (2, 2, 2), (16, -8, 24), (97, 101, 75)),
        ("labels", (2, 2, 2), (0, 0, 0), (250, 250, 250)),
        ("labels", (1, 2, 2), (3, -8, 8), (33, 251, 249)),
    ],
)
def test_pyramids_are_igneouss(name, factor, start, shape, real, tmp_path):
    z, y, x = shape
    array = real[name][:z, :y, :x]
    size = (10.0, 10.0, 10.0) if factor == (2, 2, 2) else (40.0, 10.0, 10.0)
    for who in ("us", "them"):
        write_volume(tmp_path / who, array, start, block_shape=(16, 16, 16), voxel_size_nm=size)
        if name == "labels":
            info = tmp_path / who / "info"
            info.write_text(info.read_text().replace('"image"', '"segmentation"'))
    words = [tmp_path / "them", ",".join(map(str, factor[::-1])), "2"]
    script = Path(__file__).with_name("downsample.py")
    told = subprocess.run([PYTHON, script, *words], capture_output=True, text=True, env={})
    assert told.returncode == 0, told.stderr
    places = [line.split() for line in told.stdout.splitlines() if line[:1].isdigit()]
    pyramid = plan_pyramid(multiscale_volume((tmp_path / "us").as_uri(), LOCAL), num_scales=2)
    assert [level.factor for level in pyramid.scales] == [factor] * 2, "the same, by default"
    for stage, place in zip(pyramid.stages, places, strict=True):
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)
        level = stage.scale
        made = pyramid.volume.open_scale(level)
        assert list(map(float, place[1:])) == [*level.bounds.start, *made.voxel_size_nm]
        found = made.read(level.bounds)
        expected = np.load(tmp_path / "them" / f"{level.name}.npy")
        assert found.shape == expected.shape
        difference = np.abs(found.astype(float) - expected)
        print(
            name,
            level.name,
            found.shape,
            "greatest difference",
            difference.max(),
            "of",
            np.mean(difference > 0),
        )
        if name == "labels":
            np.testing.assert_array_equal(found, expected)
        else:
            assert difference.max() <= (1 if name == "image" else 2e-7)
