"""A bound on what one block of a volume may take in memory.

A block is decoded as a whole, however few of its voxels are read. A few bytes of metadata can state
blocks of any size, and TensorStore and other libraries end the process that cannot hold one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from beam_inference.environment import format_bytes, usable_memory
from beam_inference.errors import VolumeError

_COPIES = 2
"""Copies of a block while it is read: as decoded, and in the library that decodes it."""


def check_block_memory(name: str, shape: Iterable[int | None], itemsize: int) -> None:
    """Refuse blocks that this machine cannot decode.

    Args:
        name: the volume's name in messages.
        shape: extents of a block; None where any extent will do.
        itemsize: bytes of each of its values.

    Raises:
        VolumeError: there is no room for one.
    """
    nbytes = itemsize * math.prod(max(1, extent or 1) for extent in shape)
    memory = usable_memory()
    if _COPIES * nbytes > memory:
        raise VolumeError(
            f"each block of {name} takes {format_bytes(nbytes)} of memory, {_COPIES} times, to "
            f"read any voxel of it; there are {format_bytes(memory)}. If its metadata are right, "
            "copy it into smaller blocks on a larger machine; else it is damaged."
        )
