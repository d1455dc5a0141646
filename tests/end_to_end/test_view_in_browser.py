"""What Neuroglancer shows is what is stored, voxel by voxel; skipped where there is no Chromium."""

import numpy as np
import pytest
import tensorstore as ts
from browser import chromium, microscope, served
from helpers import write_volume
from neuroglancer.segment_colors import hex_string_from_segment_id

from beam_inference.view.shown import view_of

SHAPE = (20, 40, 50)
SIZE_NM = (40.0, 8.0, 4.0)
POSITIONS = [(0, 0, 0), (19, 39, 49), (7, 33, 20), (15, 3, 48)]


@pytest.fixture(scope="module")
def page():
    with chromium() as page:
        yield page


def random(dtype="uint8", shape=SHAPE):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=dtype)


def write(folder, array, spec):
    """Write (z, y, x) or (c, z, y, x) by a TensorStore spec of a store with these axes, or, precomputed, xyzc."""
    spec = {**spec, "kvstore": {"driver": "file", "path": str(folder)}, "create": True}
    array = array if spec["driver"] != "neuroglancer_precomputed" else array.reshape(-1, *SHAPE).transpose(3, 2, 1, 0)
    store = ts.open(spec, dtype=array.dtype, shape=None if "scale_metadata" in spec else array.shape).result()
    store.write(array).result()
    return f"file://{folder}"


def precomputed(**scale):
    scale = {"size": SHAPE[::-1], "resolution": SIZE_NM[::-1], "chunk_size": [16, 16, 16], "encoding": "raw", **scale}
    return {"driver": "neuroglancer_precomputed", "scale_metadata": scale, "multiscale_metadata": {"num_channels": 1}}


SHARDED = {
    "@type": "neuroglancer_uint64_sharded_v1",
    **{"preshift_bits": 1, "minishard_bits": 2, "shard_bits": 1, "hash": "identity"},
    **{"minishard_index_encoding": "gzip", "data_encoding": "gzip"},
}
UNITS = {"dimension_units": [f"{size} nm" for size in SIZE_NM]}
NAMED = {"dimension_names": ["z", "y", "x"]}
SPECS = {
    "raw": precomputed(),
    "sharded": precomputed(sharding=SHARDED),
    "zarr3": {"driver": "zarr3", "metadata": NAMED, "schema": UNITS},
    "zarr3 sharded": {
        "driver": "zarr3",
        "metadata": NAMED,
        "schema": {
            **UNITS,
            "chunk_layout": {"read_chunk": {"shape": [8, 8, 8]}, "write_chunk": {"shape": [16, 16, 16]}},
        },
    },
    "zarr2, no names, no units": {"driver": "zarr", "metadata": {"chunks": [8, 16, 16]}},
    "n5": {"driver": "n5", "metadata": {"blockSize": [16, 8, 8], "compression": {"type": "gzip"}}},
}


def shown(page, *urls):
    """Open volumes as the command does; the state, with which they are looked at closely."""
    view = view_of(None, urls, patches=False)
    url = served(view.folders, lambda base: microscope(view.state(base, 100)))
    return view, url


@pytest.mark.parametrize(
    "kind", [kind if kind == "zarr3 sharded" else pytest.param(kind, marks=pytest.mark.slow) for kind in SPECS]
)
def test_the_pixel_in_the_middle_is_the_voxel(page, tmp_path, kind):
    array = random()
    stored = array.T if kind == "n5" else array  # n5 lists its axes x first
    view, viewer = shown(page, write(tmp_path / "volume", stored, SPECS[kind]))
    with viewer as url:
        page.open(url)
        assert [page.center(position) for position in POSITIONS] == [(array[p],) * 3 for p in POSITIONS]
        assert page.complaints() == []
        assert page.layer_errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("format", ["precomputed", "zarr3", "zarr2"])
def test_three_channels_are_red_green_and_blue(page, tmp_path, format):
    array = random(shape=(3, *SHAPE))
    view, viewer = shown(page, write_volume(tmp_path / "volume", array, voxel_size_nm=SIZE_NM, format=format))
    with viewer as url:
        page.open(url)
        assert [page.center((z, y, x)) for z, y, x in POSITIONS] == [tuple(array[:, z, y, x]) for z, y, x in POSITIONS]
        assert (page.complaints(), page.layer_errors()) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["precomputed", "compressed", "zarr3"])
def test_a_label_has_the_colour_of_its_id(page, tmp_path, kind):
    array = random("uint64") + np.uint64(2**40) * random("uint64", SHAPE)
    spec = dict(SPECS["zarr3"]) if kind == "zarr3" else precomputed()
    if kind != "zarr3":
        spec["multiscale_metadata"] = {"num_channels": 1, "type": "segmentation"}
    if kind == "compressed":
        block = {"compressed_segmentation_block_size": [8, 8, 8]}
        spec["scale_metadata"] |= {"encoding": "compressed_segmentation", **block}
    view, viewer = shown(page, write(tmp_path / "labels", array, spec))
    assert view.shown[0].shader is None
    with viewer as url:
        page.open(url)
        colors = [hex_string_from_segment_id(0, int(array[p])) for p in POSITIONS]
        assert [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in map(page.center, POSITIONS)] == colors
        assert (page.complaints(), page.layer_errors()) == ([], [])
