"""Jobs over volumes that lie elsewhere than at voxel 0, by their translation."""

import json

import numpy as np
import pytest
from helpers import job_values, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume

START = (3, -5, 20)
SHAPE = (16, 32, 32)
BOX = BoundingBox(START, (19, 27, 52))


def translate(folder, nanometres):
    """Write the translation, ZYX, of a group's only scale; None to remove it."""
    group = json.loads((folder / "zarr.json").read_text())
    (dataset,) = group["attributes"]["ome"]["multiscales"][0]["datasets"]
    dataset["coordinateTransformations"][1:] = (
        [{"type": "translation", "translation": list(nanometres)}] if nanometres else []
    )
    (folder / "zarr.json").write_text(json.dumps(group))


@pytest.fixture
def array(tmp_path):
    """The voxels of a translated group, ``in``."""
    array = np.random.default_rng(0).integers(1, 256, SHAPE, dtype=np.uint8)
    write_volume(tmp_path / "in", array, START, format="ome_zarr", block_shape=(16, 16, 16))
    return array


def written(tmp_path):
    volume = open_volume(str(tmp_path / "out"))
    return volume.bounds, volume.read(volume.bounds)[0]


def job_of(tmp_path, **sections):
    output = {"dtype": "uint8", "value_range": [0, 255]} | sections.pop("output", {})
    values = job_values(tmp_path / "in", tmp_path / "out", output=output, **sections)
    return str(write_job(tmp_path / "job.yaml", values))


def test_the_output_lies_where_the_input_lies(tmp_path, array):
    box = {"start": [3, -5, 36], "stop": [19, 11, 52]}
    translate(tmp_path / "in", (30, -50, 202.5))  # a quarter of a voxel is left
    assert main(["run", job_of(tmp_path, output={"format": "ome_zarr"}, roi=box)]) == 0
    bounds, values = written(tmp_path)
    assert bounds == BoundingBox((3, -5, 36), (19, 11, 52))
    np.testing.assert_array_equal(values, array[:, :16, 16:])
    origin = open_volume(str(tmp_path / "out")).origin
    assert origin.rest == pytest.approx((0, 0, 0.25))


def test_a_job_that_began_when_translations_were_not_read_is_refused_with_the_reason(
    tmp_path, array, capsys
):
    folder = tmp_path / "in"
    job = job_of(tmp_path)
    translate(folder, None)
    assert main(["run", job]) == 0
    assert written(tmp_path)[0].start == (0, 0, 0)
    translate(folder, (30, -50, 200))
    capsys.readouterr()
    assert main(["run", job]) == 2
    told = capsys.readouterr().err
    assert "begins at the voxel [3, -5, 20]" in told
    assert "This job began when translations were not read" in told
    # What it has done is as good as it was, and is shown where it lies.
    assert main(["verify", job, "--deep"]) == 0
    capsys.readouterr()
    assert main(["view", job, "--link"]) == 0
    state = json.loads(capsys.readouterr().out)
    matrix = np.array(state["layers"][0]["source"]["transform"]["matrix"])
    corner = np.array([3, -5, 20]) - 0.5
    np.testing.assert_allclose(matrix[:, :3] @ corner + matrix[:, 3], 0, atol=1e-9)
    # A translation of nothing changes nothing.
    translate(folder, (0, 0, 0))
    assert main(["run", job]) == 0
    np.testing.assert_array_equal(written(tmp_path)[1], array)


def test_a_mask_that_is_translated_counts_where_it_lies(tmp_path, array, capsys):
    mask = np.ones((4, 8, 4), np.uint8)
    place = {"format": "ome_zarr", "voxel_size_nm": (40.0, 40.0, 40.0)}
    write_volume(tmp_path / "mask", mask, **place)
    job = job_of(tmp_path, mask={"path": str(tmp_path / "mask")})
    assert main(["run", job]) == 0
    translate(tmp_path / "mask", (0, 0, 320))
    capsys.readouterr()
    assert main(["run", job]) == 2
    told = capsys.readouterr().err
    assert "mask.origin: [0, 0, 8] here, None there" in told
    assert "The metadata of mask state a translation, which was not read when the job" in told
    assert main(["run", job, "--overwrite"]) == 0
    bounds, values = written(tmp_path)
    assert bounds == BOX
    z, y, x = (np.arange(a, b) for a, b in zip(BOX.start, BOX.stop, strict=True))
    kept = (z < 16)[:, None, None] & (y >= 0)[:, None] & ((x >= 32) & (x < 48))
    np.testing.assert_array_equal(values, np.where(kept, array, 0))
    assert main(["run", job]) == 0


def test_an_output_that_an_earlier_version_padded_is_continued(tmp_path):
    array = np.random.default_rng(0).integers(1, 256, SHAPE, dtype=np.uint8)
    write_volume(tmp_path / "in", array)
    padded = np.zeros((16, 32, 32), np.uint8)
    write_volume(tmp_path / "out", padded, format="ome_zarr", block_shape=(16, 16, 16))
    output = {"format": "ome_zarr", "pyramid": {"levels": 1}}
    roi = {"start": [0, 16, 16], "stop": [16, 32, 32]}
    assert main(["run", job_of(tmp_path, output=output, roi=roi)]) == 0
    bounds, values = written(tmp_path)
    assert bounds == BoundingBox((0, 0, 0), SHAPE)
    padded[:, 16:, 16:] = array[:, 16:, 16:]
    np.testing.assert_array_equal(values, padded)
    assert open_volume(str(tmp_path / "out"), scale=1).bounds.shape == (8, 16, 16)
