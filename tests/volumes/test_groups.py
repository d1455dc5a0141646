"""Groups that hold several volumes: these are listed, and chosen by their paths."""

import json

import numpy as np
import pytest
from helpers import write_volume

from beam_inference.conversion.find_source import find_source
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.opening import open_volume

ARRAY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def write_group(folder, attributes, version=2):
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (folder / ".zgroup").write_text('{"zarr_format": 2}')
        (folder / ".zattrs").write_text(json.dumps(attributes))
    else:
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": attributes}}
        (folder / "zarr.json").write_text(json.dumps(group))


def write_plate(folder, version):
    """A plate of two wells, of which one has two fields of view."""
    wells = {"A/1": ["0", "1"], "B/2": ["0"]}
    write_group(folder, {"plate": {"wells": [{"path": well} for well in wells]}}, version)
    for well, images in wells.items():
        described = {"well": {"images": [{"path": image} for image in images]}}
        write_group(folder / well, described, version)
        for image in images:
            format = "ome_zarr_0.4" if version == 2 else "ome_zarr"
            write_volume(folder / well / image, ARRAY, format=format, block_shape=(2, 2, 2))


@pytest.mark.parametrize("version", [2, 3])
def test_plates_by_well(version, tmp_path):
    write_plate(tmp_path / "plate", version)
    with pytest.raises(VolumeError, match="it holds the volumes A/1/0, A/1/1, B/2/0"):
        open_volume(str(tmp_path / "plate"))
    with pytest.raises(VolumeError, match="it holds the volumes 0, 1"):
        open_volume(str(tmp_path / "plate" / "A" / "1"))
    volume = open_volume(str(tmp_path / "plate" / "A" / "1" / "1"))
    assert np.array_equal(volume.read(volume.bounds)[0], ARRAY)
    source = find_source(str(tmp_path / "plate"), "B/2/0", 0, LOCAL)
    assert np.array_equal(source.open()(source.info.bounds)[0], ARRAY)


def test_labels_by_name(tmp_path):
    image = tmp_path / "image"
    write_volume(image, ARRAY, format="ome_zarr_0.4", block_shape=(2, 2, 2))
    write_group(image / "labels", {"labels": ["cells", "../../secret", "nuclei"]})
    write_volume(image / "labels" / "cells", 2 * ARRAY, format="ome_zarr_0.4")
    assert np.array_equal(open_volume(str(image)).read(open_volume(str(image)).bounds)[0], ARRAY)
    with pytest.raises(VolumeError, match="it holds the volumes cells, nuclei"):
        open_volume(str(image / "labels"))
    source = find_source(str(image), "labels/cells", 0, LOCAL)
    assert np.array_equal(source.open()(source.info.bounds)[0], 2 * ARRAY)


def test_setups_of_big_data_viewer(tmp_path):
    root = tmp_path / "dataset.n5"
    root.mkdir()
    (root / "attributes.json").write_text('{"n5": "2.5.0"}')
    for setup in (0, 1):
        for scale in (0, 1):
            folder = root / f"setup{setup}" / "timepoint0" / f"s{scale}"
            write_volume(folder, ARRAY + setup, format="n5", block_shape=(2, 2, 2))
        attributes = {"downsamplingFactors": [[1, 1, 1], [2, 2, 1]], "dataType": "uint8"}
        (root / f"setup{setup}" / "attributes.json").write_text(json.dumps(attributes))
    names = "setup0/timepoint0/s0, setup0/timepoint0/s1, setup1/timepoint0/s0"
    with pytest.raises(VolumeError, match=f"it holds the volumes {names}"):
        find_source(str(root), None, 0, LOCAL)
    source = find_source(str(root), "setup1/timepoint0/s0", 0, LOCAL)
    assert np.array_equal(source.open()(source.info.bounds)[0], ARRAY + 1)


def test_images_of_bioformats2raw(tmp_path):
    write_group(tmp_path / "all", {"bioformats2raw.layout": 3})
    for number in (0, 1):
        folder = tmp_path / "all" / str(number)
        write_volume(folder, ARRAY + number, format="ome_zarr_0.4", block_shape=(2, 2, 2))
    with pytest.raises(VolumeError, match="it holds the volumes 0, 1"):
        open_volume(str(tmp_path / "all"))


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc", "a//b"])
def test_names_do_not_lead_out_of_the_group(name, tmp_path):
    write_plate(tmp_path / "plate", 2)
    write_volume(tmp_path / "secret", ARRAY, format="zarr2")
    with pytest.raises(ConfigError, match="the path of a volume inside"):
        find_source(str(tmp_path / "plate"), name, 0, LOCAL)


def test_many_are_not_all_listed(tmp_path):
    wells = [{"path": f"A/{n}"} for n in range(10**4)]
    write_group(tmp_path / "plate", {"plate": {"wells": wells}})
    for n in range(20):
        write_group(tmp_path / "plate" / f"A/{n}", {"well": {"images": [{"path": "0"}]}})
    with pytest.raises(VolumeError, match=r"A/8/0, A/9/0, …") as raised:
        open_volume(str(tmp_path / "plate"))
    assert len(str(raised.value)) < 400
