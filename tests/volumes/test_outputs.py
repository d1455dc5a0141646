"""New outputs, in every format, and existing ones that are continued."""

import json
import math
import shutil
import uuid
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.config.formats import OutputSpec
from beam_inference.errors import AlignmentError, ConfigError, VolumeError, WorkerFault
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.origin import NO_REST
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output, default_bounds, find_output, open_output
from beam_inference.volumes.sharding import shard_shapes

FORMATS = ["precomputed", "zarr3", "zarr2", "n5", "ome_zarr", "ome_zarr_0.4"]


def spec_of(tmp_path, **changes):
    values = {
        "url": f"file://{tmp_path}/out",
        "format": "precomputed",
        "dtype": "uint8",
        "channels": 3,
        "bounds": BoundingBox((0, 0, 0), (20, 20, 20)),
        "block_shape": (8, 8, 8),
        "voxel_size_nm": (40.0, 8.0, 8.0),
    }
    return OutputSpec(**values | changes)


@pytest.mark.parametrize("format", FORMATS)
def test_an_output_that_took_another_ones_place_states_its_own_voxel_size(tmp_path, format):
    """The first one is held open, as by a worker of an earlier job of the process."""
    spec = spec_of(tmp_path, format=format)
    first = create_output(spec)
    shutil.rmtree(tmp_path / "out")
    other = replace(spec, voxel_size_nm=(50.0, 9.0, 9.0))
    assert create_output(other).voxel_size_nm == (50.0, 9.0, 9.0)
    assert open_output(other).voxel_size_nm == (50.0, 9.0, 9.0)
    assert first.voxel_size_nm == (40.0, 8.0, 8.0)


def test_an_existing_output_is_reused_if_it_agrees(tmp_path):
    assert open_output(spec_of(tmp_path)) is None
    create_output(spec_of(tmp_path))
    assert open_output(spec_of(tmp_path)).bounds.stop == (20, 20, 20)
    smaller = spec_of(tmp_path, bounds=BoundingBox((0, 0, 0), (8, 8, 8)))
    assert find_output(smaller).bounds.stop == (20, 20, 20)
    with pytest.raises(VolumeError, match=r"has the bounds .*20\), and the job's has .*8\)"):
        open_output(smaller)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"channels": 1},
        {"block_shape": (16, 8, 8)},
        {"voxel_size_nm": (4.0, 4.0, 4.0)},
    ],
)
def test_an_existing_output_that_differs_is_refused_naming_what(tmp_path, changes):
    create_output(spec_of(tmp_path))
    with pytest.raises(VolumeError, match=f"differs from the job: {next(iter(changes))} is"):
        open_output(spec_of(tmp_path, **changes))


def test_an_existing_output_of_another_format_is_refused(tmp_path):
    create_output(spec_of(tmp_path))
    with pytest.raises(
        VolumeError, match="exists as neuroglancer_precomputed, the job says format: zarr3"
    ):
        open_output(spec_of(tmp_path, format="zarr3"))


@pytest.mark.parametrize("format", FORMATS)
def test_an_output_is_never_padded_unasked(format):
    box = BoundingBox((16, 0, 8), (32, 10, 20))
    at_zero = BoundingBox((0, 0, 0), (16, 10, 12))
    assert default_bounds(format, at_zero, "pad it") == at_zero
    if format in ("precomputed", "ome_zarr", "ome_zarr_0.4"):
        assert default_bounds(format, box, "pad it") == box
        return
    with pytest.raises(
        ConfigError,
        match=r"Write one of ome_zarr, ome_zarr_0.4, precomputed, which do; or pad it, so that "
        r"\[0, 0, 0 to 32, 10, 20\) is written, of which these voxels are 30 %",
    ):
        default_bounds(format, box, "pad it")
    with pytest.raises(ConfigError, match=r"precomputed, which do\.$"):
        default_bounds(format, box.translate((-20, 0, 0)), "pad it")


@pytest.mark.parametrize("format", ["precomputed", "ome_zarr", "ome_zarr_0.4"])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_an_output_lies_where_it_was_written_and_is_found_there(format, data):
    start = data.draw(st.tuples(*[st.integers(-(2**31), 2**31)] * 3), "start")
    shape = data.draw(st.tuples(*[st.integers(1, 20)] * 3), "shape")
    size = data.draw(st.tuples(*[st.floats(1e-3, 1e6)] * 3), "voxel size")
    box = BoundingBox(start, zyx.add(start, shape))
    url = f"memory://{uuid.uuid4().hex}/out"
    spec = spec_of("", url=url, format=format, bounds=box, voxel_size_nm=size)
    array = random("uint8", (3, *shape))
    create_output(spec).write(box, array)
    for volume in (open_volume(url), open_output(spec)):
        assert (volume.bounds, volume.origin.rest) == (box, NO_REST)
        assert volume.voxel_size_nm == pytest.approx(size, rel=1e-5)  # as TensorStore prints units
        np.testing.assert_array_equal(volume.read(box), array)
    assert open_volume(url).voxel_size_nm == size


def test_precomputed_says_what_neuroglancer_needs(tmp_path):
    create_output(spec_of(tmp_path, bounds=BoundingBox((3, 2, 1), (20, 20, 20))))
    info = json.loads((tmp_path / "out" / "info").read_text())
    scale = info["scales"][0]
    assert (info["type"], info["data_type"], info["num_channels"]) == ("image", "uint8", 3)
    assert (scale["voxel_offset"], scale["size"], scale["resolution"]) == (
        [1, 2, 3],
        [19, 18, 17],
        [8, 8, 40],
    )


def jpeg_output(tmp_path):
    create_output(spec_of(tmp_path))
    info = json.loads((tmp_path / "out" / "info").read_text())
    info["scales"][0]["encoding"] = "jpeg"
    (tmp_path / "out" / "info").write_text(json.dumps(info))


def test_an_existing_lossy_output_is_refused(tmp_path):
    jpeg_output(tmp_path)
    with pytest.raises(VolumeError, match="encoding is jpeg, the job says raw"):
        open_output(spec_of(tmp_path))


def test_a_zarr2_output_interrupted_before_the_array_was_made_is_no_volume_yet(tmp_path):
    spec = spec_of(tmp_path, format="zarr2")
    create_output(spec)
    (tmp_path / "out" / ".zarray").unlink()
    assert open_output(spec) is None
    assert create_output(spec).voxel_size_nm == (40, 8, 8)


def random(dtype, shape, seed=0):
    values = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint64)
    return (values << np.uint64(31) if dtype == "uint64" else values % 250).astype(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "uint64"])
def test_every_format_reads_back_what_was_written(tmp_path, format, dtype):
    spec = spec_of(tmp_path, format=format, dtype=dtype)
    volume = create_output(spec)
    array = random(dtype, (3, 20, 20, 20))
    volume.write(spec.bounds, array)
    found = open_volume(spec.url)
    np.testing.assert_array_equal(found.read(found.bounds), array)
    assert (found.bounds, found.voxel_size_nm, found.block_shape) == (
        spec.bounds,
        (40, 8, 8),
        (8, 8, 8),
    )
    assert open_output(spec) is not None


@pytest.mark.parametrize("format", FORMATS)
def test_racing_launches_create_one_output(tmp_path, format):
    spec = spec_of(tmp_path, format=format)
    create_output(spec).write(BoundingBox((0, 0, 0), (8, 8, 8)), np.ones((3, 8, 8, 8), np.uint8))
    assert create_output(spec).read(BoundingBox((0, 0, 0), (8, 8, 8))).all()


def test_a_damaged_shard_that_is_to_be_written_in_part_is_told(tmp_path):
    spec = spec_of(tmp_path, format="zarr3", dtype="uint8", channels=1, shard_shape=(16, 16, 16))
    volume = create_output(spec)
    array = np.ones((1, *spec.bounds.shape), np.uint8)
    volume.write(spec.bounds, array)
    shards = (tmp_path / "out" / "c").rglob("0")
    (shard,) = (path for path in shards if path.parts[-3:-1] == ("1", "0"))
    shard.write_bytes(b"")
    with pytest.raises(WorkerFault, match=r"1/0/0.*damaged.*remove this file"):
        volume.write(spec.bounds, array)
    shard.unlink()
    volume.write(spec.bounds, array)
    np.testing.assert_array_equal(volume.read(spec.bounds), array)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
@pytest.mark.parametrize("shard_shape", [None, (16, 16, 16)])
def test_labels_are_compressed(tmp_path, dtype, shard_shape):
    spec = spec_of(
        tmp_path,
        dtype=dtype,
        channels=1,
        labels=True,
        encoding="compressed_segmentation",
        shard_shape=shard_shape,
    )
    array = random(dtype, (1, 20, 20, 20)) // 2**30
    create_output(spec).write(spec.bounds, array)
    found = open_output(spec)
    np.testing.assert_array_equal(found.read(spec.bounds), array)
    assert json.loads((tmp_path / "out" / "info").read_text())["type"] == "segmentation"
    assert found.block_shape == (shard_shape or (8, 8, 8))


@pytest.mark.parametrize("format", ["precomputed", "zarr3", "ome_zarr"])
def test_a_shard_is_one_file_and_the_unit_of_writing(tmp_path, format):
    spec = spec_of(
        tmp_path,
        format=format,
        bounds=BoundingBox((0, 0, 0), (32, 30, 60)),
        shard_shape=(16, 16, 16),
        channels=1,
    )
    volume = create_output(spec)
    array = random("uint8", (1, 32, 30, 60))
    assert volume.block_shape == spec.write_shape == (16, 16, 16)
    for z in (0, 16):
        for y in (0, 16):
            for x in range(0, 60, 16):
                box = BoundingBox((z, y, x), (z + 16, min(y + 16, 30), min(x + 16, 60)))
                volume.write(box, array[(slice(None), *box.slices_in(spec.bounds))])
    np.testing.assert_array_equal(open_volume(spec.url).read(spec.bounds), array)
    files = [
        p
        for p in (tmp_path / "out").rglob("*")
        if p.is_file() and p.name not in ("info", "zarr.json")
    ]
    assert len(files) == 2 * 2 * 4
    with pytest.raises(VolumeError, match=r"shard_shape is \[16, 16, 16\], the job says None"):
        open_output(spec_of(tmp_path, format=format, bounds=spec.bounds, channels=1))


def test_shards_that_cannot_be_had_are_refused_with_those_that_can(tmp_path):
    with pytest.raises(
        AlignmentError, match=r"Nearest: \[8, 16, 16\] or \[16, 16, 16\] or \[16, 16, 32\]"
    ):
        create_output(
            spec_of(tmp_path, bounds=BoundingBox((0, 0, 0), (64, 64, 64)), shard_shape=(8, 16, 32))
        )
    assert not (tmp_path / "out").exists()


def test_what_an_ome_zarr_group_says(tmp_path):
    create_output(spec_of(tmp_path, format="ome_zarr"))
    group = json.loads((tmp_path / "out" / "zarr.json").read_text())
    (image,) = group["attributes"]["ome"]["multiscales"]
    assert (group["node_type"], group["attributes"]["ome"]["version"]) == ("group", "0.5")
    assert [axis["name"] for axis in image["axes"]] == ["c", "z", "y", "x"]
    assert {axis.get("unit") for axis in image["axes"][1:]} == {"nanometer"}
    scale = [{"type": "scale", "scale": [1, 40, 8, 8]}]
    assert image["datasets"] == [{"path": "0", "coordinateTransformations": scale}]
    create_output(spec_of(tmp_path / "4", format="ome_zarr_0.4"))
    old = json.loads((tmp_path / "4" / "out" / ".zattrs").read_text())
    assert old["multiscales"][0]["version"] == "0.4"
    assert json.loads((tmp_path / "4" / "out" / ".zgroup").read_text()) == {"zarr_format": 2}


def test_a_group_interrupted_before_it_was_made_is_no_volume_yet(tmp_path):
    spec = spec_of(tmp_path, format="ome_zarr")
    create_output(spec)
    (tmp_path / "out" / "zarr.json").unlink()
    assert open_output(spec) is None
    create_output(spec)
    assert open_output(spec) is not None


def test_objects_of_a_sharded_output_are_as_many_as_its_shards(tmp_path):
    spec = spec_of(
        tmp_path, bounds=BoundingBox((3, 5, 7), (67, 69, 71)), channels=1, shard_shape=(32, 32, 32)
    )
    volume = create_output(spec)
    array = random("uint8", (1, 64, 64, 64))
    volume.write(spec.bounds, array)
    assert len(list((tmp_path / "out").rglob("*.shard"))) == math.prod(
        n // 32 for n in spec.bounds.shape
    )
    np.testing.assert_array_equal(open_volume(spec.url).read(spec.bounds), array)


@pytest.mark.parametrize(
    ("shape", "offset"),
    [((32, 32, 32), (0, 0, 0)), ((13, 40, 27), (3, -5, 7)), ((8, 9, 70), (0, 1, 0))],
)
def test_shards_are_overwritten_also_with_nothing_but_zeros(tmp_path, shape, offset):
    """TensorStore leaves a shard as it was if all that is written there is zero."""
    bounds = BoundingBox(offset, tuple(a + n for a, n in zip(offset, shape, strict=True)))
    for number, shard_shape in enumerate(shard_shapes(shape, (8, 8, 8))):
        spec = spec_of(tmp_path / str(number), bounds=bounds, channels=1, shard_shape=shard_shape)
        create_output(spec).write(bounds, random("uint8", (1, *shape)) | 1)
        grid = ChunkGrid(bounds, shard_shape)
        for index in range(0, grid.count, 2):
            box = grid.core_box(index)
            open_output(spec).write(box, np.zeros((1, *box.shape), np.uint8))
        found = open_volume(spec.url)
        for index in range(grid.count):
            assert found.read(grid.core_box(index)).any() == bool(index % 2)


@given(st.tuples(*[st.integers(1, 40)] * 3), st.data())
@settings(max_examples=25, deadline=None)
def test_sharded_outputs_of_any_size_are_found_again(tmp_path_factory, shape, data):
    shard_shape = data.draw(st.sampled_from(shard_shapes(shape, (8, 8, 8))))
    folder = tmp_path_factory.mktemp("shards")
    spec = spec_of(
        folder, bounds=BoundingBox((0, 0, 0), shape), channels=1, shard_shape=shard_shape
    )
    create_output(spec)
    assert open_output(spec) is not None


@pytest.mark.parametrize("format", FORMATS)
def test_an_output_of_one_channel_has_no_axis_of_channels(tmp_path, format):
    array = random("uint8", (1, 20, 20, 20))
    spec = spec_of(tmp_path, format=format, channels=1)
    create_output(spec).write(spec.bounds, array)
    for volume in (open_volume(spec.url), open_output(spec)):
        np.testing.assert_array_equal(volume.read(spec.bounds), array)
        assert volume.voxel_size_nm == (40, 8, 8)
        assert volume.has_channel_axis == (format == "precomputed")
    if format != "precomputed":
        with pytest.raises(VolumeError, match="channel_axis is auto, the job says always"):
            open_output(spec_of(tmp_path, format=format, channels=1, channel_axis="always"))


@pytest.mark.parametrize("format", FORMATS)
def test_an_output_that_has_an_axis_of_one_channel_keeps_it(tmp_path, format):
    array = random("uint8", (1, 20, 20, 20))
    begun = spec_of(tmp_path, format=format, channels=1, channel_axis="always")
    create_output(begun)
    volume = open_output(spec_of(tmp_path, format=format, channels=1))
    volume.write(begun.bounds, array)
    assert volume.has_channel_axis
    np.testing.assert_array_equal(open_output(begun).read(begun.bounds), array)


def test_arrays_of_one_channel_name_their_axes(tmp_path):
    for format in FORMATS:
        create_output(spec_of(tmp_path / format, format=format, channels=1))
    v3 = json.loads((tmp_path / "zarr3/out/zarr.json").read_text())
    assert (v3["shape"], v3["dimension_names"]) == ([20, 20, 20], ["z", "y", "x"])
    v2 = json.loads((tmp_path / "zarr2/out/.zattrs").read_text())
    assert v2["_ARRAY_DIMENSIONS"] == ["z", "y", "x"]
    assert v2["dimension_units"] == ["40 nm", "8 nm", "8 nm"]
    n5 = json.loads((tmp_path / "n5/out/attributes.json").read_text())
    assert (n5["axes"], n5["units"]) == (["x", "y", "z"], ["nm", "nm", "nm"])
    assert n5["resolution"] == [8, 8, 40]
    group = json.loads((tmp_path / "ome_zarr/out/zarr.json").read_text())
    (image,) = group["attributes"]["ome"]["multiscales"]
    assert [axis["name"] for axis in image["axes"]] == ["z", "y", "x"]
    (scale,) = image["datasets"][0]["coordinateTransformations"]
    assert scale["scale"] == [40, 8, 8]


@pytest.mark.parametrize(
    ("format", "shard_shape"),
    [
        *((format, None) for format in FORMATS if format != "precomputed"),
        ("zarr3", (16, 16, 16)),
    ],
)
def test_floating_point_numbers_are_shuffled_and_compressed(tmp_path, format, shard_shape):
    spec = spec_of(
        tmp_path,
        format=format,
        dtype="float32",
        bounds=BoundingBox((0, 0, 0), (32, 32, 32)),
        shard_shape=shard_shape,
    )
    array = np.linspace(0, 1, 3 * 32**3, dtype=np.float32).reshape(3, 32, 32, 32)
    create_output(spec).write(spec.bounds, array)
    np.testing.assert_array_equal(open_volume(spec.url).read(spec.bounds), array)
    codec = json.dumps(open_output(spec).store.codec.to_json())
    assert "blosc" in codec
    assert "zstd" in codec
    files = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    assert sum(each.stat().st_size for each in files) < 0.6 * array.nbytes
