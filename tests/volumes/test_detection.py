"""What lies at a URL, at which scales, and which of them is read."""

import json

import numpy as np
import pytest
import tensorstore as ts
from helpers import write_volume

from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.opening import open_volume

FINE = np.random.default_rng(0).integers(0, 256, (1, 16, 32, 32), dtype=np.uint8)
COARSE = FINE[:, :, ::2, ::2]


def precomputed(folder):
    """A volume of two scales, as TensorStore adds one."""
    url = write_volume(folder, FINE, voxel_size_nm=(40.0, 8.0, 8.0))
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"{url}/",
        "scale_metadata": {
            "size": [16, 16, 16],
            "resolution": [16, 16, 40],
            "chunk_size": [16, 16, 16],
            "encoding": "raw",
        },
    }
    ts.open(spec, create=True).result().write(COARSE.T).result()
    return url


def ome(folder, version, axes="tczyx", unit="micrometer"):
    """A group as other software writes it: five axes, and a scale of the whole image."""
    for path, array in (("s0", FINE), ("s1", COARSE)):
        shape = [1] * (len(axes) - 3) + list(array.shape[1:])
        metadata = {
            "shape": shape,
            **({"chunks": shape, "dtype": "|u1"} if version == "0.4" else {"data_type": "uint8"}),
        }
        driver = "zarr" if version == "0.4" else "zarr3"
        store = ts.open(
            {"driver": driver, "kvstore": f"file://{folder}/{path}/", "metadata": metadata},
            create=True,
        ).result()
        store.write(array.reshape(shape)).result()
    image = {
        "axes": [
            {"name": a, **({"type": "space", "unit": unit} if a in "zyx" else {})} for a in axes
        ],
        "datasets": [
            {
                "path": path,
                "coordinateTransformations": [
                    {"type": "scale", "scale": [1] * (len(axes) - 3) + scale}
                ],
            }
            for path, scale in (("s0", [4, 1, 1]), ("s1", [4, 2, 2]))
        ],
        "coordinateTransformations": [
            {"type": "scale", "scale": [1] * (len(axes) - 3) + [0.01, 0.008, 0.008]}
        ],
    }
    if version == "0.4":
        (folder / ".zgroup").write_text('{"zarr_format": 2}')
        (folder / ".zattrs").write_text(json.dumps({"multiscales": [{"version": "0.4", **image}]}))
    else:
        attributes = {"ome": {"version": "0.5", "multiscales": [image]}}
        (folder / "zarr.json").write_text(
            json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes})
        )
    return f"file://{folder}"


@pytest.fixture(params=["precomputed", "0.4", "0.5"])
def two_scales(request, tmp_path):
    return precomputed(tmp_path) if request.param == "precomputed" else ome(tmp_path, request.param)


def test_a_scale_by_its_index_or_its_voxel_size(two_scales):
    for scale, array, size in ((0, FINE, (40, 8, 8)), (1, COARSE, (40, 16, 16))):
        for wanted in (scale, tuple(float(n) for n in size)):
            volume = open_volume(two_scales, scale=wanted)
            assert volume.voxel_size_nm == pytest.approx(size)
            np.testing.assert_array_equal(volume.read(volume.bounds), array)
    with pytest.raises(VolumeError, match="has the scales 0 … 1, and scale 2 is asked for"):
        open_volume(two_scales, scale=2)
    with pytest.raises(VolumeError, match=r"no scale of \[4.0, 4.0, 4.0\] nm .*only \[40"):
        open_volume(two_scales, scale=(4.0, 4.0, 4.0))


def test_a_single_array_has_no_scales_to_choose_from(tmp_path):
    url = write_volume(tmp_path / "z", FINE, format="zarr3")
    assert volume_at(url).driver == "zarr3"
    with pytest.raises(VolumeError, match="no scales to choose from"):
        open_volume(url, scale=(4.0, 4.0, 4.0))


def test_a_position_on_other_axes(tmp_path):
    array = np.stack([FINE, 255 - FINE])
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{tmp_path}/a/",
        "metadata": {"shape": array.shape, "data_type": "uint8", "dimension_names": list("tczyx")},
    }
    ts.open(spec, create=True).result().write(array).result()
    url = f"file://{tmp_path}/a"
    for t in (0, 1):
        volume = open_volume(url, select={"t": t})
        np.testing.assert_array_equal(volume.read(BoundingBox((0, 0, 0), (16, 32, 32))), array[t])
    with pytest.raises(
        VolumeError,
        match=r"Choose a position on each other one with input.select, such as \{t: 0\}",
    ):
        open_volume(url)
    with pytest.raises(VolumeError, match="input.select is 2 on t; .* has 0 … 1 there"):
        open_volume(url, select={"t": 2})
    for name in ("q", "y"):
        with pytest.raises(VolumeError, match=f"input.select names the axis '{name}'"):
            open_volume(url, select={"t": 0, name: 0})


def test_units_that_are_no_length_leave_the_voxel_size_unknown(tmp_path):
    assert open_volume(ome(tmp_path, "0.5", unit="fathom")).voxel_size_nm is None


@pytest.mark.parametrize(
    "image",
    [
        {"axes": [{"name": "z"}]},
        {"axes": 3, "datasets": []},
        {
            "axes": [{"name": "z"}],
            "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale"}]}],
        },
        {
            "axes": [{"name": "z"}],
            "datasets": [
                {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1, 2]}]}
            ],
        },
        [],
    ],
)
def test_damaged_groups_are_told_of(tmp_path, image):
    (tmp_path / ".zgroup").write_text("{}")
    (tmp_path / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    with pytest.raises(VolumeError, match="multiscales cannot be understood"):
        volume_at(f"file://{tmp_path}")


@pytest.mark.parametrize("format", ["precomputed", "ome_zarr"])
def test_a_volume_that_lists_scales_without_end_is_refused(tmp_path, format):
    url = write_volume(tmp_path, np.ones((4, 4, 4), np.uint8), format=format)
    path = tmp_path / ("info" if format == "precomputed" else "zarr.json")
    metadata = json.loads(path.read_text())
    listed = (
        metadata["scales"]
        if format == "precomputed"
        else metadata["attributes"]["ome"]["multiscales"][0]["datasets"]
    )
    listed *= 257
    path.write_text(json.dumps(metadata))
    with pytest.raises(VolumeError, match="lists 257 scales, and 256 are the most"):
        volume_at(url)
