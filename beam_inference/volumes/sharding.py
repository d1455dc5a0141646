"""Which blocks a shard of a precomputed volume holds, by pure arithmetic.

Neuroglancer numbers the blocks of a scale by the compressed Morton code of their position: bit 0 of
    x, of y, of z, then bit 1 of x and so on, leaving out an axis once its bits are used up. Blocks
    whose codes differ in the low bits alone share a shard. (Specification: "Neuroglancer
    Precomputed volume format", sharded format, chunk identifiers.)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.errors import AlignmentError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, ceil_div

_PRESHIFT_BITS = 9
"""One entry of a shard's index lists at most 2 to this power blocks.

Reading a block then takes two small requests.
"""


def shard_shapes(shape: Zyx, block_shape: Zyx) -> list[Zyx]:
    """Shapes of a shard, ZYX, for 0, 1, 2 … low bits, until one shard holds the volume.

    Args:
        shape: extent of the volume, ZYX.
        block_shape: ZYX.
    """
    blocks = ChunkGrid(BoundingBox((0, 0, 0), shape), block_shape).shape
    all_bits = [(count - 1).bit_length() for count in blocks]
    bits = [0, 0, 0]
    shapes = [block_shape]
    for bit in range(max(all_bits)):
        for axis in (2, 1, 0):  # x first
            if bit < all_bits[axis]:
                bits[axis] += 1
                z, y, x = (block << count for block, count in zip(block_shape, bits, strict=True))
                shapes.append((z, y, x))
    return shapes


def precomputed_sharding(shape: Zyx, block_shape: Zyx, shard_shape: Zyx) -> Json:
    """The ``sharding`` member of a scale, for shards of a shape; all ZYX, in voxels.

    Raises:
        AlignmentError: no number of bits gives that box; the message names some that can be had.
    """
    possible = shard_shapes(shape, block_shape)
    if shard_shape not in possible:
        wanted = _volume(shard_shape)
        near = sorted(
            possible, key=lambda each: max(_volume(each) / wanted, wanted / _volume(each))
        )[:3]
        fits = " or ".join(str(list(each)) for each in sorted(near))
        raise AlignmentError(
            f"output.shard_shape {list(shard_shape)} is not a shard of a precomputed volume of "
            f"{list(shape)} voxels in blocks of {list(block_shape)}: a shard holds 2^k blocks, "
            f"and its axes grow in turn. Nearest: {fits}."
        )
    bits = possible.index(shard_shape)
    all_bits = len(possible) - 1
    preshift = min(bits, _PRESHIFT_BITS)
    return {
        "@type": "neuroglancer_uint64_sharded_v1",
        "preshift_bits": preshift,
        "minishard_bits": bits - preshift,
        "shard_bits": all_bits - bits,
        "hash": "identity",
        "minishard_index_encoding": "gzip",
        "data_encoding": "gzip",
    }


def blank_shards(scale: Json, box: BoundingBox, array: AnyArray) -> list[str]:
    """Keys of the shards in which nothing but zeros is written.

    Args:
        scale: the scale's metadata.
        box: what is written.
        array: the values of all of it (C, Z, Y, X).
    """
    return [
        key
        for key, part in shards_in(scale, box)
        if not np.any(array[(slice(None), *part.slices_in(box))])
    ]


def shards_in(scale: Json, box: BoundingBox) -> Iterator[tuple[str, BoundingBox]]:
    """Keys of the shards that a box touches, and what it has of each.

    There are none where the numbers of blocks are hashed, as never here.

    Args:
        scale: the scale's metadata.
        box: the box.
    """
    if scale["sharding"]["hash"] != "identity":
        return
    bounds, block_shape = _bounds_and_blocks(scale)
    sharding = scale["sharding"]
    shards = ChunkGrid(bounds, stored_shard_shape(scale))
    blocks = ChunkGrid(bounds, block_shape).shape
    low = _low_bits(sharding)
    for position in _positions(shards, box):
        part = shards.core_box(shards.index(position)).intersection(box)
        steps = zyx.triple(
            p * n // b for p, n, b in zip(position, shards.chunk_shape, block_shape, strict=True)
        )
        number = _morton(steps, blocks) >> low
        yield f"{scale['key']}/{number:0{ceil_div(sharding['shard_bits'], 4)}x}.shard", part


def stored_shard_shape(scale: Json) -> Zyx:
    """Shape of the shards of a scale, ZYX; where the last end does not count."""
    bounds, block_shape = _bounds_and_blocks(scale)
    shapes = shard_shapes(bounds.shape, block_shape)
    # there may be more bits than blocks
    return shapes[min(_low_bits(scale["sharding"]), len(shapes) - 1)]


def _low_bits(sharding: Json) -> int:
    """How many bits of the numbers of a shard's blocks differ."""
    return int(sharding["preshift_bits"] + sharding["minishard_bits"])


def numbered_blocks(scale: Json, box: BoundingBox) -> Iterator[tuple[int, BoundingBox]]:
    """Numbers of the blocks that a box touches, and what it has of each.

    Args:
        scale: the scale's metadata.
        box: the box.
    """
    blocks = ChunkGrid(*_bounds_and_blocks(scale))
    for position in _positions(blocks, box):
        part = blocks.core_box(blocks.index(position)).intersection(box)
        yield _morton(position, blocks.shape), part


def _bounds_and_blocks(scale: Json) -> tuple[BoundingBox, Zyx]:
    """A scale's extent and the shape of its blocks, ZYX."""
    start = zyx.triple(scale["voxel_offset"][::-1])
    stop = zyx.add(start, zyx.triple(scale["size"][::-1]))
    return BoundingBox(start, stop), zyx.triple(scale["chunk_size"][::-1])


def _positions(grid: ChunkGrid, box: BoundingBox) -> Iterator[Zyx]:
    """Positions in a grid of the cells that a box touches."""
    first, last = (
        [(at - a) // n for at, a, n in zip(corner, grid.roi.start, grid.chunk_shape, strict=True)]
        for corner in (box.start, tuple(stop - 1 for stop in box.stop))
    )
    for position in product(*(range(a, b + 1) for a, b in zip(first, last, strict=True))):
        yield zyx.triple(position)


def _morton(position: Zyx, blocks: Zyx) -> int:
    """The compressed Morton code of a block, ZYX."""
    code = bit = 0
    for level in range(max(blocks).bit_length()):
        for axis in (2, 1, 0):
            if 2**level < blocks[axis]:
                code |= (position[axis] >> level & 1) << bit
                bit += 1
    return code


def _volume(shape: Zyx) -> int:
    return shape[0] * shape[1] * shape[2]
