"""Test pyramids of the command: read by cloud-volume and zarr-python, and killed midway."""

import json
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from fakes.gcs import GcsStandIn
from fakes.s3 import KEYS, S3StandIn
from helpers import write_volume
from oracles.downsampling import level_above

from beam_inference.cli.main import main
from beam_inference.config.storage import Storage
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import plan_pyramid
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import LOCAL, storage_of_environment
from beam_inference.volumes.opening import open_volume


def image(shape, start=(0, 0, 0)):
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    array[:, : shape[1] // 2, :20] = 0  # whole blocks of zeros
    return array


def expected(array, start, factors, method="mean"):
    levels = [array]
    for factor in factors:
        levels.append(level_above(levels[-1], start, factor, method))
        start = tuple(a // f for a, f in zip(start, factor, strict=True))
    return levels


def test_cloud_volume_reads_each_mip(tmp_path, capsys):
    cloudvolume = pytest.importorskip("cloudvolume")
    array = image((3, 20, 45, 50))
    start = (3, -5, 2)
    write_volume(
        tmp_path / "v", array, start, block_shape=(16, 16, 16), voxel_size_nm=(40.0, 10.0, 10.0)
    )
    assert main(["pyramid", str(tmp_path / "v"), "--levels=3"]) == 0
    assert "3 of 3 chunks done" in capsys.readouterr().out
    levels = expected(array, start, [(1, 2, 2), (1, 2, 2), (2, 2, 2)])
    # Absent blocks raise unless fill_missing: so this also shows that blocks of zeros are there.
    sizes = [(10, 10, 40), (20, 20, 40), (40, 40, 40), (80, 80, 80)]
    for mip, (size, level) in enumerate(zip(sizes, levels, strict=True)):
        volume = cloudvolume.CloudVolume(
            f"file://{tmp_path}/v", mip=mip, fill_missing=False, progress=False
        )
        assert tuple(volume.resolution) == size
        np.testing.assert_array_equal(np.asarray(volume[:]).T, level)
    assert list(volume.voxel_offset) == [0, -1, 1]


@pytest.mark.parametrize(
    "format", ["ome_zarr", pytest.param("ome_zarr_0.4", marks=pytest.mark.slow)]
)
def test_zarr_python_reads_each_level(tmp_path, format):
    zarr = pytest.importorskip("zarr")
    array = image((2, 20, 45, 50))
    write_volume(
        tmp_path / "v",
        array,
        block_shape=(16, 16, 16),
        voxel_size_nm=(40.0, 10.0, 10.0),
        format=format,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that zarr v3 does not specify it
        zarr.consolidate_metadata(str(tmp_path / "v"))  # lists the finest array alone
    assert main(["pyramid", str(tmp_path / "v"), "--factor=1x2x3", "--levels=2"]) == 0
    group = zarr.open_group(str(tmp_path / "v"), mode="r")
    told = group.attrs.get("ome", group.attrs)["multiscales"][0]["datasets"]
    assert [each["path"] for each in told] == ["0", "1", "2"]
    transformations = [
        {t["type"]: t[t["type"]] for t in each["coordinateTransformations"]} for each in told
    ]
    assert [each["scale"] for each in transformations] == [
        [1, 40, 10, 10],
        [1, 40, 20, 30],
        [1, 40, 40, 90],
    ]
    # Of the first voxel's centre: the corners of all levels lie at minus half a voxel of the
    # finest.
    assert [each.get("translation") for each in transformations] == [
        None,
        [0, 0, 5, 10],
        [0, 0, 15, 40],
    ]
    for each, level in zip(told, expected(array, (0, 0, 0), [(1, 2, 3)] * 2), strict=True):
        np.testing.assert_array_equal(group[each["path"]][:], level)
    attributes = group["2"].attrs
    assert attributes["dimension_units"] == [None, "40 nm", "40 nm", "90 nm"]
    alone = open_volume(f"file://{tmp_path}/v/2")
    assert alone.voxel_size_nm == (40, 40, 90), "also when it is opened by itself"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gs", "s3"])
@pytest.mark.parametrize("format", ["precomputed", "ome_zarr"])
def test_in_an_object_store_that_fails_now_and_then(tmp_path, monkeypatch, kind, format):
    array = image((1, 20, 45, 50))
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    server = (GcsStandIn if kind == "gs" else S3StandIn)(["data"], fail_rate=0.05, latency=0.002)
    with server as store:
        variables = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
        monkeypatch.setenv(variables[kind], store.url)
        write_volume(tmp_path / "v", array, block_shape=(16, 16, 16), format=format)
        for path in (tmp_path / "v").rglob("*"):
            if path.is_file():
                key = f"v/{path.relative_to(tmp_path / 'v')}"
                if kind == "gs":
                    store.put("data", key, path.read_bytes())
                else:
                    store.client().put_object(Bucket="data", Key=key, Body=path.read_bytes())
        assert main(["pyramid", f"{kind}://data/v"]) == 0
        assert main(["pyramid", f"{kind}://data/v", "--overwrite", "--levels=3"]) == 0
        storage: Storage = storage_of_environment(LOCAL)
        levels = expected(array, (0, 0, 0), [(2, 2, 2)] * 3)
        assert len(volume_at(f"{kind}://data/v", storage).scales) == 4
        for scale, level in enumerate(levels):
            volume = open_volume(f"{kind}://data/v", scale=scale, storage=storage)
            np.testing.assert_array_equal(volume.read(volume.bounds), level)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_in_the_middle_then_finished(tmp_path):
    array = image((1, 88, 88, 88))
    urls = [
        write_volume(tmp_path / name, array, (1, 2, 3), block_shape=(8, 8, 8))
        for name in ("v", "undisturbed")
    ]
    script = (
        "import sys; from beam_inference.pyramid.pyramid import *\n"
        "from beam_inference.pyramid.multiscale import multiscale_volume\n"
        "from beam_inference.volumes.kvstores import LOCAL\n"
        "pyramid = plan_pyramid(multiscale_volume(sys.argv[1], LOCAL), chunk_bytes=1)\n"
        "sys.exit(run_pyramid(pyramid).outcome.exit_code)"
    )
    info = tmp_path / "v" / "info"
    for count in (40, 225):  # in the first level, and in the second, of 216 and 27 chunks
        with subprocess.Popen(
            [sys.executable, "-c", script, urls[0]], stderr=subprocess.DEVNULL
        ) as process:
            deadline = time.monotonic() + 200
            while len(list((tmp_path / "v" / "_beam_inference").rglob("done/*/*.json"))) < count:
                assert time.monotonic() < deadline
                assert process.poll() is None
                assert len(json.loads(info.read_text())["scales"]) == 1, (
                    "a reader sees no level before it is there"
                )
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    assert len(volume_at(urls[0]).scales) == 1
    subprocess.run([sys.executable, "-c", script, urls[0]], check=True)
    made = plan_pyramid(multiscale_volume(urls[1], LOCAL))  # in other chunks, without Beam
    for stage in made.stages:
        do = stage.make_worker()
        for index in range(stage.count):
            do(index)
    made.volume.list_scales(made.scales)
    scales = [len(volume_at(url).scales) for url in urls]
    assert scales[0] == scales[1] >= 4
    for scale in range(scales[0]):
        one, other = (open_volume(url, scale=scale) for url in urls)
        assert one.bounds == other.bounds
        np.testing.assert_array_equal(one.read(one.bounds), other.read(other.bounds))
