"""Shards that are packed here, as TensorStore reads them."""

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import add
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output, open_output
from beam_inference.volumes.packed_shards import packs_shards
from beam_inference.volumes.sharding import shard_shapes

BLOCK = (8, 8, 8)


def spec_of(folder, bounds, array, shard_shape, **others):
    return OutputSpec(
        url=f"file://{folder}",
        format="precomputed",
        dtype=array.dtype.name,
        channels=len(array),
        bounds=bounds,
        block_shape=BLOCK,
        voxel_size_nm=(10, 10, 10),
        shard_shape=shard_shape,
        **others,
    )


def stored_blocks(url):
    """The blocks of a volume as they are once unpacked, by their numbers."""
    scale = open_volume(url).precomputed_scale
    base = f"{url}/{scale['key']}/"
    spec = {"driver": "neuroglancer_uint64_sharded", "metadata": scale["sharding"], "base": base}
    shards = ts.KvStore.open(spec).result()
    count = 2 ** sum(scale["sharding"][f"{name}_bits"] for name in ("preshift", "shard"))
    reads = {number: shards.read(number.to_bytes(8, "big")).result() for number in range(count)}
    return {number: read.value for number, read in reads.items() if read.state == "value"}


@given(
    shape=st.tuples(*[st.integers(1, 33)] * 3),
    start=st.tuples(*[st.integers(-9, 9)] * 3),
    channels=st.integers(1, 3),
    dtype=st.sampled_from(["uint8", "float32", "uint64"]),
    keep_blank=st.booleans(),
    data=st.data(),
)
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
def test_shards_hold_each_block_once(
    tmp_path_factory, shape, start, channels, dtype, keep_blank, data
):
    folder = tmp_path_factory.mktemp("shards")
    bounds = BoundingBox(start, add(start, shape))
    array = np.random.default_rng(1).integers(1, 9, (channels, *shape)).astype(dtype)
    array[:, : shape[0] // 2] = 0
    shard_shape = data.draw(st.sampled_from(shard_shapes(shape, BLOCK)))
    spec = spec_of(folder / "out", bounds, array, shard_shape)
    create_output(spec)
    output = open_output(spec, keep_blank=keep_blank)
    assert packs_shards(output.precomputed_scale)
    grid = ChunkGrid(bounds, shard_shape)
    for index in range(grid.count):
        box = grid.core_box(index)
        output.write(box, array[(slice(None), *box.slices_in(bounds))])
    np.testing.assert_array_equal(open_volume(spec.url).read(bounds), array)
    blocks = ChunkGrid(bounds, BLOCK)
    boxes = [blocks.core_box(index).slices_in(bounds) for index in range(blocks.count)]
    parts = [array[(slice(None), *box)] for box in boxes]
    expected = [part.tobytes() for part in parts if keep_blank or part.any()]
    assert sorted(stored_blocks(spec.url).values()) == sorted(expected)


def test_blocks_that_become_blank_leave_their_shard(tmp_path):
    bounds = BoundingBox((0, 0, 0), (8, 8, 16))
    array = np.ones((1, 8, 8, 16), np.uint8)
    spec = spec_of(tmp_path / "out", bounds, array, (8, 8, 16))
    create_output(spec).write(bounds, array)
    output = open_output(spec, keep_blank=False)
    array[..., :8] = 0
    output.write(bounds, array)
    assert [key for key in stored_blocks(spec.url) if isinstance(key, int)] == [1]
    output.write(bounds, np.zeros_like(array))
    assert not stored_blocks(spec.url)


def test_the_same_values_have_the_same_bytes(tmp_path):
    bounds = BoundingBox((0, 0, 0), (16, 16, 16))
    array = np.random.default_rng(1).integers(0, 9, (2, 16, 16, 16)).astype(np.uint8)
    files = []
    for number in range(2):
        spec = spec_of(tmp_path / str(number), bounds, array, (16, 16, 16))
        output = create_output(spec)
        for _ in range(number + 1):  # replaced, too
            output.write(bounds, array)
        (path,) = (tmp_path / str(number)).rglob("*.shard")
        files.append(path.read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("encoding", ["compressed_segmentation", "png"])
def test_other_encodings_are_left_to_tensorstore(tmp_path, encoding):
    bounds = BoundingBox((0, 0, 0), (16, 16, 16))
    dtype = np.uint8 if encoding == "png" else np.uint32
    array = np.random.default_rng(1).integers(0, 9, (1, 16, 16, 16)).astype(dtype)
    spec = spec_of(tmp_path / "out", bounds, array, (16, 16, 16), encoding=encoding)
    output = create_output(spec)
    assert not packs_shards(output.precomputed_scale)
    output.write(bounds, array)
    np.testing.assert_array_equal(open_volume(spec.url).read(bounds), array)


def test_volumes_without_shards_are_left_to_tensorstore():
    assert not packs_shards(None)
    assert not packs_shards({"encoding": "raw"})
    hashed = {"data_encoding": "gzip", "hash": "murmurhash3_x86_128"}
    assert not packs_shards({"encoding": "raw", "sharding": hashed})
