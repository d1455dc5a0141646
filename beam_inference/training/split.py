"""Training, validation and test set: blocks of voxels by consistent hashing of where they start.

A block's set depends on its start, the seed and the volume's name alone. So no block changes its
set when a volume grows, at either end, and two volumes of one place, such as an image and a better
aligned copy of it, are split in the same way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx

Subset: TypeAlias = Literal["train", "validation", "test"]
"""One of the three sets."""

SUBSETS: tuple[Subset, ...] = get_args(Subset)

_PATCHES_PER_BLOCK = 4
_BLOCKS_AT_ONCE = 2**20


def default_block_shape(patch_shapes: Sequence[Zyx]) -> Zyx:
    """The shape of blocks unless another is asked for: of four patches, the largest on each axis.

    Args:
        patch_shapes: of the samples, ZYX.
    """
    return zyx.triple(_PATCHES_PER_BLOCK * max(each) for each in zip(*patch_shapes, strict=True))


@dataclass(frozen=True, slots=True)
class Split:
    """How volumes are split into sets.

    Attributes:
        block_shape: voxels of a block, ZYX. Blocks are counted from voxel 0, also where a volume
            begins elsewhere.
        validation: share of all blocks that belong to the validation set, about.
        test: share of all blocks that belong to the test set, about.
        seed: another one gives another split.

    Raises:
        ConfigError: a share is negative, or nothing is left for training.
    """

    block_shape: Zyx
    validation: float = 0.1
    test: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.validation, self.test)
        if not all(0 <= share < 1 for share in shares) or sum(shares) >= 1:
            raise ConfigError(
                f"the split's shares are validation {self.validation:g} and test {self.test:g}; "
                "expected numbers from 0 on whose sum is below 1: the rest is for training"
            )
        if min(self.block_shape) < 1:
            raise ConfigError(
                f"the split's block_shape is {list(self.block_shape)}; expected at least one "
                "voxel on each axis"
            )

    def subsets(self, blocks: BoundingBox, name: str = "") -> NDArray[np.uint8]:
        """The sets of all blocks in a box of the grid of blocks.

        Args:
            blocks: indices of blocks, ZYX; block (0, 0, 0) starts at voxel 0.
            name: of the volume; the empty one is shared by all volumes of one place.

        Returns:
            Positions in :data:`SUBSETS` (Z, Y, X).
        """
        axes = [
            np.arange(first, last, dtype=np.int64)
            for first, last in zip(blocks.start, blocks.stop, strict=True)
        ]
        return self._subsets_at(*np.ix_(*axes), name=name)

    def contains(self, subset: Subset, box: BoundingBox, name: str = "") -> bool:
        """Whether all blocks that a box of voxels touches belong to a set."""
        found = self.subsets(box.coarsen(self.block_shape), name)
        return bool((found == SUBSETS.index(subset)).all())

    def contains_each(
        self, subset: Subset, starts: NDArray[np.int64], shape: Zyx, name: str = ""
    ) -> NDArray[np.bool_]:
        """Whether all blocks that a box touches belong to a set, for many boxes of one shape.

        Args:
            subset: the set.
            starts: first voxels of the boxes (number, 3), ZYX.
            shape: of each box, ZYX, at least one voxel on each axis.
            name: as for :meth:`subsets`.
        """
        first = starts // self.block_shape
        last = (starts + shape - 1) // self.block_shape
        left = np.arange(len(starts))
        for step in product(*(range(n + 1) for n in (last - first).max(axis=0, initial=0))):
            z, y, x = np.minimum(first[left] + step, last[left]).T
            left = left[self._subsets_at(z, y, x, name=name) == SUBSETS.index(subset)]
        inside = np.zeros(len(starts), bool)
        inside[left] = True
        return inside

    def _subsets_at(self, *indices: NDArray[np.int64], name: str) -> NDArray[np.uint8]:
        """The sets of the blocks of some indices, as positions in :data:`SUBSETS`."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        key = _mix(np.array([int.from_bytes(digest, "little") ^ self.seed], np.uint64))
        for index in indices:
            key = _mix(key ^ index.astype(np.int64).view(np.uint64))
        fraction = (key >> np.uint64(11)).astype(np.float64) * 2.0**-53
        is_held_out = fraction < self.test + self.validation
        return is_held_out.astype(np.uint8) + (fraction < self.test)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on each value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SubsetSize:
    """How much of a volume is in one set.

    Attributes:
        blocks: number of blocks, those at the volume's edge included.
        voxels: number of their voxels that are in the volume.
    """

    blocks: int
    voxels: int


def subset_sizes(split: Split, bounds: BoundingBox, name: str = "") -> dict[Subset, SubsetSize]:
    """The size of each set in a volume; in constant memory, however large the volume is.

    Args:
        split: how it is split.
        bounds: the volume's voxels.
        name: as for :meth:`Split.subsets`.
    """
    blocks = np.zeros(3, np.int64)
    voxels = [0, 0, 0]
    for part in _parts(bounds.coarsen(split.block_shape)):
        found = split.subsets(part, name)
        extents = [_extents(part, bounds, split.block_shape, axis) for axis in range(3)]
        blocks += np.bincount(found.ravel(), minlength=3)
        for index in range(3):
            counts = np.einsum(
                "zyx,z,y,x", found == index, *(each.astype(np.float64) for each in extents)
            )
            voxels[index] += round(float(counts))
    return {
        subset: SubsetSize(int(blocks[index]), voxels[index])
        for index, subset in enumerate(SUBSETS)
    }


def _parts(blocks: BoundingBox) -> Iterator[BoundingBox]:
    """A box of blocks, in boxes of at most about a million."""
    depth = max(1, _BLOCKS_AT_ONCE // max(1, math.prod(blocks.shape[1:])))
    height = max(1, _BLOCKS_AT_ONCE // max(1, blocks.shape[2]))
    for z in range(blocks.start[0], blocks.stop[0], depth):
        for y in range(blocks.start[1], blocks.stop[1], height):
            start = (z, y, blocks.start[2])
            yield BoundingBox(
                start, zyx.minimum(blocks.stop, (z + depth, y + height, blocks.stop[2]))
            )


def _extents(
    blocks: BoundingBox, bounds: BoundingBox, block_shape: Zyx, axis: int
) -> NDArray[np.int64]:
    """Voxels that each block has inside the bounds, along an axis."""
    edges = np.arange(blocks.start[axis], blocks.stop[axis] + 1) * block_shape[axis]
    inside = np.clip(edges, bounds.start[axis], bounds.stop[axis])
    return inside[1:] - inside[:-1]
