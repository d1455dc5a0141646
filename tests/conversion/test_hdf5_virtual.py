"""Test that chunks behind virtual datasets of HDF5 are looked at before HDF5 reads them."""

import struct
import zlib
from itertools import product

import h5py
import numpy as np
import pytest

from beam_inference.conversion.hdf5 import hdf5_source
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox

SHAPE = (8, 12, 10)
CHUNKS = (4, 6, 5)
IMAGE = np.arange(960, dtype="u2").reshape(SHAPE) + 1


def write_source(file, name="s", bad=(4, 6, 5), content=b"short", **options):
    dataset = file.create_dataset(name, SHAPE, "u2", chunks=CHUNKS, compression="gzip", **options)
    dataset[...] = IMAGE
    if bad is not None:
        dataset.id.write_direct_chunk(bad, content)


def whole(layout, source):
    layout[...] = source


def slabs(layout, source):
    """Halves in the other order."""
    layout[0:4] = source[4:8]
    layout[4:8] = source[0:4]


def shifted(layout, source):
    layout[0:7, 0:11, 0:9] = source[1:8, 1:12, 1:10]


def strided(layout, source):
    layout[0:4, :, 0:5] = source[::2, :, ::2]


def in_pieces(layout, source):
    """Each slice is a source of its own."""
    for z in range(8):
        layout[z] = source[7 - z]


@pytest.fixture(params=["own file", "other file"])
def make(request, tmp_path):
    """A function that writes a virtual dataset, laid out in some way, over a source."""

    def write(lay_out, **options):
        own = request.param == "own file"
        path = tmp_path / "v.h5"
        with h5py.File(tmp_path / "s.h5", "w") as file:
            write_source(file, **options)
        with h5py.File(path, "w") as file:
            if own:
                write_source(file, **options)
            layout = h5py.VirtualLayout(SHAPE, "u2")
            lay_out(layout, h5py.VirtualSource("." if own else "s.h5", "s", SHAPE))
            file.create_virtual_dataset("v", layout, fillvalue=0)
        return path

    return write


def is_bad(lay_out):
    """Which voxels of a layout come from the bad chunk."""
    bad = np.zeros(SHAPE, bool)
    bad[4:8, 6:12, 5:10] = True
    shown = np.zeros(SHAPE, bool)
    lay_out(shown, bad)
    return shown


@pytest.mark.parametrize("lay_out", [whole, slabs, shifted, in_pieces])
def test_windows_that_show_a_short_chunk_are_refused_and_no_others(make, lay_out):
    read = hdf5_source(str(make(lay_out)), "v").open()
    expected = np.zeros(SHAPE, "u2")
    lay_out(expected, IMAGE)
    bad = is_bad(lay_out)
    found = set()
    for start in product(range(0, 8, 2), range(0, 12, 3), range(0, 10, 5)):
        box = BoundingBox(start, tuple(np.add(start, (2, 3, 5))))
        window = box.slices_in(BoundingBox((0, 0, 0), SHAPE))
        found.add(bool(bad[window].any()))
        if bad[window].any():
            with pytest.raises(PermanentReadError, match="holds|unpacked"):
                read(box)
        else:
            np.testing.assert_array_equal(read(box)[0], expected[window])
    assert found == {False, True}


def test_sources_that_are_taken_in_steps_are_looked_at_wholly(make):
    with pytest.raises(PermanentReadError, match="cannot be unpacked"):
        hdf5_source(str(make(strided)), "v").open()(BoundingBox((0, 0, 0), (1, 1, 1)))
    read = hdf5_source(str(make(strided, bad=None)), "v").open()
    expected = np.zeros(SHAPE, "u2")
    strided(expected, IMAGE)
    np.testing.assert_array_equal(read(BoundingBox((0, 0, 0), SHAPE))[0], expected)


def test_a_source_that_holds_nothing_is_told(tmp_path):
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("s", SHAPE, "u2", chunks=CHUNKS)
        layout = h5py.VirtualLayout(SHAPE, "u2")
        layout[...] = h5py.VirtualSource(".", "s", SHAPE)
        file.create_virtual_dataset("v", layout, fillvalue=0)
    [note] = hdf5_source(str(tmp_path / "v.h5"), "v").info.notes
    assert "v.h5:s, which it is put together from, all its voxels are stored nowhere" in note


def set_filters(*filters):
    """Creation properties of a dataset whose chunks go through filters in some order."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(CHUNKS)
    for each in filters:
        if each == "deflate":
            properties.set_deflate(4)
        else:
            properties.set_fletcher32()
    return properties


def write_filtered(path, filters, content=None):
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple(SHAPE)
        properties = set_filters(*filters)
        dataset = h5py.h5d.create(file.id, b"s", h5py.h5t.NATIVE_UINT16, space, properties)
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, IMAGE)
        if content is not None:
            dataset.write_direct_chunk((4, 6, 5), content)


VOXELS = bytes(range(240))
"""Those of a chunk."""

BAD_CHUNKS = {
    "two deflates": (("deflate", "deflate"), zlib.compress(zlib.compress(b"x" * 16).ljust(999))),
    "checksum first": (("fletcher", "deflate"), zlib.compress(VOXELS)),
    "checksums first": (("fletcher",) * 8 + ("deflate",), zlib.compress(VOXELS)),
    "checksum alone": (("fletcher",), VOXELS),
    "too many bytes": (("deflate",), zlib.compress(VOXELS + b"x")),
    "too many plain bytes": ((), VOXELS + b"x"),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_chunks_of_other_sizes_are_refused_through_whatever_filters(name, tmp_path):
    filters, content = BAD_CHUNKS[name]
    path = tmp_path / "a.h5"
    everything = BoundingBox((0, 0, 0), SHAPE)
    write_filtered(path, filters)
    np.testing.assert_array_equal(hdf5_source(str(path), "s").open()(everything)[0], IMAGE)
    write_filtered(path, filters, content)
    with pytest.raises(PermanentReadError, match=r"its chunk at \(4, 6, 5\) holds"):
        hdf5_source(str(path), "s").open()(everything)


def test_two_chunks_in_one_place_are_refused(tmp_path):
    """HDF5 looks at the size of one, and reads the other."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        dataset = file.create_dataset("x", (4, 4, 8), "u1", chunks=(4, 4, 4))
        dataset[...] = 7
        dataset.id.write_direct_chunk((0, 0, 4), b"x" * 16)
    content = path.read_bytes()
    keys = [struct.pack("<2I4Q", 16, 0, 0, 0, x, 0) for x in (4, 0)]
    assert content.count(keys[0]) == 1
    path.write_bytes(content.replace(*keys))
    with pytest.raises(VolumeError, match="has two chunks in one place"):
        hdf5_source(str(path), "x")


def test_other_bytes_than_a_plain_dataset_needs_are_refused(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"] = IMAGE
    content = path.read_bytes()
    extents = np.array(SHAPE, "<u8").tobytes()
    assert content.count(extents) == 2  # and the most that they may be
    path.write_bytes(content.replace(extents, np.array((8, 12, 9), "<u8").tobytes()))
    with pytest.raises(VolumeError, match="is stored in 1,920 bytes, and .* need 1,728"):
        hdf5_source(str(path), "x")


def test_a_part_that_changes_makes_another_source(tmp_path):
    with h5py.File(tmp_path / "part.h5", "w") as file:
        write_source(file, bad=None)
    with h5py.File(tmp_path / "whole.h5", "w") as file:
        layout = h5py.VirtualLayout(SHAPE, "u2")
        layout[...] = h5py.VirtualSource("part.h5", "s", SHAPE)
        file.create_virtual_dataset("v", layout)
    source = hdf5_source(str(tmp_path / "whole.h5"), "v")
    assert source.files == [str(tmp_path / "whole.h5"), str(tmp_path / "part.h5")]
    before = source.identity
    assert source.identity == before
    with h5py.File(tmp_path / "part.h5", "a") as file:
        file["s"][0, 0, 0] = 7
        file["more"] = 1
    assert source.identity != before
