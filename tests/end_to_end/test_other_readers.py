"""cloud-volume and zarr-python read the outputs to the same arrays, regions of zeros included."""

import numpy as np
import pytest
from helpers import job_values, read_volume, write_job, write_volume

from beam_inference.cli import main


@pytest.fixture(params=["uint8", "float32"])
def done(request, tmp_path):
    """Runs a two-channel job whose input is zero in large regions, into a format; gives the array."""

    def run(format):
        array = np.random.default_rng(0).integers(0, 256, (2, 40, 64, 70), dtype=np.uint8)
        array[:, :20, :40] = 0  # whole blocks of zeros
        write_volume(tmp_path / "in", array, voxel_size_nm=(40.0, 8.0, 8.0))
        output = {"format": format, "dtype": request.param}
        if request.param == "uint8":
            output["value_range"] = [0, 255]
        values = job_values("in", "out", output=output, model={"input_channels": 2, "output_channels": 2})
        assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
        written = read_volume(tmp_path / "out")
        np.testing.assert_allclose(written, array, rtol=1e-6)
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


@pytest.mark.parametrize("format", ["zarr3", "zarr2"])
def test_zarr_python_reads_zarr(done, tmp_path, format):
    zarr = pytest.importorskip("zarr")
    written = done(format)
    array = zarr.open_array(str(tmp_path / "out"), mode="r")
    np.testing.assert_array_equal(array[:], written)
    assert array.metadata.zarr_format == int(format[-1])
