"""Which blocks a shard of a precomputed volume holds, by pure arithmetic.

Neuroglancer numbers the blocks of a scale by the compressed Morton code of their position: bit 0 of
    x, of y, of z, then bit 1 of x and so on, leaving out an axis once its bits are used up. Blocks
    whose codes differ in the low bits alone share a shard. (Specification: "Neuroglancer
    Precomputed volume format", sharded format, chunk identifiers.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

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


_Numbers = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Sharding:
    """In which shard, and which list of it, each block of a precomputed scale is.

    Attributes:
        blocks: number of blocks along each axis, ZYX.
        preshift_bits: low bits of the number of a block that decide nothing.
        minishard_bits: bits that give its list, its minishard.
        shard_bits: bits above these that give its shard.
        is_hashed: whether these bits are of a hash, MurmurHash3_x86_128, of the number.
        is_index_packed: whether lists are packed by gzip.
    """

    blocks: Zyx
    preshift_bits: int
    minishard_bits: int
    shard_bits: int
    is_hashed: bool
    is_index_packed: bool

    @staticmethod
    def of(scale: Json) -> Sharding:
        """As the metadata of a scale that has shards state it."""
        stated = scale["sharding"]
        return Sharding(
            blocks=ChunkGrid(*_bounds_and_blocks(scale)).shape,
            preshift_bits=stated["preshift_bits"],
            minishard_bits=stated["minishard_bits"],
            shard_bits=stated["shard_bits"],
            is_hashed=stated["hash"] != "identity",
            is_index_packed=stated.get("minishard_index_encoding") == "gzip",
        )

    @property
    def shards(self) -> int:
        """Number of shards."""
        return 1 << self.shard_bits

    @property
    def minishards(self) -> int:
        """Number of lists in each shard."""
        return 1 << self.minishard_bits

    @property
    def low_bits(self) -> int:
        """How many bits of the numbers of a shard's blocks differ, where they are not hashed."""
        return self.preshift_bits + self.minishard_bits

    @property
    def number_bits(self) -> int:
        """Bits of the numbers of blocks."""
        return sum((count - 1).bit_length() for count in self.blocks)

    @property
    def most_listed(self) -> int:
        """Number of blocks in a list, at most."""
        total = self.blocks[0] * self.blocks[1] * self.blocks[2]
        if self.is_hashed:
            return total
        unused = self.number_bits - self.minishard_bits - self.shard_bits
        return min(total, 1 << max(self.preshift_bits, unused))

    def name(self, shard: int) -> str:
        """Name of a shard's file."""
        return f"{shard:0{ceil_div(self.shard_bits, 4)}x}.shard"

    def places(self, numbers: _Numbers) -> tuple[_Numbers, _Numbers]:
        """The shard of each block of a number, and its list there."""
        values = numbers >> np.uint64(min(self.preshift_bits, 63))
        values = _murmur_hash(values) if self.is_hashed else values
        minishards = values & np.uint64(self.minishards - 1)
        shards = values >> np.uint64(self.minishard_bits) & np.uint64(self.shards - 1)
        return shards, minishards

    def are_blocks(self, numbers: _Numbers) -> NDArray[np.bool_]:
        """Whether numbers are those of blocks of the volume, by the compressed Morton code."""
        rest = numbers.copy()
        positions = [np.zeros_like(numbers) for _ in range(3)]
        for level in range(max(self.blocks).bit_length()):
            for axis in (2, 1, 0):
                if 2**level < self.blocks[axis]:
                    positions[axis] |= (rest & np.uint64(1)) << np.uint64(level)
                    rest >>= np.uint64(1)
        inside: NDArray[np.bool_] = rest == 0
        for position, count in zip(positions, self.blocks, strict=True):
            inside &= position < count
        return inside


def _murmur_hash(values: _Numbers) -> _Numbers:
    """The low 64 bits of MurmurHash3_x86_128 of integers of 8 bytes, with seed 0.

    The algorithm is Austin Appleby's, in the public domain.
    """
    second = _mixed(values >> np.uint64(32), 0xAB0E9789, 16, 0x38B34AE5)
    first = _mixed(values & _LOW, 0x239B961B, 15, 0xAB0E9789)
    length = np.uint64(8)
    parts = [first ^ length, second ^ length, *[np.full_like(values, length)] * 2]
    parts = _added(map(_finished, _added(parts)))
    return parts[0] | parts[1] << np.uint64(32)


_LOW = np.uint64(0xFFFFFFFF)


def _mixed(part: _Numbers, factor: int, turn: int, second_factor: int) -> _Numbers:
    part = part * np.uint64(factor) & _LOW
    part = (part << np.uint64(turn) | part >> np.uint64(32 - turn)) & _LOW
    return part * np.uint64(second_factor) & _LOW


def _added(parts: Iterable[_Numbers]) -> list[_Numbers]:
    """The first part with the others added, and each of these with that sum added."""
    first, *others = parts
    for other in others:
        first = first + other & _LOW
    return [first, *(other + first & _LOW for other in others)]


def _finished(part: _Numbers) -> _Numbers:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        part = (part ^ part >> np.uint64(shift)) * np.uint64(factor) & _LOW
    return part ^ part >> np.uint64(16)


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
    sharding = Sharding.of(scale)
    if sharding.is_hashed:
        return
    bounds, block_shape = _bounds_and_blocks(scale)
    shards = ChunkGrid(bounds, stored_shard_shape(scale))
    for position in _positions(shards, box):
        part = shards.core_box(shards.index(position)).intersection(box)
        steps = zyx.triple(
            p * n // b for p, n, b in zip(position, shards.chunk_shape, block_shape, strict=True)
        )
        yield (
            f"{scale['key']}/{sharding.name(_morton(steps, sharding.blocks) >> sharding.low_bits)}",
            part,
        )


def shard_keys(scale: Json, box: BoundingBox) -> Iterator[str]:
    """Keys of the shards that a box touches, whether or not numbers of blocks are hashed."""
    sharding = Sharding.of(scale)
    if not sharding.is_hashed and sharding.number_bits <= sharding.low_bits + sharding.shard_bits:
        yield from (key for key, _ in shards_in(scale, box))
        return
    numbers = np.array([number for number, _ in numbered_blocks(scale, box)], np.uint64)
    shards, _ = sharding.places(numbers)
    for shard in np.unique(shards).tolist():
        yield f"{scale['key']}/{sharding.name(shard)}"


def stored_shard_shape(scale: Json) -> Zyx:
    """Shape of the shards of a scale, ZYX; where the last end does not count."""
    bounds, block_shape = _bounds_and_blocks(scale)
    shapes = shard_shapes(bounds.shape, block_shape)
    # there may be more bits than blocks
    return shapes[min(Sharding.of(scale).low_bits, len(shapes) - 1)]


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
