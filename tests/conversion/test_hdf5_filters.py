"""Test how many bytes chunks of HDF5 unpack to, by each filter, sound and damaged."""

import io
import struct
from contextlib import contextmanager, suppress
from dataclasses import replace

import h5py
import hdf5plugin
import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from beam_inference.conversion.hdf5 import hdf5_source
from beam_inference.conversion.hdf5_chunks import ChunkIndex, check_chunks
from beam_inference.conversion.hdf5_filters import (
    Filter,
    check_filters,
    count_plain,
    count_unpacked,
    is_size_told,
    list_filters,
)
from beam_inference.errors import PermanentReadError, VolumeError

SHAPE = (8, 9, 10)
SMOOTH = np.arange(720).reshape(SHAPE) // 7 % 100
NOISE = np.random.default_rng(0).integers(0, 100, SHAPE)

SHUFFLED_LAST = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
for number, parameters in ((1, (4,)), (3, ()), (2, ())):
    SHUFFLED_LAST.set_filter(number, 1, parameters)

KINDS = {
    "gzip, checksum, shuffle": {"dcpl": SHUFFLED_LAST},
    "gzip": {"compression": "gzip"},
    "lzf": {"compression": "lzf"},
    "lzf of shuffled": {"compression": "lzf", "shuffle": True},
    "scale and offset": {"scaleoffset": 0},
    "scale, offset and gzip": {"scaleoffset": 0, "compression": "gzip"},
    "16 bits of scale and offset": {"scaleoffset": 16},
    "bzip2": hdf5plugin.BZip2(),
    "lz4": hdf5plugin.LZ4(),
    "lz4 in blocks": hdf5plugin.LZ4(nbytes=100),
    "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle and lz4": hdf5plugin.Bitshuffle(nelems=64),
    "bitshuffle and zstd": hdf5plugin.Bitshuffle(nelems=64, cname="zstd"),
    "blosc": hdf5plugin.Blosc(),
    "zstd": hdf5plugin.Zstd(),
}
"""Keywords of h5py for each kind of packing."""


def create(file, array, kind, **keys):
    """A dataset that is one chunk, packed; with its filters."""
    dataset = file.create_dataset("x", data=array, chunks=array.shape, **KINDS[kind], **keys)
    return dataset, list_filters(dataset)


@contextmanager
def open_stored(kind, stored, mask):
    """A dataset of one chunk, of which this is stored, without some of its filters."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        dataset = file.create_dataset("x", SHAPE, "u2", chunks=SHAPE, **KINDS[kind])
        dataset.id.write_direct_chunk((0, 0, 0), stored, mask)
    with h5py.File(content, "r") as file:  # HDF5 forgets the mask until then
        yield file["x"]


def count(filters, mask, stored, expected):
    """What is counted for a chunk; -1 if it cannot be unpacked."""
    applied = [each for bit, each in enumerate(filters) if not mask >> bit & 1]
    if is_size_told(applied):
        return count_plain(applied, len(stored))
    try:
        return count_unpacked(applied, stored, expected)
    except OSError:
        return -1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["<u2", ">u2", "i8"])
def test_sound_chunks_unpack_to_their_voxels(kind, dtype):
    for values in (SMOOTH, NOISE, NOISE * 0, NOISE[:5, :7, :9], NOISE[:1, :1, :1]):
        with h5py.File(io.BytesIO(), "w") as file:
            array = np.ascontiguousarray(values).astype(dtype)
            dataset, filters = create(file, array, kind)
            mask, stored = dataset.id.read_direct_chunk((0, 0, 0))
            assert count(filters, mask, stored, array.nbytes) == array.nbytes


def test_floats_by_scale_and_offset():
    with h5py.File(io.BytesIO(), "w") as file:
        array = NOISE.astype("f4") / 7
        dataset = file.create_dataset("x", data=array, chunks=SHAPE, scaleoffset=3)
        mask, stored = dataset.id.read_direct_chunk((0, 0, 0))
        assert count(list_filters(dataset), mask, stored, array.nbytes) == array.nbytes


@pytest.mark.parametrize("bits", [9, 12, 16])
def test_voxels_of_some_bits(bits):
    """Filter 5, nbit, keeps the bits that a dtype says are used."""
    of_bits = h5py.h5t.STD_U16LE.copy()
    of_bits.set_precision(bits)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(SHAPE)
    properties.set_filter(5, 0, ())
    with h5py.File(io.BytesIO(), "w") as file:
        space = h5py.h5s.create_simple(SHAPE)
        dataset = h5py.Dataset(h5py.h5d.create(file.id, b"x", of_bits, space, properties))
        dataset[...] = NOISE.astype("u2")
        mask, stored = dataset.id.read_direct_chunk((0, 0, 0))
        filters = list_filters(dataset)
        assert count(filters, mask, stored, 1440) == 1440
        assert count(filters, mask, stored[:-2], 1440) != 1440
        assert (dataset[...] == NOISE).all()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_let_through_does_not_depend_on_memory(kind, data):
    """HDF5 takes what is missing from memory, which is filled in two ways by two writes before."""
    values = data.draw(st.sampled_from([SMOOTH, NOISE]))
    with h5py.File(io.BytesIO(), "w") as file:
        array = values.astype("u2")
        dataset, filters = create(file, array, kind)
        mask, sound = dataset.id.read_direct_chunk((0, 0, 0))
        stored = bytearray(sound)
        for _ in range(data.draw(st.integers(0, 3))):
            place = data.draw(st.integers(0, min(len(stored), 40) - 1))
            stored[place] = data.draw(st.integers(0, 255))
        stored = bytes(stored[: data.draw(st.integers(1, len(stored)))])
        if data.draw(st.booleans()):
            mask = data.draw(st.integers(0, 3))
        if count(filters, mask, stored, array.nbytes) != array.nbytes:
            return
        found = []
        for fill in (0x11, 0x77):
            with open_stored(kind, stored, mask) as dataset, suppress(OSError, RuntimeError):
                waste = [np.full(size, fill, np.uint8) for size in (100, 720, 1440, 1441, 2048)]
                del waste
                found.append(dataset[...])
        assert len(found) != 1
        assert all((each == found[0]).all() for each in found)


def check_stored(kind, stored, mask):
    """Check, and read, such a dataset."""
    with open_stored(kind, stored, mask) as dataset:
        check_filters("x", dataset)
        check_chunks(dataset, ChunkIndex(dataset), (slice(None),) * 3)
        return dataset[...]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_that_went_through_no_filter(kind):
    array = NOISE.astype("u2")
    assert (check_stored(kind, array.tobytes(), 7) == array).all()
    with pytest.raises(PermanentReadError, match="holds 100 bytes, expected 1,440"):
        check_stored(kind, b"A" * 100, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_fewer_voxels(kind):
    array = SMOOTH.astype("u2")
    stored = []
    for part in (array, array[:5]):
        with h5py.File(io.BytesIO(), "w") as file:
            dataset, _ = create(file, part, kind)
            stored.append(dataset.id.read_direct_chunk((0, 0, 0))[1])
    assert (check_stored(kind, stored[0], 0) == array).all()
    with pytest.raises((PermanentReadError, OSError), match=r"expected 1,440|cannot be unpacked"):
        check_stored(kind, stored[1], 0)


@pytest.mark.parametrize(
    ("kind", "parameters", "stored"),
    [
        # Integers of 16 bits are not packed, whatever a chunk begins with.
        ("scale and offset", [2, 16], bytes(21)),
        # Blocks are only said to be packed.
        ("bitshuffle and lz4", [0, 4, 2, 0, 1], struct.pack(">QI", 1440, 1440) + bytes(8)),
        ("bitshuffle and lz4", [0, 4, 0], bytes(1440)),
        ("bitshuffle", [0, 4, 0], bytes(1440)),
        ("lz4", [], struct.pack(">QI", 1440, 0) + bytes(4 * 1440)),
    ],
)
def test_parameters_and_headers_that_lie(kind, parameters, stored):
    """HDF5 would take memory for voxels, divide by zero, or never end."""
    with h5py.File(io.BytesIO(), "w") as file:
        dataset = file.create_dataset("x", SHAPE, "u2", chunks=SHAPE, **KINDS[kind])
        (each,) = list_filters(dataset)
    forged = replace(each, parameters=(*parameters, *each.parameters[len(parameters) :]))
    assert count([forged], 0, stored, 1440) != 1440


def test_a_shuffle_behind_a_packer_is_undone():
    """As they lie, the bytes would be other runs."""
    lzf, shuffle = Filter(32000, "lzf", ()), Filter(2, "shuffle", (2,))
    runs = (b"\x1f" + b"A" * 32) * 8
    elements = np.frombuffer(runs, np.uint8).reshape(-1, 2).T.tobytes()
    assert count_unpacked([lzf, shuffle], elements, 1440) == 256
    assert count_unpacked([lzf], runs, 1440) == 256


def test_a_chunk_beyond_the_dataset_that_the_plugin_cannot_unpack(tmp_path):
    header = imagecodecs.zstd_encode(bytes(1440))[:9]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        keys = KINDS["zstd"]
        dataset = file.create_dataset("x", (8, 9, 17), "u2", chunks=SHAPE, **keys)
        dataset.id.write_direct_chunk((0, 0, 10), header + b"\xff" * (1440 - len(header)))
    source = hdf5_source(str(tmp_path / "a.h5"), "x")
    with pytest.raises(PermanentReadError, match="cannot be unpacked"):
        source.open()(source.info.bounds)


def zstd(size):
    return imagecodecs.zstd_encode(bytes(size))


SKIPPED = b"\x50\x2a\x4d\x18\x08\0\0\0" + bytes(8)


@pytest.mark.parametrize(
    "stored",
    [
        zstd(720) + zstd(720),
        SKIPPED + zstd(1440),
        zstd(0) + zstd(1440),
        zstd(1440) + zstd(1440),
    ],
)
def test_frames_of_zstd_for_which_the_plugin_makes_no_room(stored):
    with pytest.raises(OSError, match="cannot be unpacked"):
        check_stored("zstd", stored, 0)
    assert not check_stored("zstd", zstd(1440) + SKIPPED, 0).any()


def test_a_file_with_a_chunk_of_fewer_voxels(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("x", SHAPE, "u2", chunks=SHAPE, compression="lzf")
        dataset.id.write_direct_chunk((0, 0, 0), b"\x1f" + b"A" * 32)
    source = hdf5_source(str(tmp_path / "a.h5"), "x")
    with pytest.raises(PermanentReadError, match=r"chunk at \(0, 0, 0\) holds 32 bytes"):
        source.open()(source.info.bounds)


@pytest.mark.parametrize("keys", [{"compression": "szip"}, hdf5plugin.Blosc2(), hdf5plugin.Zfp()])
def test_filters_whose_results_cannot_be_checked(keys, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=SMOOTH.astype("f4"), chunks=SHAPE, **keys)
    with pytest.raises(VolumeError, match=r"packed by filter \d+ .*h5repack -f GZIP=5"):
        hdf5_source(str(tmp_path / "a.h5"), "x")


def test_two_filters_of_which_one_hides_what_the_other_made(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=SMOOTH, chunks=SHAPE, scaleoffset=0, compression="lzf")
    with pytest.raises(VolumeError, match=r"filter 6 \(scaleoffset\) and filter 32000 \(lzf\)"):
        hdf5_source(str(tmp_path / "a.h5"), "x")
