"""Where the arrays of an OME-Zarr group lie, as its transformations say."""

import copy
import json
import os

import numpy as np
import pytest
from helpers import write_volume
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import VolumeError
from beam_inference.geometry.origin import NO_REST, Origin
from beam_inference.volumes.ome_zarr import scales_of_group, translation_nm
from beam_inference.volumes.opening import open_volume

SIZE = (40.0, 8.0, 4.0)


def group(datasets, whole=(), version="0.5"):
    """Attributes of a group; a dataset is a scale and a translation, ZYX, or None for none."""
    image = {
        "axes": [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"],
        "datasets": [
            {"path": str(number), "coordinateTransformations": transformations(*each)}
            for number, each in enumerate(datasets)
        ],
    }
    if whole:
        image["coordinateTransformations"] = transformations(*whole)
    if version == "0.4":
        return {"multiscales": [{"version": "0.4", **image}]}
    return {"ome": {"version": "0.5", "multiscales": [image]}}


def transformations(scale, translation=None):
    stated = [{"type": "scale", "scale": list(scale)}]
    if translation is not None:
        stated.append({"type": "translation", "translation": list(translation)})
    return stated


def origins(*arguments, **keys):
    return [each.origin for each in scales_of_group(group(*arguments, **keys), "em")]


def test_a_pipe_in_place_of_an_array_s_metadata(tmp_path):
    write_volume(tmp_path / "em", np.ones((8, 8, 8), np.uint8), format="zarr3")
    (tmp_path / "group").mkdir()
    (tmp_path / "em").rename(tmp_path / "group" / "0")
    attributes = {"zarr_format": 3, "node_type": "group", "attributes": group([(SIZE,)])}
    (tmp_path / "group" / "zarr.json").write_text(json.dumps(attributes))
    assert open_volume(f"file://{tmp_path}/group").bounds.shape == (8, 8, 8)
    metadata = tmp_path / "group" / "0" / "zarr.json"
    metadata.unlink()
    os.mkfifo(metadata)
    with pytest.raises(VolumeError, match="zarr.json is no file, but a pipe"):
        open_volume(f"file://{tmp_path}/group")


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_a_translation_of_whole_voxels_is_where_the_volume_starts(version):
    assert origins([(SIZE, (400, -160, 120))], version=version) == [Origin((10, -20, 30))]
    assert origins([(SIZE,)], version=version) == [Origin()]


def test_the_transformations_of_an_array_come_before_those_of_the_image():
    unit = (1.0, 1.0, 1.0)
    assert origins([(unit, (10, 0, 0))], whole=(SIZE,)) == [Origin((10, 0, 0))]
    assert origins([(unit,)], whole=(SIZE, (400, 160, -8))) == [Origin((10, 20, -2))]
    assert origins([(unit, (1, 1, 1))], whole=(SIZE, (400, 160, -8))) == [Origin((11, 21, -1))]
    (scale,) = scales_of_group(group([(unit,)], whole=(SIZE, (400, 160, -8))), "em")
    assert scale.voxel_size_nm == list(SIZE)


def test_what_is_left_of_a_voxel_is_told():
    assert origins([(SIZE, (410, 0, -1))]) == [Origin((10, 0, 0), (0.25, 0.0, -0.25))]
    # what was rounded is whole
    assert origins([(SIZE, (400.01, 0, 0))]) == [Origin((10, 0, 0))]


@given(
    st.tuples(*[st.integers(-(2**31), 2**31)] * 3),
    st.tuples(*[st.floats(1e-3, 1e6)] * 3),
    st.tuples(*[st.floats(-0.45, 0.45)] * 3),
    st.integers(1, 6),
)
def test_coarser_scales_lie_where_centres_of_voxels_say(start, size, rest, exponent):
    """A scale that is f times as coarse begins at the same place with (f - 1) / 2 more."""
    factor = 2**exponent
    coarse = tuple(n * factor for n in start)
    finest = translation_nm(coarse, size, rest)
    shift = [t + (factor - 1) / 2 * s for t, s in zip(finest, size, strict=True)]
    larger = [factor * s for s in size]
    first, second = origins([(size, finest), (larger, shift)])
    assert first.voxel == coarse
    assert first.rest == pytest.approx(rest, abs=2e-3)
    assert second.voxel == start
    assert second.rest == pytest.approx([r / factor for r in first.rest], abs=2e-3)


def test_coarser_scales_of_programs_that_write_no_translation_lie_at_zero():
    scales = [([s * f for s in SIZE],) for f in (1, 2, 4, 64)]
    assert origins(scales) == [Origin()] * 4
    # nor of programs that write the corner's
    scales = [([s * f for s in SIZE], (2560, 0, 0)) for f in (1, 2, 4)]
    assert [each.voxel for each in origins(scales)] == [(64, 0, 0), (32, 0, 0), (16, 0, 0)]
    assert [each.rest[1:] for each in origins(scales)] == [NO_REST[1:]] * 3


@pytest.mark.parametrize(
    ("scale", "translation"),
    [
        (SIZE, (float("nan"), 0, 0)),
        (SIZE, (float("inf"), 0, 0)),
        (SIZE, (1e30, 0, 0)),
        ((0, 8, 4), (40, 0, 0)),
        ((-40, 8, 4), (40, 0, 0)),
        (SIZE, (40, 0)),
        (SIZE, ("forty", 0, 0)),
        (SIZE, {"z": 40}),
    ],
)
def test_a_translation_that_says_nothing_is_refused(scale, translation):
    with pytest.raises(VolumeError, match="its multiscales cannot be understood"):
        origins([(scale, translation)])


def test_axes_in_another_order_and_of_other_kinds():
    attributes = group([((1, 8, 40, 4), (7, 160, 400, 120))])
    (image,) = attributes["ome"]["multiscales"]
    image["axes"] = [{"name": name} for name in "tyzx"]
    assert scales_of_group(attributes, "em")[0].origin == Origin((10, 20, 30))
    other = copy.deepcopy(attributes)
    image = other["ome"]["multiscales"][0]
    image["datasets"][0]["coordinateTransformations"].append({"type": "identity"})
    assert scales_of_group(other, "em") == scales_of_group(attributes, "em")


@pytest.mark.parametrize("absent", [[], None])
def test_without_any_transformation_nobody_knows_a_voxel_size(absent):
    attributes = group([([40, 8, 4],)])
    assert scales_of_group(attributes, "em")[0].voxel_size_nm == [40, 8, 4]
    attributes["ome"]["multiscales"][0]["datasets"][0]["coordinateTransformations"] = absent
    assert scales_of_group(attributes, "em")[0].voxel_size_nm == [None, None, None]


@pytest.mark.parametrize("size", [0, -8, 10**400, float("inf"), float("nan")])
def test_a_scale_that_is_no_size_is_refused(size):
    with pytest.raises(VolumeError, match=r"multiscales cannot be understood: (?!\w*Error)"):
        origins([([size, 8, 8],)])
    assert origins([([8, 8, 8],)])


def test_a_group_of_very_many_arrays_is_refused():
    with pytest.raises(VolumeError, match="1001 arrays"):
        origins([([8, 8, 8],)] * 1001)


def group_with(*entries):
    described = group([(SIZE,)])
    (dataset,) = described["ome"]["multiscales"][0]["datasets"]
    dataset["coordinateTransformations"] = list(entries)
    return described


def affine(*rows):
    return {"type": "affine", "affine": [list(row) for row in rows]}


def test_an_affine_transformation_along_the_axes_is_a_scale_and_a_translation():
    straight = affine((40, 0, 0, 400), (0, 8, 0, -160), (0, 0, 4, 120))
    expected = scales_of_group(group([(SIZE, (400, -160, 120))]), "em")
    assert scales_of_group(group_with({"type": "identity"}, straight), "em") == expected
    parts = transformations(SIZE, (0, 0, 0)), transformations((1, 1, 1), (400, -160, 120))
    assert scales_of_group(group_with(*parts[0], *parts[1]), "em") == expected


SKEW = affine((40, 1, 0, 0), (0, 8, 0, 0), (0, 0, 4, 0))
TURN = {"type": "rotation", "rotation": [[0, 1, 0], [1, 0, 0], [0, 0, 1]]}


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (SKEW, "turns or shears"),
        (TURN, "'rotation'"),
        ({"type": "sequence", "transformations": [TURN]}, "'sequence'"),
        ({"type": "mapAxis", "mapAxis": [2, 1, 0]}, "'mapAxis'"),
        ({"type": "displacements", "path": "0"}, "'displacements'"),
        ({"type": "scale", "path": "0"}, "KeyError"),
        ({"type": "scale", "scale": ["40", "8", "4"]}, "expected numbers"),
        ({"type": "translation", "translation": [True, True, True]}, "expected numbers"),
        (affine((40, 0, 0, 0), (0, 8, 0, 0)), "expected numbers"),
        ({}, "KeyError"),
    ],
)
def test_transformations_that_are_no_voxel_size_and_offset_are_refused(entry, what):
    with pytest.raises(VolumeError, match=what):
        scales_of_group(group_with(entry), "em")


def test_an_image_of_very_many_axes_is_refused():
    described = group([(SIZE,)])
    described["ome"]["multiscales"][0]["axes"] *= 1000
    with pytest.raises(VolumeError, match="3000 axes"):
        scales_of_group(described, "em")


def test_an_array_that_names_the_axes_of_its_group_in_another_order(tmp_path):
    write_volume(tmp_path / "em", np.ones((8, 8, 8), np.uint8), format="ome_zarr")
    path = tmp_path / "em" / "0" / "zarr.json"
    metadata = json.loads(path.read_text())
    path.write_text(json.dumps({**metadata, "dimension_names": ["x", "y", "z"]}))
    with pytest.raises(VolumeError, match=r"\['z', 'y', 'x'\], and its array itself names them"):
        open_volume(str(tmp_path / "em"))
    assert open_volume(str(tmp_path / "em" / "0")).bounds.size == 512
