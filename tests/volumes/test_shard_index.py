"""Shards whose lists of blocks are not those that the metadata speak of."""

import gzip
import json
import struct
from itertools import product

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.sharding import Sharding

ARRAY = np.random.default_rng(0).integers(1, 2**16, (20, 18, 22), np.uint16)
HASHES = ["identity", "murmurhash3_x86_128"]


def write(folder, **stated):
    """Write ARRAY in shards, by TensorStore alone; the keys of ``sharding`` that are stated."""
    sharding = {
        "@type": "neuroglancer_uint64_sharded_v1",
        "hash": "identity",
        "preshift_bits": 1,
        "minishard_bits": 1,
        "shard_bits": 1,
        "minishard_index_encoding": "gzip",
        "data_encoding": "gzip",
    } | stated
    spec = {
        "driver": "neuroglancer_precomputed",
        "kvstore": f"file://{folder}/",
        "multiscale_metadata": {"type": "image", "data_type": "uint16", "num_channels": 1},
        "scale_metadata": {
            "size": [22, 18, 20],
            "encoding": "raw",
            "chunk_size": [8, 8, 8],
            "resolution": [4, 4, 40],
            "key": "s0",
            "voxel_offset": [5, -6, 7],
            "sharding": sharding,
        },
    }
    ts.open(spec, create=True).result()[..., 0] = ARRAY.T
    return sharding


def read(folder):
    volume = open_volume(f"file://{folder}")
    return volume.read(volume.bounds)[0]


@pytest.mark.parametrize("hash", HASHES)
@pytest.mark.parametrize("encoding", ["raw", "gzip"])
def test_sound_shards_are_read_and_metadata_of_others_are_noticed(tmp_path, hash, encoding):
    stated = write(tmp_path, hash=hash, minishard_index_encoding=encoding, data_encoding=encoding)
    np.testing.assert_array_equal(read(tmp_path), ARRAY)
    info = json.loads((tmp_path / "info").read_text())
    bits = ("preshift_bits", "minishard_bits", "shard_bits")
    changes = [{key: value} for key, value in product(bits, (0, 2, 3))]
    changes += [{"hash": other} for other in HASHES if other != hash]
    for change in changes:
        info["scales"][0]["sharding"] = stated | change
        (tmp_path / "info").write_text(json.dumps(info))
        with pytest.raises((VolumeError, PermanentReadError)):
            read(tmp_path)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        ("index", lambda old: bytes(16) + old[16:], "belong to no block that it lists"),
        ("index", lambda old: old[:8] + struct.pack("<Q", 2**40) + old[16:], "beyond its end"),
        ("index", lambda old: old[16:] + old[:16], "belong elsewhere"),
        ("list", lambda old: struct.pack("<Q", 64) + old[8:], "by its metadata, has not"),
        ("list", lambda old: _moved(old, 8), "overlap|beyond its end"),
        ("list", lambda old: _moved(old, -8), "overlap|beyond its end"),
    ],
)
def test_a_list_that_was_damaged_is_noticed(tmp_path, place, change, message):
    write(tmp_path, minishard_index_encoding="raw", data_encoding="raw")
    shard = tmp_path / "s0" / "0.shard"
    content = shard.read_bytes()
    start, stop = struct.unpack_from("<QQ", content)
    where = slice(0, 32) if place == "index" else slice(32 + start, 32 + stop)
    shard.write_bytes(content[: where.start] + change(content[where]) + content[where.stop :])
    with pytest.raises(VolumeError, match=message):
        read(tmp_path)


def _moved(blocks, by):
    """A list of blocks of which the second, and all behind it, begin elsewhere."""
    place = len(blocks) // 3 + 8
    (gap,) = struct.unpack_from("<Q", blocks, place)
    return blocks[:place] + struct.pack("<Q", (gap + by) % 2**64) + blocks[place + 8 :]


def test_a_block_that_its_list_lost_is_noticed(tmp_path):
    write(tmp_path, minishard_index_encoding="raw", data_encoding="raw")
    shard = tmp_path / "s0" / "0.shard"
    content = shard.read_bytes()
    start, stop = struct.unpack_from("<QQ", content)
    rows = np.frombuffer(content[32 + start : 32 + stop], "<u8").reshape(3, -1)
    shorter = rows[:, :-1].tobytes()
    index = struct.pack("<QQ", len(content) - 32, len(content) - 32 + len(shorter))
    shard.write_bytes(index + content[16:] + shorter)
    with pytest.raises(VolumeError, match="belong to no block that it lists"):
        read(tmp_path)


def test_a_shard_that_changes_later_is_noticed_when_it_is_read(tmp_path):
    write(tmp_path)
    volume = open_volume(f"file://{tmp_path}")
    shard = tmp_path / "s0" / "1.shard"
    shard.write_bytes(bytes(16) + shard.read_bytes()[16:])
    with pytest.raises(PermanentReadError, match=r"1\.shard is a shard of which \d+ bytes"):
        volume.read(volume.bounds)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("length", [0, 8, 16, -20])
def test_a_shard_that_was_cut_off_is_not_zeros(tmp_path, length, is_open):
    write(tmp_path)
    volume = open_volume(f"file://{tmp_path}")
    shard = max((tmp_path / "s0").iterdir(), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:length])
    with pytest.raises((VolumeError, PermanentReadError), match="shard"):
        volume.read(volume.bounds) if is_open else read(tmp_path)


def test_a_list_that_unpacks_to_anything_is_not_unpacked_further(tmp_path):
    write(tmp_path, data_encoding="raw")
    shard = tmp_path / "s0" / "0.shard"
    bomb = gzip.compress(bytes(2**26))
    shard.write_bytes(struct.pack("<4Q", 0, len(bomb), 0, 0) + bomb)
    with pytest.raises(VolumeError, match="lists more blocks in one place"):
        read(tmp_path)


def test_a_block_that_would_unpack_to_anything_is_not_unpacked(tmp_path):
    write(tmp_path, minishard_index_encoding="raw")
    shard = tmp_path / "s0" / "0.shard"
    bomb = gzip.compress(bytes(2**28))
    listed = struct.pack("<3Q", 0, 0, len(bomb))
    shard.write_bytes(struct.pack("<4Q", len(bomb), len(bomb) + 24, 0, 0) + bomb + listed)
    with pytest.raises(VolumeError, match="is a shard with a block of 260,.* more than 67,584"):
        read(tmp_path)


@given(
    blocks=st.tuples(*[st.integers(1, 9)] * 3),
    bits=st.tuples(*[st.integers(0, 3)] * 3),
    is_hashed=st.booleans(),
)
def test_places_of_all_blocks(blocks, bits, is_hashed):
    sharding = Sharding(blocks, *bits, is_hashed, is_index_packed=False)
    total = int(np.prod(blocks))
    numbers = np.arange(1 << sum((n - 1).bit_length() for n in blocks), dtype=np.uint64)
    assert sharding.are_blocks(numbers).sum() == total
    shards, minishards = sharding.places(numbers)
    assert shards.max() < sharding.shards
    assert minishards.max() < sharding.minishards
    if not is_hashed:
        lists = shards << np.uint64(bits[1]) | minishards
        _, counts = np.unique(lists[sharding.are_blocks(numbers)], return_counts=True)
        assert counts.max() <= sharding.most_listed


def test_every_shard_is_looked_at_where_there_are_fewer_bits_than_blocks(tmp_path):
    write(tmp_path, preshift_bits=0, minishard_bits=0, shard_bits=1)
    np.testing.assert_array_equal(read(tmp_path), ARRAY)
    volume = open_volume(f"file://{tmp_path}")
    shard = tmp_path / "s0" / "1.shard"
    shard.unlink()
    shard.mkdir()
    for z, y, x in product((0, 8, 16), (0, 8), (8,)):  # numbers of blocks that are odd
        start = zyx.add(volume.bounds.start, (z, y, x))
        with pytest.raises(PermanentReadError, match=r"1\.shard is a folder or the like"):
            volume.read(BoundingBox(start, zyx.add(start, (1, 1, 1))))


def test_an_index_that_no_memory_holds_is_not_read(tmp_path):
    stated = write(tmp_path)
    info = json.loads((tmp_path / "info").read_text())
    info["scales"][0]["sharding"] = stated | {"minishard_bits": 29}
    (tmp_path / "info").write_text(json.dumps(info))
    with (tmp_path / "s0" / "0.shard").open("r+b") as file:
        file.truncate(16 << 29)
    with pytest.raises(VolumeError, match="is a shard with an index of 8,589,934,592 bytes"):
        read(tmp_path)
