"""What survives the way from other libraries and back, and a newcomer's files by one command."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers import read_volume
from instrument_files import (
    LIBCZI,
    libczi_voxels,
    lif_bytes,
    nd2_bytes,
    write_dicom,
    write_ims,
    write_svs,
)
from round_trips import make_table
from source_volumes import random_array

from beam_inference.cli.main import main

CONVERT = Path(__file__).parents[2] / "docs" / "convert.md"
SIZE_FLAG = ["--voxel-size", "40,500,500"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_table_in_the_documentation_is_what_happens():
    table = make_table()
    assert table in CONVERT.read_text(), f"docs/convert.md should hold:\n{table}"


def made_files(folder):
    """A newcomer's files by name, with what the command needs, and the voxels that are expected."""
    import pydicom
    import tifffile

    frames = random_array("uint16", (1, 2, 3, 20, 30))
    (folder / "confocal.lif").write_bytes(lif_bytes({"Series001": frames}))
    (folder / "widefield.nd2").write_bytes(nd2_bytes(frames.swapaxes(1, 2)))
    write_ims(folder / "lightsheet.ims", frames)
    slices = random_array("int16", (5, 12, 14))
    write_dicom(folder / "mr", slices)
    y, x = np.mgrid[0:200, 0:300]
    rgb = np.stack([y % 256, x % 256, (x + y) // 4], axis=-1).astype(np.uint8)
    slide = tifffile.imread(write_svs(folder / "slide.svs", rgb))
    (ct,) = Path(pydicom.__file__).parent.rglob("CT_small.dcm")
    picture = pydicom.dcmread(ct)
    hounsfield = picture.pixel_array.astype(np.float32) + np.float32(picture.RescaleIntercept)
    return {
        str(LIBCZI): ([], libczi_voxels()),
        "confocal.lif": ([], frames[0]),
        "widefield.nd2": ([], frames[0]),
        "lightsheet.ims": ([], frames[0]),
        "mr": ([], slices[None]),
        str(ct): ([], hounsfield[None, None]),
        "slide.svs": (SIZE_FLAG, np.moveaxis(slide, -1, 0)[:, None]),
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_newcomers_files_are_each_opened_by_one_command(tmp_path):
    for number, (name, (flags, expected)) in enumerate(made_files(tmp_path).items()):
        out = tmp_path / f"out{number}"
        assert main(["convert", os.path.join(tmp_path, name), str(out), *flags]) == 0, name
        assert np.array_equal(read_volume(out), expected), name


@pytest.mark.parametrize(("name", "way_out"), [("old.oib", "oiffile"), ("slide.mrxs", "OpenSlide")])
def test_those_that_are_not_read_name_the_way_out(name, way_out, tmp_path, capsys):
    (tmp_path / name).write_bytes(bytes(100))
    assert main(["convert", str(tmp_path / name), str(tmp_path / "out")]) == 2
    assert way_out in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
