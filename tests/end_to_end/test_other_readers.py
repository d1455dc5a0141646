"""cloud-volume and zarr-python read the outputs to the same arrays, regions of zeros included."""

import numpy as np
import pytest
from helpers import OF_RANGE, job_values, read_volume, write_job, write_volume

from beam_inference.cli.main import main
from beam_inference.launch.cost import job_totals
from beam_inference.launch.job_files import load_job
from beam_inference.launch.planned_job import plan_job


@pytest.fixture(params=["uint8", "float32"])
def done(request, tmp_path):
    """Run a two-channel job whose input is zero in large regions; return the output's voxels."""

    def run(format, **settings):
        array = np.random.default_rng(0).integers(0, 256, (2, 40, 64, 70), dtype=np.uint8)
        array[:, :20, :40] = 0  # whole blocks of zeros
        write_volume(tmp_path / "in", array, voxel_size_nm=(40.0, 8.0, 8.0))
        output = {"format": format, "dtype": request.param, **settings}
        if request.param == "uint8":
            output["value_range"] = [0, 255]
        values = job_values(
            "in", "out", output=output, model={"input_channels": 2, "output_channels": 2}
        )
        assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
        written = read_volume(tmp_path / "out")
        np.testing.assert_allclose(written, array, rtol=0, atol=OF_RANGE)
        assert not written[:, :16, :32].any()
        return written

    return run


def test_cloud_volume_reads_precomputed(done, tmp_path):
    cloudvolume = pytest.importorskip("cloudvolume")
    written = done("precomputed")
    # Absent blocks raise unless fill_missing: so this also shows that blocks of zeros are there.
    volume = cloudvolume.CloudVolume(f"file://{tmp_path}/out", fill_missing=False, progress=False)
    np.testing.assert_array_equal(np.asarray(volume[:]).T, written)
    assert tuple(volume.resolution) == (8, 8, 40)
    (step,) = volume.provenance.processing
    assert step["method"]["task"] == "beam-inference run"
    assert volume.provenance.sources == ["../in"]


SHARDS = {"block_shape": [8, 8, 8], "shard_shape": [16, 16, 16]}


def files(folder, *names):
    """Objects of the output, without what describes it."""
    return [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.name not in names and "_beam_inference" not in p.parts
    ]


def test_cloud_volume_reads_shards(done, tmp_path):
    cloudvolume = pytest.importorskip("cloudvolume")
    written = done("precomputed", **SHARDS)
    # Shards hold what is zero throughout, too: absent ones raise unless fill_missing.
    volume = cloudvolume.CloudVolume(f"file://{tmp_path}/out", fill_missing=False, progress=False)
    np.testing.assert_array_equal(np.asarray(volume[:]).T, written)
    shards = files(tmp_path / "out", "info", "provenance")
    assert len(shards) == planned_blocks(tmp_path) == 3 * 4 * 5


def test_zarr_python_reads_shards(done, tmp_path):
    zarr = pytest.importorskip("zarr")
    written = done("zarr3", **SHARDS)
    array = zarr.open_array(str(tmp_path / "out"), mode="r")
    np.testing.assert_array_equal(array[:], written)
    assert (array.shards, array.chunks) == ((2, 16, 16, 16), (2, 8, 8, 8))
    assert len(files(tmp_path / "out", "zarr.json")) == planned_blocks(tmp_path) == 3 * 4 * 5


def planned_blocks(tmp_path):
    """Without receipts."""
    job = plan_job(load_job(tmp_path / "job.yaml"))
    return job_totals(job).write_requests - job.plan.chunks.count - job.plan.totals.owners


@pytest.mark.parametrize("format", ["ome_zarr", "ome_zarr_0.4"])
def test_zarr_python_reads_ome_zarr(done, tmp_path, format):
    zarr = pytest.importorskip("zarr")
    written = done(format)
    group = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert group.metadata.zarr_format == (2 if format == "ome_zarr_0.4" else 3)
    image = group.attrs.get("ome", group.attrs)["multiscales"][0]
    np.testing.assert_array_equal(group[image["datasets"][0]["path"]][:], written)
    assert image["datasets"][0]["coordinateTransformations"][0]["scale"] == [1, 40, 8, 8]
    assert group.attrs["beam_inference"][0]["sources"] == ["../in"]


@pytest.mark.parametrize("encoding", ["png", "jpeg"])
def test_what_receipts_say_of_a_lossy_output_is_what_reads_back(volume_in, tmp_path, encoding):
    cloudvolume = pytest.importorskip("cloudvolume")
    PIL = pytest.importorskip("PIL.Image")
    output = {"dtype": "uint8", "value_range": [0, 255], "encoding": encoding}
    job = str(
        write_job(tmp_path / "job.yaml", job_values(volume_in, tmp_path / "out", output=output))
    )
    assert main(["run", job]) == 0
    assert main(["verify", job, "--deep"]) == 0
    exact = read_volume(volume_in)
    written = read_volume(tmp_path / "out")
    assert (written == exact).all() == (encoding == "png")
    if encoding == "jpeg":
        volume = cloudvolume.CloudVolume(
            f"file://{tmp_path}/out", fill_missing=False, progress=False
        )
        # decoders may round differently
        assert np.abs(np.asarray(volume[:]).T.astype(int) - written).max() <= 1
    else:
        with PIL.open(next(iter(files(tmp_path / "out", "info", "provenance")))) as image:
            assert (image.format, image.mode) == ("PNG", "L")
    block = next(path for path in files(tmp_path / "out", "info", "provenance"))
    other = next(
        path
        for path in files(tmp_path / "out", "info", "provenance")
        if path.stat().st_size != block.stat().st_size
    )
    other.write_bytes(block.read_bytes())
    assert main(["verify", job, "--deep"]) == 1


@pytest.mark.parametrize("format", ["zarr3", "zarr2"])
def test_zarr_python_reads_zarr(done, tmp_path, format):
    zarr = pytest.importorskip("zarr")
    written = done(format)
    array = zarr.open_array(str(tmp_path / "out"), mode="r")
    np.testing.assert_array_equal(array[:], written)
    assert array.metadata.zarr_format == int(format[-1])
    assert array.attrs["beam_inference"][0]["sources"] == ["../in"]
