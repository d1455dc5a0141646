"""What docs/trust.md says of volumes from elsewhere: their metadata lead nowhere else."""

import json

import numpy as np
import pytest
from helpers import read_volume, write_volume

from beam_inference.cli.main import main

SECRET = np.full((8, 8, 8), 77, np.uint8)


@pytest.mark.parametrize(
    "path",
    ["../private", "0/../../private", "..%2fprivate", "", ".", "/0", "0?x", "0#x", "..\\private"],
)
def test_an_ome_zarr_group_reads_no_array_outside_of_it(path, tmp_path, capsys):
    write_volume(tmp_path / "private", SECRET, format="zarr3", block_shape=(8, 8, 8))
    write_volume(tmp_path / "group", SECRET * 0, format="ome_zarr", block_shape=(8, 8, 8))
    file = tmp_path / "group" / "zarr.json"
    metadata = json.loads(file.read_text())
    metadata["attributes"]["ome"]["multiscales"][0]["datasets"][0]["path"] = path
    file.write_text(json.dumps(metadata))
    assert main(["convert", str(tmp_path / "group"), str(tmp_path / "out")]) == 2
    assert "must lie inside the group" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_array_in_a_folder_of_the_group_is_read(tmp_path):
    write_volume(tmp_path / "group", SECRET, format="ome_zarr", block_shape=(8, 8, 8))
    (tmp_path / "group" / "fine").mkdir()
    (tmp_path / "group" / "0").rename(tmp_path / "group" / "fine" / "0")
    file = tmp_path / "group" / "zarr.json"
    metadata = json.loads(file.read_text())
    metadata["attributes"]["ome"]["multiscales"][0]["datasets"][0]["path"] = "fine/0"
    file.write_text(json.dumps(metadata))
    np.testing.assert_array_equal(read_volume(tmp_path / "group")[0], SECRET)
