"""Test that views of stored arrays have the axes, voxel sizes, offsets and values they should."""

import gzip
import json
import os

import numpy as np
import pytest
import tensorstore as ts
from helpers import job_values, read_volume, write_job
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from beam_inference.cli.main import main
from beam_inference.config.formats import OutputSpec
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import PermanentReadError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_source, open_volume
from beam_inference.volumes.outputs import create_output

ARRAY = np.random.default_rng(0).integers(0, 255, (12, 20, 30), np.uint8)
SIZE = (40.0, 4.0, 8.0)
DRIVERS = {
    "precomputed": "neuroglancer_precomputed",
    "zarr3": "zarr3",
    "zarr2": "zarr",
    "n5": "n5",
}
FLOATS = {"driver": "cast", "dtype": "float32"}


def stored(folder, format, start=(0, 0, 0)):
    """TensorStore's spec of a stored volume of blocks of 4 × 8 × 8."""
    volume = create_output(
        OutputSpec(
            url=f"file://{folder}/{format}",
            format=format,
            dtype="uint8",
            channels=1,
            bounds=BoundingBox(start, zyx.add(start, ARRAY.shape)),
            block_shape=(4, 8, 8),
            voxel_size_nm=SIZE,
        )
    )
    volume.write(volume.bounds, ARRAY[None])
    return {"driver": DRIVERS[format], "kvstore": f"file://{folder}/{format}/"}


def axis_of(store, letter):
    """The number of an axis of a stored array, which has names or does not."""
    labels = [dimension.label for dimension in store.domain]
    return labels.index(letter) if any(labels) else "zyx".index(letter)


def coarser(spec, **factors):
    """A view that is downsampled along some axes."""
    store = ts.open(spec, open=True, read=True).result()
    of_axes = [1] * store.rank
    for letter, factor in factors.items():
        of_axes[axis_of(store, letter)] = factor
    return {
        "driver": "downsample",
        "downsample_factors": of_axes,
        "downsample_method": "mean",
        "base": spec,
    }


def changed(spec, change):
    """A view that is made by indexing; ``change`` is given the array and a function for axes."""
    store = ts.open(spec, open=True, read=True).result()
    return change(store, lambda letter: ts.d[axis_of(store, letter)]).spec().to_json()


def opened(spec):
    volume = open_source(VolumeSource(None, spec))
    return volume, volume.read(volume.bounds)[0]


@pytest.mark.parametrize("format", DRIVERS)
def test_views_of_each_format(tmp_path, format):
    spec = stored(tmp_path, format)
    volume, voxels = opened(FLOATS | {"base": spec})
    assert (volume.voxel_size_nm, volume.dtype, volume.bounds.shape) == (SIZE, "f4", (12, 20, 30))
    np.testing.assert_array_equal(voxels, ARRAY.astype(np.float32))

    half = FLOATS | {"base": coarser(FLOATS | {"base": spec}, y=2, x=2)}
    volume, voxels = opened(half)
    assert (volume.voxel_size_nm, volume.bounds.shape) == ((40, 8, 16), (12, 10, 15))
    mean = ARRAY.reshape(12, 10, 2, 15, 2).mean((2, 4), dtype=np.float32)
    np.testing.assert_allclose(voxels, mean, rtol=1e-6)

    def crop(store, axis):
        return store[axis("z")[2:10:2]][axis("y").translate_by[100]]

    volume, voxels = opened(FLOATS | {"base": changed(spec, crop)})
    assert volume.voxel_size_nm == (80, 4, 8)
    assert volume.bounds == BoundingBox((1, 100, 0), (5, 120, 30))
    np.testing.assert_array_equal(voxels, ARRAY[2:10:2])

    volume, voxels = opened(changed(spec, lambda store, _: store[ts.d[:].transpose[::-1]]))
    assert volume.voxel_size_nm == SIZE
    np.testing.assert_array_equal(voxels, ARRAY)

    volume, voxels = opened(changed(spec, lambda store, axis: store[axis("x")[::-1]]))
    assert volume.bounds.start == (0, 0, -29)
    np.testing.assert_array_equal(voxels, ARRAY[..., ::-1])


def test_offsets_of_a_view(tmp_path):
    spec = stored(tmp_path, "precomputed", (4, -6, 8))
    volume, _ = opened(coarser(spec, z=2, y=2, x=2))
    assert volume.bounds == BoundingBox((2, -3, 4), (8, 7, 19))
    assert volume.voxel_size_nm == (80, 8, 16)


def test_axes_without_names_keep_their_order(tmp_path):
    kvstore = f"file://{tmp_path}/n5/"
    metadata = {"dimensions": [30, 20, 12], "blockSize": [8, 8, 4], "dataType": "uint8"}
    spec = {"driver": "n5", "kvstore": kvstore}
    plain = ts.open(
        spec | {"metadata": metadata | {"compression": {"type": "raw"}}}, create=True
    ).result()
    plain.write(ARRAY.T).result()
    for each in (spec, FLOATS | {"base": spec}):
        np.testing.assert_array_equal(opened(each)[1], ARRAY)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("crop"), st.sampled_from("zyx"), st.integers(0, 3), st.integers(1, 3)),
        st.tuples(st.just("move"), st.sampled_from("zyx"), st.integers(-9, 9)),
        st.tuples(st.just("turn"), st.permutations([0, 1, 2])),
        st.tuples(st.just("coarser"), st.sampled_from("zyx"), st.integers(1, 3)),
        st.tuples(st.just("cast"), st.sampled_from(["float32", "int16"])),
    ),
    max_size=5,
)


def follow(store, names, step):
    """One step of a view, of an array whose axes have the names."""
    kind, *values = step
    if kind == "cast":
        return ts.cast(store, ts.dtype(values[0])), names
    if kind == "turn":
        return store[ts.d[values[0]].transpose[0, 1, 2]], [names[axis] for axis in values[0]]
    axis = names.index(values[0])
    if kind == "crop":
        start = store.domain[axis].inclusive_min + min(values[1], store.domain[axis].size - 1)
        return store[ts.d[axis][start :: values[2]]], names
    if kind == "move":
        return store[ts.d[axis].translate_by[values[1]]], names
    factors = [values[1] if name == values[0] else 1 for name in names]
    return ts.downsample(store, factors, "mean"), names


@pytest.fixture(scope="module")
def two_formats(tmp_path_factory):
    """Equal volumes: zarr v3 states names and units itself, of v2 they are tracked here."""
    folder = tmp_path_factory.mktemp("views")
    return [stored(folder, format) for format in ("zarr3", "zarr2")]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_any_view_of_zarr_v2_is_that_of_v3(two_formats, given_steps):
    found = []
    for spec in two_formats:
        store = ts.open(spec, open=True, read=True).result()
        names = list("zyx")
        for step in given_steps:
            store, names = follow(store, names, step)
        volume, voxels = opened(store.spec().to_json())
        found.append((volume.bounds, volume.voxel_size_nm, volume.dtype, voxels.tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("format", DRIVERS)
def test_a_block_that_would_read_as_zeros_is_noticed_in_a_view(tmp_path, format):
    spec = stored(tmp_path, format)
    view = changed(coarser(spec, z=2, y=2), lambda store, axis: store[axis("x").translate_by[50]])
    volume, _ = opened(view)
    last = {
        "precomputed": "8_4_40/24-30_16-20_8-12",
        "zarr3": "c/2/2/3",
        "zarr2": "2/2/3",
        "n5": "3/2/2",
    }[format]
    block = tmp_path / format / last
    assert block.is_file()
    block.unlink()
    block.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PermanentReadError, match="a link that leads nowhere"):
        volume.read(BoundingBox((5, 9, 79), (6, 10, 80)))
    volume.read(BoundingBox((0, 0, 50), (4, 8, 74)))


def test_views_of_packed_blocks(tmp_path):
    spec = stored(tmp_path, "precomputed")
    view = FLOATS | {"base": coarser(FLOATS | {"base": spec}, y=2, x=2)}
    view = changed(view, lambda store, axis: store[axis("z")[1:9:3]])
    expected, voxels = opened(view)
    for block in (tmp_path / "precomputed" / "8_4_40").iterdir():
        os.rename(block, f"{block}.gz")
        with open(f"{block}.gz", "r+b") as file:
            content = file.read()
            file.seek(0)
            file.write(gzip.compress(content))
            file.truncate()
    packed, unpacked = opened(view)
    assert type(packed).__name__ == "PackedVolume"
    np.testing.assert_array_equal(unpacked, voxels)
    assert (packed.bounds, packed.voxel_size_nm) == (expected.bounds, expected.voxel_size_nm)
    assert packed.has_channel_axis


@pytest.mark.parametrize("format", ["zarr3", "zarr2", "ome_zarr"])
def test_a_job_of_a_view_writes_its_axes_voxel_size_and_offset(tmp_path, format):
    def change(store, axis):
        return store[axis("z")[4:]][ts.d[:].transpose[::-1]]

    view = coarser(changed(stored(tmp_path, "zarr2"), change), y=2)
    # labels of the view are lost to TensorStore: zarr v2 keeps them in attributes
    view["downsample_factors"] = [1, 2, 1]
    bounds = {"start": [0, 0, 0], "stop": [12, 10, 30]}
    values = job_values(
        None,
        tmp_path / "out",
        input={"path": None, "spec": view},
        model={"path": "identity"},
        output={"format": format, "block_shape": [4, 16, 16], "bounds": bounds, "dtype": "uint8"}
        | {"value_range": [0, 255]},
        inference={
            "patch_shape": [4, 5, 10],
            "patch_overlap": [0, 0, 0],
            "chunk_shape": [8, 16, 16],
        },
    )
    assert main(["run", str(write_job(tmp_path / "job.yaml", values))]) == 0
    volume = open_volume(str(tmp_path / "out"))
    assert volume.voxel_size_nm == (40, 8, 8)
    mean = np.rint(ARRAY.reshape(12, 10, 2, 30).mean(2)[4:])
    np.testing.assert_allclose(read_volume(tmp_path / "out")[0, 4:], mean, atol=0.51)
    assert not read_volume(tmp_path / "out")[0, :4].any()
    place = tmp_path / "out" / ("0" if format == "ome_zarr" else "")
    if format == "zarr2":
        names = json.loads((place / ".zattrs").read_text())["_ARRAY_DIMENSIONS"]
    else:
        names = json.loads((place / "zarr.json").read_text())["dimension_names"]
    assert names == ["z", "y", "x"]
