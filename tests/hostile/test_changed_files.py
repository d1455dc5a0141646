"""Single files of which a header says other than what they hold: no voxel is lost or made up."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import h5py
import mrcfile
import nibabel
import nrrd
import numpy as np
import pytest
import tifffile
from helpers import write_volume
from PIL import Image

from beam_inference.cli.main import main

ARRAY = np.random.default_rng(0).integers(0, 2**16, (6, 7, 8), np.uint16)
COMMAND = ["--drop=voxel-size,offset"]


def converted(source: Path | str, target: Path) -> np.ndarray:
    """The array that a source becomes."""
    assert main(["convert", str(source), str(target), *COMMAND]) == 0
    array: np.ndarray = np.load(target)
    return array


def write_mrc(path: Path) -> None:
    """Write ARRAY with mrcfile, behind an extended header."""
    with mrcfile.new(path) as mrc:
        mrc.set_data(ARRAY)
        mrc.set_extended_header(np.zeros(96, np.uint8))


def changed(path: Path, offset: int, content: bytes) -> None:
    """Replace bytes of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(("offset", "value"), [(92, 0), (8, 5)], ids=["extension", "slices"])
def test_an_mrc_file_that_is_longer_than_its_header_says(tmp_path, refused, offset, value):
    write_mrc(tmp_path / "a.mrc")
    changed(tmp_path / "a.mrc", offset, struct.pack("<i", value))
    told = refused(["convert", tmp_path / "a.mrc", tmp_path / "a.npy", *COMMAND])
    assert "more than its header speaks of" in told


def test_a_nifti_file_of_more_slices_than_its_header_says(tmp_path, refused):
    nibabel.save(nibabel.Nifti1Image(ARRAY.T, np.eye(4)), tmp_path / "a.nii")
    changed(tmp_path / "a.nii", 46, struct.pack("<h", 5))
    told = refused(["convert", tmp_path / "a.nii", tmp_path / "a.npy", *COMMAND])
    assert "head -c" in told


@pytest.mark.parametrize("dtype", [np.int16, np.float64])
def test_values_of_nifti_that_scaling_makes_infinite(tmp_path, capsys, dtype):
    largest = np.full((6, 7, 8), np.iinfo(dtype).max if dtype == np.int16 else 3e38, dtype)
    image = nibabel.Nifti1Image(largest, np.eye(4))
    image.header.set_slope_inter(1e38 if dtype == np.int16 else 2, 0)
    nibabel.save(image, tmp_path / "a.nii")
    changed(tmp_path / "a.nii", 112, struct.pack("<f", 1e38 if dtype == np.int16 else 2))
    assert main(["convert", str(tmp_path / "a.nii"), f"{tmp_path}/a.npy", *COMMAND]) == 1
    assert "too large for float32" in capsys.readouterr().err


def test_two_arrays_in_one_npy_file(tmp_path, refused):
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, ARRAY)
        np.save(file, ARRAY)
    told = refused(["convert", tmp_path / "a.npy", tmp_path / "b.npy", *COMMAND])
    assert "more than its header speaks of" in told


def test_a_shape_of_npy_that_is_no_number(tmp_path, refused):
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (True, 7, 8)}"
    header += b" " * (117 - len(header)) + b"\n"
    start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    (tmp_path / "a.npy").write_bytes(start + bytes(112))
    told = refused(["convert", tmp_path / "a.npy", tmp_path / "b.npy", *COMMAND])
    assert "which no volume has" in told


def test_positions_that_are_not_read_are_told(tmp_path, capsys):
    write_mrc(tmp_path / "a.mrc")
    changed(tmp_path / "a.mrc", 196, struct.pack("<3f", 40, 80, 120))
    converted(tmp_path / "a.mrc", tmp_path / "a.npy")
    assert "its origin, 40, 80, 120 Å (x, y, z), is not read" in capsys.readouterr().err
    for key, told in (("space origin", "its space origin is not"), ("axis mins", "its axis mins")):
        header = {key: [10.0, 20.0, 30.0]}
        if key == "space origin":
            header |= {"space dimension": 3, "space directions": np.eye(3)}
        nrrd.write(str(tmp_path / "b.nrrd"), ARRAY, header)
        converted(tmp_path / "b.nrrd", tmp_path / f"{key}.npy")
        assert told in capsys.readouterr().err


def test_a_png_whose_header_comes_later(tmp_path, refused):
    Image.fromarray(ARRAY[0]).save(tmp_path / "s.png")
    content = (tmp_path / "s.png").read_bytes()
    chunk = b"tEXtComment\0\x08\x00aaaa"
    before = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "s.png").write_bytes(content[:8] + before + content[8:])
    told = refused(["convert", tmp_path / "s.png", tmp_path / "a.npy", *COMMAND])
    assert "does not begin with its header" in told


def test_a_picture_that_no_memory_holds(tmp_path, refused, monkeypatch):
    monkeypatch.setattr("beam_inference.volumes.block_memory.usable_memory", lambda: 100)
    Image.fromarray(ARRAY[0]).save(tmp_path / "s.png")
    told = refused(["convert", tmp_path / "s.png", tmp_path / "a.npy", *COMMAND])
    assert "each block of" in told


def test_a_page_of_tiff_that_was_never_written(tmp_path, capsys):
    keys = {"compression": "zlib", "rowsperstrip": 4, "photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "a.tif", ARRAY, **keys)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        for tag in (273, 279):
            tiff.pages[2].tags[tag].overwrite([0, 0])
    assert main(["convert", str(tmp_path / "a.tif"), f"{tmp_path}/a.npy", *COMMAND]) == 1
    assert "was never written" in capsys.readouterr().err


def test_bigdataviewer_keeps_unsigned_integers_as_signed_ones(tmp_path, capsys):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["t00000/s00/0/cells"] = ARRAY.view(np.int16)
    np.testing.assert_array_equal(converted(tmp_path / "a.h5", tmp_path / "a.npy"), ARRAY)
    assert "stand for uint16" in capsys.readouterr().err


def virtual(path: Path, dtype: str, depth: int) -> None:
    """Write a file whose dataset is put together from another one, of a depth of 6."""
    with h5py.File(path.with_name("part.h5"), "w") as file:
        file["v"] = ARRAY
    layout = h5py.VirtualLayout((depth, 7, 8), dtype)
    layout[:6] = h5py.VirtualSource("part.h5", "v", ARRAY.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("v", layout, fillvalue=9)


def test_a_virtual_dataset_of_another_dtype_than_its_parts(tmp_path, refused):
    virtual(tmp_path / "a.h5", "uint8", 6)
    told = refused(["convert", tmp_path / "a.h5", tmp_path / "a.npy", *COMMAND])
    assert "of a dtype that holds them" in told


def test_voxels_of_hdf5_that_are_stored_nowhere_are_told(tmp_path, capsys):
    virtual(tmp_path / "a.h5", "uint16", 8)
    array = converted(tmp_path / "a.h5", tmp_path / "a.npy")
    np.testing.assert_array_equal(array[:6], ARRAY)
    assert (array[6:] == 9).all()
    assert "112 of its 448 voxels are stored nowhere, and are 9" in capsys.readouterr().err
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("v", (4, 5, 6), "uint8", chunks=(2, 2, 2))
    converted(tmp_path / "b.h5", tmp_path / "b.npy")
    assert "all its voxels are stored nowhere, and are 0" in capsys.readouterr().err


@pytest.mark.parametrize("keys", [{"predictor": 2, "compression": "zlib"}, {}])
def test_a_page_of_ome_tiff_that_is_stored_otherwise_than_the_first(tmp_path, capsys, keys):
    first = {"compression": "zlib"} if keys else {}
    other = keys or {"compression": "zlib"}
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as tiff:
        for z, plane in enumerate(ARRAY):
            tiff.write(plane, contiguous=False, metadata=None, **(other if z == 2 else first))
    ome = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        '<Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="8" SizeY="7" SizeZ="6" '
        'SizeC="1" SizeT="1"><TiffData IFD="0" PlaneCount="6"/></Pixels></Image></OME>'
    )
    tifffile.tiffcomment(tmp_path / "a.ome.tif", ome.encode())
    code = main(["convert", str(tmp_path / "a.ome.tif"), f"{tmp_path}/a.npy", *COMMAND])
    told = capsys.readouterr().err
    assert code in (1, 2), told
    assert "page 2 of" in told
    assert "must be stored alike" in told


def test_a_tiff_of_more_pages_than_it_says(tmp_path, refused):
    with tifffile.TiffWriter(tmp_path / "a.tif", imagej=False) as tiff:
        for z, plane in enumerate(ARRAY):
            text = "ImageJ=1.53t\nimages=4\nslices=4\n" if z == 0 else None
            tiff.write(plane, contiguous=False, metadata=None, description=text)
    told = refused(["convert", tmp_path / "a.tif", tmp_path / "a.npy", *COMMAND])
    assert "slices would be lost" in told


def test_an_index_of_micro_manager_is_not_followed(tmp_path, refused, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", ARRAY)
    (tmp_path / "NDTiff.index").write_bytes(b"anything")
    monkeypatch.setattr(tifffile.TiffFile, "is_ndtiff", True)
    told = refused(["convert", tmp_path / "a.tif", tmp_path / "a.npy", *COMMAND])
    assert "may name any files" in told


@pytest.mark.parametrize("kind", ["precomputed", "ome_zarr"])
def test_overwriting_never_leaves_the_folder_by_a_link(tmp_path, refused, kind):
    np.save(tmp_path / "a.npy", ARRAY)
    victim = tmp_path / "victim" / "data"
    victim.mkdir(parents=True)
    (victim / "precious").touch()
    target = tmp_path / "target"
    (target / "s").mkdir(parents=True)
    (target / "s" / "link").symlink_to(tmp_path / "victim")
    if kind == "precomputed":
        scale = {"key": "s/link/data", "size": [8, 7, 6], "chunk_sizes": [[8, 8, 8]]}
        scale |= {"resolution": [4, 4, 40], "voxel_offset": [0, 0, 0], "encoding": "raw"}
        info = {"@type": "neuroglancer_multiscale_volume", "type": "image", "scales": [scale]}
        text = json.dumps(info | {"data_type": "uint16", "num_channels": 1})
        (target / "info").write_text(text)
    else:
        axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
        scaled = [{"type": "scale", "scale": [40, 4, 4]}]
        arrays = [{"path": "s/link/data", "coordinateTransformations": scaled}]
        ome = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": arrays}]}
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}
        (target / "zarr.json").write_text(json.dumps(group))
    words = ["convert", tmp_path / "a.npy", target, "--voxel-size=40,4,4", "--overwrite"]
    told = refused([*words, *([] if kind == "precomputed" else ["--format=ome_zarr"])])
    assert "may lie outside of it: it is not removed" in told
    assert (victim / "precious").exists()


def test_an_array_of_ome_zarr_is_no_other_kind_of_store(tmp_path, refused):
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    scaled = [{"type": "scale", "scale": [40, 4, 4]}]
    arrays = [{"path": "d.zip|zip:", "coordinateTransformations": scaled}]
    ome = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": arrays}]}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"ome": ome}}
    (tmp_path / "zarr.json").write_text(json.dumps(group))
    told = refused(["convert", tmp_path, tmp_path.with_suffix(".npy"), *COMMAND])
    assert "must lie inside the group" in told


def test_pictures_with_a_palette_are_not_mixed_with_others(tmp_path, refused, capsys):
    grey = Image.fromarray((ARRAY[0] >> 8).astype(np.uint8))
    coloured = grey.convert("P", palette=Image.Palette.ADAPTIVE)
    for z, picture in enumerate((coloured, coloured, grey)):
        picture.save(tmp_path / f"s{z}.png")
    told = refused(["convert", f"{tmp_path}/*.png", tmp_path / "a.npy", *COMMAND])
    assert "its table of colours is not kept" in told
    (tmp_path / "s2.png").unlink()
    array = converted(tmp_path / "s0.png", tmp_path / "a.npy")
    np.testing.assert_array_equal(array[0], np.asarray(coloured))
    assert "its table of colours is not kept" in capsys.readouterr().err


def test_a_pipe_beside_volumes_is_not_waited_for(tmp_path, refused):
    (tmp_path / "group" / "sub").mkdir(parents=True)
    os.mkfifo(tmp_path / "group" / "sub" / ".zattrs")
    (tmp_path / "group" / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    refused(["convert", tmp_path / "group", tmp_path / "a.npy", *COMMAND])


def test_packed_blocks_behind_a_web_server(tmp_path, refused, caplog):
    volume = tmp_path / "served" / "v"
    write_volume(volume, (ARRAY >> 8).astype(np.uint8), block_shape=(8, 8, 8))
    (block,) = [path for path in volume.rglob("0-8_*") if path.is_file()]
    content = block.read_bytes()
    block.unlink()
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever).start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/v"
            converted(url, tmp_path / "a.npy")
            assert "has none of its first, middle and last block" in caplog.text
            block.with_suffix(".gz").write_bytes(gzip.compress(content))
            told = refused(["convert", url, tmp_path / "b.npy", *COMMAND])
            assert "would read every voxel as zero" in told
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("name", "start"), [("a.nii", (-5, 16777219, 1)), ("a.mrc", (2**31, 0, 0))], ids=str
)
def test_an_offset_that_a_format_does_not_hold(tmp_path, refused, name, start):
    volume = write_volume(tmp_path / "v", (ARRAY >> 1).astype(np.int16), start)
    told = refused(["convert", volume, tmp_path / name])
    assert "in 32 bits" in told
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("compression", ["jpeg", "png", "jpeg2000", "jpegxl", "jpegxr", "lerc"])
def test_a_strip_of_tiff_that_holds_a_larger_picture(tmp_path, capsys, compression):
    imagecodecs = pytest.importorskip("imagecodecs")
    plane = (ARRAY[0] >> 8).astype(np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", plane, compression=compression)
    encode = getattr(imagecodecs, f"{compression.replace('2000', '2k')}_encode")
    large = encode(np.zeros((3000, 3000), np.uint8))
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+") as tiff:
        page = tiff.pages[0]
        start = tiff.filehandle.size
        page.tags[273].overwrite([start])
        page.tags[279].overwrite([len(large)])
    with (tmp_path / "a.tif").open("ab") as file:
        file.write(large)
    assert main(["convert", str(tmp_path / "a.tif"), f"{tmp_path}/a.npy", *COMMAND]) in (1, 2)
    told = capsys.readouterr().err
    assert "holds a picture of" in told
    assert "3000" in told


def test_a_volume_in_a_zip_file_is_not_read(tmp_path, refused):
    volume = tmp_path / "v"
    write_volume(volume, (ARRAY >> 8).astype(np.uint8), format="zarr3")
    shutil.make_archive(str(tmp_path / "a"), "zip", volume)
    told = refused(
        ["convert", f"file://{tmp_path}/a.zip|zip:|zarr3:", tmp_path / "a.npy", *COMMAND]
    )
    assert "Unpack it first" in told


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"photometric": "miniswhite"}, "of which 0 is white"),
        ({"extratags": [(274, "H", 1, 6, True)]}, "is to be shown turned (orientation 6)"),
    ],
)
def test_a_slice_of_tiff_that_means_other_than_its_neighbours(
    tmp_path, refused, capsys, keys, told
):
    for z in range(3):
        tifffile.imwrite(tmp_path / f"s{z}.tif", ARRAY[z], **(keys if z == 1 else {}))
    message = refused(["convert", f"{tmp_path}/*.tif", tmp_path / "a.npy", *COMMAND])
    assert told in message
    np.testing.assert_array_equal(converted(tmp_path / "s1.tif", tmp_path / "a.npy")[0], ARRAY[1])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["orientation", "palette"])
def test_a_picture_that_means_other_than_its_neighbours(tmp_path, refused, kind):
    plane = Image.fromarray((ARRAY[0] >> 8).astype(np.uint8))
    for z in range(3):
        if kind == "orientation":
            exif = Image.Exif()
            exif[274] = 6 if z == 1 else 1
            plane.save(tmp_path / f"s{z}.png", exif=exif)
        else:
            table = plane.convert("P")
            table.putpalette([(value * (z + 1)) % 256 for value in range(768)])
            table.save(tmp_path / f"s{z}.png")
    told = refused(["convert", f"{tmp_path}/*.png", tmp_path / "a.npy", *COMMAND])
    assert "the slices differ" in told
    assert ("orientation 6" if kind == "orientation" else "(table ") in told


def test_a_png_of_fewer_rows_than_its_header_says(tmp_path, capsys):
    Image.fromarray(ARRAY[0]).save(tmp_path / "s.png")
    content = (tmp_path / "s.png").read_bytes()
    place = content.index(b"IDAT")
    (length,) = struct.unpack_from(">I", content, place - 4)
    rows = zlib.decompress(content[place + 4 : place + 4 + length])
    short = b"IDAT" + zlib.compress(rows[: len(rows) // 2])
    chunk = struct.pack(">I", len(short) - 4) + short + struct.pack(">I", zlib.crc32(short))
    (tmp_path / "s.png").write_bytes(content[: place - 4] + chunk + content[place + length + 8 :])
    assert main(["convert", str(tmp_path / "s.png"), f"{tmp_path}/a.npy", *COMMAND]) == 1
    assert "bytes of rows, and its header requires 119" in capsys.readouterr().err


def test_bytes_that_look_like_a_picture_are_voxels(tmp_path):
    plane = np.zeros((16, 16), np.uint8)
    plane[3, :4] = [0xFF, 0x4F, 0xFF, 0x51]
    tifffile.imwrite(tmp_path / "a.tif", plane, tile=(16, 16), compression="zlib")
    np.testing.assert_array_equal(converted(tmp_path / "a.tif", tmp_path / "a.npy")[0], plane)


@pytest.mark.parametrize("link", ["_beam_inference", "_beam_inference/pyramid"])
def test_records_are_neither_written_nor_removed_through_a_link(tmp_path, capsys, link):
    volume = tmp_path / "v"
    write_volume(volume, (ARRAY >> 8).astype(np.uint8))
    victim = tmp_path / "victim"
    (victim / "pyramid").mkdir(parents=True)
    (victim / "pyramid" / "precious").touch()
    target = victim if link == "_beam_inference" else victim / "pyramid"
    (volume / link).parent.mkdir(exist_ok=True)
    (volume / link).symlink_to(target)
    assert main(["pyramid", str(volume), "--overwrite", "--num-scales=1"]) in (1, 2)
    assert "link" in capsys.readouterr().err
    assert [path.name for path in victim.rglob("*")] == ["pyramid", "precious"]


def test_a_chunk_of_hdf5_whose_place_was_damaged(tmp_path, refused):
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        file.create_dataset("v", data=ARRAY, chunks=(3, 7, 8))
    content = (tmp_path / "a.h5").read_bytes()
    tree = content.index(b"TREE\x01")  # of chunks
    place = content.index(struct.pack("<4Q", 3, 0, 0, 0), tree)  # of the second
    changed(tmp_path / "a.h5", place, struct.pack("<4Q", 3, 0, 2**40, 0))
    told = refused(["convert", tmp_path / "a.h5", tmp_path / "a.npy", *COMMAND])
    assert "where no chunk of its" in told
