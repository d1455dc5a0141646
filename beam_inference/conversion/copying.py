"""The shapes of chunks in which a source is copied, and the copying itself, in bounded memory.

The voxels that a source decodes together, its grain, are decoded once as far as memory allows: a
chunk covers whole grains and whole blocks::

    grain 1 × Y × X (a slice), blocks 64³           grain and blocks of a few voxels
    ┌──────────────────────┐                        ┌─────┬─────┬─────┐
    │ 64 slices, whole     │ 64                     │     │     │     │  some 64 MiB each
    ├──────────────────────┤                        ├─────┼─────┼─────┤
    │ the next 64          │ 64                     │     │     │     │
    └──────────────────────┘                        └─────┴─────┴─────┘

A slab of slices that is too large for memory is decoded slice by slice into a file without a name,
and read from there window by window. Where a grain is deeper than a slice and too large for memory,
it is read once for each window that needs it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from beam_inference.conversion.protocol import Read, SourceInfo, Voxels
from beam_inference.conversion.raw_array import RawLayout, reserve
from beam_inference.environment import format_bytes
from beam_inference.errors import WorkerFault
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx

WINDOW_BYTES = 64 * 2**20
"""Bytes of a source that each thread holds at a time; a single slice or block may be larger."""

Put = Callable[[BoundingBox, Voxels], None]


@dataclass(frozen=True, slots=True)
class ChunkShapes:
    """Shapes in which a source is copied, ZYX, each of whole blocks.

    Attributes:
        chunk: the unit of work that is recorded as done.
        window: the voxels held in memory at a time; equal to the chunk where that is small enough.
    """

    chunk: Zyx
    window: Zyx

    def held_bytes(self, info: SourceInfo) -> int:
        """Bytes of the source that a thread holds in memory at a time.

        A grain that is larger than the window is decoded whole, beside it.
        """
        window, grain = (
            math.prod(zyx.minimum(shape, info.bounds.shape)) * info.held_bytes
            for shape in (self.window, info.grain)
        )
        return window if grain <= window else window + grain

    def scratch_bytes(self, info: SourceInfo) -> int:
        """Bytes of disk that a chunk needs; 0 where it is held in memory."""
        if self.chunk == self.window:
            return 0
        return math.prod(zyx.minimum(self.chunk, info.bounds.shape)) * info.itemsize


def choose_chunk_shapes(
    info: SourceInfo, block_shape: Zyx, window_bytes: int = WINDOW_BYTES
) -> ChunkShapes:
    """The shapes in which to copy a source into a target with blocks of ``block_shape``, ZYX."""
    extent = zyx.round_up_each(info.bounds.shape, block_shape)
    grain = zyx.round_up_each(info.grain, block_shape)
    chunk = zyx.minimum(grain, extent)
    window = _shrink(chunk, block_shape, info.held_bytes, window_bytes)
    if window != chunk:
        # Only slices can be decoded one after the other into a file.
        return ChunkShapes(chunk if info.grain[0] == 1 else window, window)
    for axis in (2, 1, 0):
        times = max(1, window_bytes // (math.prod(chunk) * info.held_bytes))
        chunk = zyx.with_axis(chunk, axis, min(chunk[axis] * times, extent[axis]))
    return ChunkShapes(chunk, chunk)


def _shrink(shape: Zyx, block: Zyx, itemsize: int, window_bytes: int) -> Zyx:
    """Halve a shape along y, then x, then z, until it fits a window or is a single block."""
    while math.prod(shape) * itemsize > window_bytes:
        axis = next((a for a in (1, 2, 0) if shape[a] > block[a]), None)
        if axis is None:
            break
        half = zyx.ceil_div(shape[axis], 2)
        shape = zyx.with_axis(shape, axis, zyx.round_up(half, block[axis]))
    return shape


def copy(
    read: Read,
    put: Put,
    box: BoundingBox,
    shapes: ChunkShapes,
    info: SourceInfo,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Copy the chunk ``box`` of a source, window by window.

    Raises:
        WorkerFault: there is no space for a slab that does not fit into memory.
    """
    if all(n <= w for n, w in zip(box.shape, shapes.window, strict=True)):
        put(box, read(box))
        return
    size = box.size * info.itemsize
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    shortage = WorkerFault(
        f"{folder} has {format_bytes(free)} left; {box} needs {format_bytes(size)} there. Set "
        "TMPDIR to a folder with more space, or choose blocks that are flatter."
    )
    if size > free:
        raise shortage
    layout = RawLayout(np.dtype(info.dtype).str, (info.channels, *box.shape), "CZYX", 0)
    to_file = zyx.negative(box.start)
    with tempfile.TemporaryFile() as file:
        try:
            reserve(file, layout.stop)
        except OSError:
            raise shortage from None
        depth = max(1, window_bytes // (size // box.shape[0]))
        for slab in _boxes(box, zyx.with_axis(box.shape, 0, depth)):
            layout.write(file, slab.translate(to_file), read(slab))
        for window in _boxes(box, shapes.window):
            put(window, layout.read(file, window.translate(to_file)))


def _boxes(box: BoundingBox, shape: Zyx) -> Iterator[BoundingBox]:
    grid = ChunkGrid(box, shape)
    return map(grid.core_box, range(grid.count))
