"""Projected memory of a worker process, as a pure function of the plan's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from beam_inference.bounding_box import Zyx

CACHED_CUTOUTS = 2
"""Input that a process keeps, as decoded blocks: what the next chunk of each of two runs may read again."""

MASK_CACHE_BYTES = 2**26
"""Decoded blocks of masks that a process keeps at most: a chunk's are asked for more than once."""

KEPT_BYTES = 64 * 2**20
"""What the stores' libraries, their threads and the allocator keep beside the chunks: 35 to 60 MB were measured, for
jobs of a few thousand chunks, and where a large network leaves holes in the heap (docs/performance.md)."""


def blocks_touched(shape: Zyx, block_shape: Zyx) -> Zyx:
    """The voxels, ZYX, of all blocks that a box of a shape touches, wherever it lies."""
    z, y, x = ((-(-(n - 1) // b) + 1) * b for n, b in zip(shape, block_shape, strict=True))
    return (z, y, x)


@dataclass(frozen=True, slots=True)
class MemoryProjection:
    """Bytes that chunks occupy in one worker process, beyond the interpreter, its libraries and the model's weights.

    Attributes:
        host_bytes: in the machine's memory; on the CPU it includes what the device would hold.
        device_bytes: where the network runs.
    """

    host_bytes: int
    device_bytes: int


def projected_memory(
    *,
    input_shape: Zyx,
    core_shape: Zyx,
    patch_input_shape: Zyx,
    input_channels: int,
    output_channels: int,
    input_itemsize: int,
    input_blocks_bytes: int,
    output_itemsize: int,
    batch_size: int,
    working_set_bytes: int,
    threads: int,
    look_ahead: int,
    trailing_writes: int,
    device_is_host: bool,
    mask_piece_bytes: int,
    mask_bytes: int,
) -> MemoryProjection:
    """Peak bytes of the largest chunk of a job, all threads of a process at once.

    Shapes are ZYX, in voxels, of the largest input box, core box, and network input. Harness threads take turns on the
    device, so there is one accumulator (a slab as deep as a patch), one batch and one working set (what the network
    itself allocates for a batch, ``working_set_bytes``); but each thread holds its cutouts (one in use, ``look_ahead``
    under way, one more while voxels outside the volume are filled in), the whole blocks that it reads
    (``input_blocks_bytes``) and its results (one new, and ``trailing_writes`` being written, each once more as the
    store's own blocks), and pieces of the masks (``mask_piece_bytes`` in all). The process keeps the blocks of
    :data:`CACHED_CUTOUTS` more, of masks (``mask_bytes`` decoded) up to :data:`MASK_CACHE_BYTES`, and
    :data:`KEPT_BYTES`.
    """
    cutout = input_channels * math.prod(input_shape) * input_itemsize
    result = output_channels * math.prod(core_shape) * output_itemsize
    slab = output_channels * min(patch_input_shape[0], core_shape[0]) * math.prod(core_shape[1:]) * 4
    batch = batch_size * (input_channels + output_channels) * math.prod(patch_input_shape) * 4
    patches = 3 * output_channels * math.prod(patch_input_shape) * 4  # one weighted, two answers to uniform ones
    device = cutout + slab + batch + patches + working_set_bytes
    host = KEPT_BYTES + threads * ((2 + look_ahead) * cutout + (1 + 2 * trailing_writes) * result)
    host += (threads + CACHED_CUTOUTS) * input_blocks_bytes
    host += threads * mask_piece_bytes + min(MASK_CACHE_BYTES, mask_bytes)
    # On the CPU the accumulator and the cutout are used where they lie; a GPU's accumulator comes back in slabs.
    host += device - cutout if device_is_host else slab
    return MemoryProjection(host_bytes=host, device_bytes=device)
