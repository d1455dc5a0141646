"""Positions of volumes through conversions: bounds, values and voxel sizes stay what they were."""

import json
import logging
import uuid

import numpy as np
import pytest
from helpers import write_volume
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from beam_inference.cli.main import main
from beam_inference.conversion.convert import convert
from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume

GROUPS = ["ome_zarr", pytest.param("ome_zarr_0.4", marks=pytest.mark.slow)]
ARRAYS = ["zarr3", "zarr2", "n5"]


def image(shape=(9, 11, 13)):
    return np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8)


def group_file(folder, format):
    return folder / ("zarr.json" if format == "ome_zarr" else ".zattrs")


def image_of(group):
    (entry,) = group.get("attributes", {}).get("ome", group)["multiscales"]
    return entry


def translate(folder, format, nanometres):
    """Write another translation, ZYX, into a group of one scale."""
    file = group_file(folder, format)
    group = json.loads(file.read_text())
    (dataset,) = image_of(group)["datasets"]
    dataset["coordinateTransformations"][1:] = [
        {"type": "translation", "translation": list(nanometres)}
    ]
    file.write_text(json.dumps(group))


def translation_of(folder, format):
    (dataset,) = image_of(json.loads(group_file(folder, format).read_text()))["datasets"]
    return [each[each["type"]] for each in dataset["coordinateTransformations"]][1:]


@pytest.mark.parametrize("format", GROUPS)
@given(data=st.data())
@settings(max_examples=3, deadline=None, phases=[Phase.generate])  # each takes seconds
def test_precomputed_to_ome_zarr_and_back(tmp_path_factory, format, data):
    folder = tmp_path_factory.mktemp(uuid.uuid4().hex)
    start = data.draw(st.tuples(*[st.integers(-(2**31), 2**31)] * 3), "start")
    size = data.draw(st.tuples(*[st.floats(1e-3, 1e6)] * 3), "voxel size")
    array = image()
    write_volume(folder / "a", array, start, block_shape=(8, 8, 8), voxel_size_nm=size)
    convert(str(folder / "a"), str(folder / "b"), format=format, block_shape=(4, 8, 16))
    convert(str(folder / "b"), str(folder / "c"))
    box = BoundingBox(start, zyx.add(start, (9, 11, 13)))
    for name in "abc":
        volume = open_volume(str(folder / name))
        assert (volume.bounds, volume.voxel_size_nm) == (box, size), name
        np.testing.assert_array_equal(volume.read(box)[0], array)
    infos = [json.loads((folder / name / "info").read_text())["scales"][0] for name in "ac"]
    assert infos[0]["voxel_offset"] == infos[1]["voxel_offset"] == list(start[::-1])
    assert infos[0]["resolution"] == infos[1]["resolution"]


@pytest.mark.parametrize("format", GROUPS)
def test_what_is_left_of_a_voxel_is_kept_and_told_once(tmp_path, format, caplog):
    write_volume(tmp_path / "a", image(), format=format)
    translate(tmp_path / "a", format, (32.5, 100, -7.5))
    with caplog.at_level(logging.WARNING):
        assert (
            main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), f"--format={format}"]) == 0
        )
    told = [each.getMessage() for each in caplog.records if "between voxels" in each.getMessage()]
    (line,) = [each for each in told if each.startswith(f"file://{tmp_path}/a ")]
    assert "[0.25, 0.0, 0.25] of a voxel beyond [3, 10, -1] (z, y, x)" in line
    assert open_volume(str(tmp_path / "b")).bounds.start == (3, 10, -1)
    assert translation_of(tmp_path / "b", format) == [[32.5, 100.0, -7.5]]
    moved = ["--offset=1,2,3", f"--format={format}"]
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "c"), *moved]) == 0
    assert translation_of(tmp_path / "c", format) == [[10.0, 20.0, 30.0]]


@pytest.mark.parametrize("format", ARRAYS)
def test_arrays_that_start_at_0_are_padded_only_if_asked_to(tmp_path, format, capsys):
    """90 × 110 × 130 voxels at (10, 20, 30) became 100 × 130 × 160 without a word."""
    array = image()
    write_volume(tmp_path / "a", array, (10, 20, 30))
    words = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), f"--format={format}"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "[10, 20, 30 to 19, 31, 43) (z, y, x; stop exclusive) do not start at 0" in told
    assert "Write one of ome_zarr, ome_zarr_0.4, precomputed" in told
    assert "pass --pad, so that [0, 0, 0 to 19, 31, 43) is written, of which these" in told
    assert not (tmp_path / "b").exists()
    assert main([*words, "--pad"]) == 0
    volume = open_volume(str(tmp_path / "b"))
    assert volume.bounds == BoundingBox((0, 0, 0), (19, 31, 43))
    written = volume.read(volume.bounds)[0]
    np.testing.assert_array_equal(written[10:, 20:, 30:], array)
    assert np.count_nonzero(written) == array.size
    words[2] = str(tmp_path / "c")
    assert main([*words, "--offset=0,0,0"]) == 0
    np.testing.assert_array_equal(
        open_volume(words[2]).read(BoundingBox((0, 0, 0), (9, 11, 13)))[0], array
    )


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("b", {"format": "ome_zarr"}, "nothing need be padded"),
        ("b", {}, "nothing need be padded"),
        ("b.npy", {}, "is never padded"),
        ("b", {"format": "zarr3", "offset": (1, -2, 3)}, "before 0, where zarr3 volumes start"),
    ],
)
def test_padding_that_would_change_nothing_or_cannot_be_is_refused(
    tmp_path, target, options, message
):
    write_volume(tmp_path / "a", image(), (10, 20, 30))
    with pytest.raises(ConfigError, match=message):
        convert(str(tmp_path / "a"), str(tmp_path / target), pad=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("format", GROUPS)
@pytest.mark.parametrize("start", [(8, -16, 24), (5, -7, 2)])
def test_coarser_scales_of_a_translated_group_are_those_of_precomputed(tmp_path, format, start):
    array = image((20, 30, 40))
    names = {"a": "precomputed", "b": format}
    for name, each in names.items():
        write_volume(tmp_path / name, array, start, format=each, block_shape=(8, 8, 8))
        assert main(["pyramid", str(tmp_path / name), "--levels=2"]) == 0
    for scale in range(3):
        one, other = (open_volume(str(tmp_path / name), scale=scale) for name in names)
        assert (one.bounds, one.voxel_size_nm) == (other.bounds, other.voxel_size_nm)
        np.testing.assert_array_equal(one.read(one.bounds), other.read(other.bounds))
        assert not any(other.origin.rest)
    # made anew from a scale above the finest, it is the same
    assert main(["pyramid", str(tmp_path / "b"), "--scale=1", "--levels=1", "--overwrite"]) == 0
    again = open_volume(str(tmp_path / "b"), scale=2)
    assert again.bounds == one.bounds
    np.testing.assert_array_equal(again.read(again.bounds), one.read(one.bounds))
