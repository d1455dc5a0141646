"""Shards against Neuroglancer's own numbering of blocks, written out bit by bit."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_inference.errors import AlignmentError
from beam_inference.volumes.sharding import precomputed_sharding, shard_shapes


def morton(position, blocks):
    """The compressed Morton code of a block (x, y, z), as its specification says it."""
    code = 0
    bit = 0
    for level in range(max(blocks).bit_length()):
        for axis in range(3):
            if 2**level < blocks[axis]:
                code |= ((position[axis] >> level) & 1) << bit
                bit += 1
    return code


@given(st.tuples(*[st.integers(1, 9)] * 3), st.tuples(*[st.integers(1, 5)] * 3), st.data())
def test_a_shard_holds_the_box_that_was_asked_for(blocks, block_shape, data):
    shape = tuple(
        n * b - data.draw(st.integers(0, b - 1)) for n, b in zip(blocks, block_shape, strict=True)
    )
    for shard_shape in shard_shapes(shape, block_shape):
        found = precomputed_sharding(shape, block_shape, shard_shape)
        low = found["preshift_bits"] + found["minishard_bits"]
        shards = {}
        for z, y, x in product(*map(range, blocks)):
            corner = tuple(
                i * b // s for i, b, s in zip((z, y, x), block_shape, shard_shape, strict=True)
            )
            shards.setdefault(morton((x, y, z), blocks[::-1]) >> low, set()).add(corner)
        assert all(len(corners) == 1 for corners in shards.values())
        assert len({*map(frozenset, shards.values())}) == len(shards)
        assert max(shards) < 2 ** found["shard_bits"]


def test_the_first_shard_is_a_block_and_the_last_holds_everything():
    shapes = shard_shapes((100, 200, 300), (64, 64, 64))
    assert shapes[0] == (64, 64, 64)
    assert shapes[-1] == (128, 256, 512)
    assert shapes[1:4] == [(64, 64, 128), (64, 128, 128), (128, 128, 128)]


def test_other_boxes_are_refused():
    with pytest.raises(AlignmentError, match="a shard holds 2\\^k blocks"):
        precomputed_sharding((1000, 1000, 1000), (64, 64, 64), (64, 64, 192))
