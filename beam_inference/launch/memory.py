"""Projected memory of a worker process, as a pure function of the plan's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from beam_inference.geometry.zyx import Zyx
from beam_inference.limits import (
    MASK_CACHE_BYTES,
    SEAM_FILES_AT_ONCE,
    WRITTEN_BYTES,
    cached_cutouts,
    layers_at_once,
    maximum,
    minimum,
)

KEPT_BYTES = 32 * 2**20
"""What the stores' libraries, their threads and the allocator keep beside the chunks (docs/performance.md)."""

HOLES = 0.75
"""What PyTorch leaves free on the heap between its arrays, over what these take: more or less at
random, from process to process. To map each array by itself would leave nothing free, and take half
as much time again.
"""

KEPT_BESIDE_HOLES = 14 * 2**20
"""Of :data:`KEPT_BYTES`, what does not lie in those holes."""


PINNED = 2
"""Pinned memory over what it holds, on its way to a GPU or from it: PyTorch takes powers of two."""

STORE_COPIES = 2
"""Of what the store is handed: one as blocks, one as they are encoded."""


SEAM_COPIES = 3
"""Of a seam file, which is as large, as it is written: its bytes, and two of the store's."""


@dataclass(frozen=True, slots=True)
class MemoryProjection:
    """Bytes that chunks occupy in one worker process, beyond the interpreter, its libraries and the model's weights.

    Attributes:
        host_bytes: in the machine's memory; on the CPU it includes what the device would hold.
        device_bytes: where the network runs.
    """

    host_bytes: int
    device_bytes: int


class Exchanged(NamedTuple):
    """With seams: exchange, ZYX, each axis for itself the most of all chunks: as in :class:`~.plan.Extremes`."""

    private: Zyx
    touched: Zyx
    shared: Zyx

    @property
    def shapes(self) -> tuple[Zyx, Zyx, Zyx]:
        """Of the private box; of all that a chunk is put together from; and of so much of it as is not shared.

        A chunk shares the difference of the last two at most, which grows with what it shares on
        each axis.
        """
        z, y, x = (n - more for n, more in zip(self.touched, self.shared, strict=True))
        return self.private, self.touched, (z, y, x)


def projected_memory(
    *,
    input_shape: Zyx,
    core_shape: Zyx,
    patch_input_shape: Zyx,
    input_channels: int,
    output_channels: int,
    input_itemsize: int,
    input_blocks_bytes: int,
    is_filled: bool,
    exchanged: Exchanged | None,
    output_dtype: np.dtype[Any],
    written_channels: int,
    operator_bytes: int,
    is_read_back: bool,
    is_added_up: bool,
    block_depth: int,
    batch_size: int,
    working_set_bytes: int,
    keeps_working_set: bool,
    threads: int,
    look_ahead: int,
    trailing_writes: int,
    device_is_host: bool,
    mask_piece_bytes: int,
    mask_bytes: int,
) -> MemoryProjection:
    """Peak bytes of the largest chunk of a job, all threads of a process at once.

    Shapes are ZYX, in voxels, of the largest input box, core box, and network input; with seams:
    exchange also of what chunks exchange. Harness threads take turns on the device, so there is one
    accumulator (a slab as deep as a patch; or, of float32 on the CPU, the result itself), one batch
    and one working set (what the network itself allocates for a batch, ``working_set_bytes``;
    PyTorch gives it back afterwards, other engines perhaps not, ``keeps_working_set``); but each
    thread holds its cutouts (one in use, ``look_ahead`` under way, one more if voxels outside the
    volume are filled in, ``is_filled``) and its results: one that is being computed, of several
    sums if it ``is_added_up``, and ``trailing_writes`` being written, once more if it
    ``is_read_back``, with the store's copies of :data:`WRITTEN_BYTES` of them or of a layer of
    blocks, ``block_depth`` voxels deep, or of a seam file; and pieces of the masks
    (``mask_piece_bytes`` in all). What is written is of ``written_channels``, which operators have
    made of the network's, holding ``operator_bytes`` per voxel (0 if there are none). The process
    keeps whole blocks of the input, ``input_blocks_bytes`` for each of :func:`cached_cutouts`, of
    masks (``mask_bytes`` decoded) up to :data:`MASK_CACHE_BYTES`, and :data:`KEPT_BYTES`, or
    :data:`KEPT_BESIDE_HOLES` with what PyTorch on the CPU leaves free (:data:`HOLES`).
    """
    cutout = input_channels * math.prod(input_shape) * input_itemsize
    voxels = math.prod(core_shape)
    stored = output_dtype.itemsize * written_channels
    as_float = output_dtype == np.float32
    encoded = 0 if as_float else stored  # beside what it is made of
    read_back = stored if is_read_back else 0
    written = stored + read_back
    sums = 4 * output_channels
    finishing = max(operator_bytes, 4 * written_channels + encoded) if operator_bytes else encoded

    def at_the_store(shape: Zyx) -> Any:
        layer = block_depth * math.prod(shape[1:]) * stored
        return STORE_COPIES * minimum(layer * layers_at_once(layer), math.prod(shape) * stored)

    blended_as_float = as_float or operator_bytes > 0 or is_added_up or exchanged is not None
    # the second stage, when what the first one needed is given back, but for what engines keep
    merging: Any = 0
    if exchanged is None:
        computed = sums * (2 if is_added_up else 1) + finishing if blended_as_float else stored
        results = voxels * (computed + trailing_writes * written) + trailing_writes * at_the_store(
            core_shape
        )
    else:
        private, touched, alone = (math.prod(shape) for shape in exchanged.shapes)
        shared = touched - alone
        seam_file = SEAM_COPIES * minimum(WRITTEN_BYTES, sums * shared)
        # its memory stays while the next chunk's seam files are written
        own = private * (encoded + read_back)
        private_part = private * (
            finishing - encoded + sums if operator_bytes else 0
        ) + at_the_store(exchanged.private)
        results = voxels * sums * (1 + trailing_writes) + trailing_writes * (
            own + maximum(seam_file, private_part)
        )
        # one of them is copied
        merging = minimum((SEAM_FILES_AT_ONCE + 1) * WRITTEN_BYTES, 2 * sums * shared)
        merging += trailing_writes * minimum(
            at_the_store(exchanged.touched), STORE_COPIES * shared * stored
        )
        merging += shared * (sums * (2 + look_ahead) + finishing + trailing_writes * written)
    slab = (
        output_channels * min(patch_input_shape[0], core_shape[0]) * math.prod(core_shape[1:]) * 4
    )
    batch = batch_size * (input_channels + output_channels) * math.prod(patch_input_shape) * 4
    # weights, weighted, two uniform answers
    patches = (3 * output_channels + 1) * math.prod(patch_input_shape) * 4
    device = (
        cutout
        + batch
        + patches
        + working_set_bytes
        + (0 if blended_as_float and device_is_host else slab)
    )
    leaving = slab if blended_as_float else slab // 4 * output_dtype.itemsize
    is_on_heap = device_is_host and not keeps_working_set
    computing = KEPT_BESIDE_HOLES + round(HOLES * working_set_bytes) if is_on_heap else KEPT_BYTES
    computing += threads * ((1 + look_ahead + is_filled) * cutout + results)
    if device_is_host:  # the accumulator and the cutout are used where they lie
        computing += device - cutout
        kept = patches + (working_set_bytes if keeps_working_set else 0)
    else:
        # what is pinned for cutouts grows with them, and stays
        kept = PINNED * (leaving + 2 * cutout)
        computing += kept
    if exchanged is not None:
        computing = maximum(computing, KEPT_BYTES + threads * merging + kept)
    host = computing + cached_cutouts(threads) * input_blocks_bytes
    host += threads * mask_piece_bytes + min(MASK_CACHE_BYTES, mask_bytes)
    # one cutout is sent to a GPU ahead
    there = device if device_is_host else device + cutout + leaving
    return MemoryProjection(host_bytes=host, device_bytes=there)
