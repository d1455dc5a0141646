"""What docs/trust.md says of volumes from elsewhere: their metadata lead nowhere else."""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers import read_volume, write_volume

from beam_inference.cli.main import main
from beam_inference.errors import PermanentReadError

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


def peak_bytes():
    """The most memory in use since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("format", ["zarr2", "n5"])
def test_a_block_unpacks_to_no_more_than_the_metadata_state(format, tmp_path):
    write_volume(tmp_path / "bomb", SECRET, format=format, block_shape=(8, 8, 8))
    name, key, compression = {
        "zarr2": (".zarray", "compressor", {"id": "zlib", "level": 9}),
        "n5": ("attributes.json", "compression", {"type": "gzip"}),
    }[format]
    file = tmp_path / "bomb" / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: compression}))
    block = tmp_path / "bomb" / "0" / "0" / "0"
    header = block.read_bytes()[:16] if format == "n5" else b""  # mode, dimensions, shape
    packer = zlib.compressobj(1, wbits=31 if format == "n5" else 15)
    packed = [packer.compress(bytes(2**24)) for _ in range(12)]
    block.write_bytes(b"".join([header, *packed, packer.flush()]))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_bytes()
    with pytest.raises(PermanentReadError, match="End of data expected"):
        read_volume(tmp_path / "bomb")
    assert peak_bytes() < before + 2**27
