"""How a source is cut into chunks, and how one is copied in bounded memory.

What a source decodes together, its grain, is decoded once as far as memory allows: a chunk covers grains and blocks::

    grain 1 × Y × X (a slice), blocks 64³           grain and blocks of a few voxels
    ┌──────────────────────┐                        ┌─────┬─────┬─────┐
    │ 64 slices, whole     │ 64                     │     │     │     │  some 64 MiB each
    ├──────────────────────┤                        ├─────┼─────┼─────┤
    │ the next 64          │ 64                     │     │     │     │
    └──────────────────────┘                        └─────┴─────┴─────┘

A slab of slices that is too large for memory is decoded slice by slice into a file without a name, and read from there
window by window. Where a grain is deeper than a slice and too large, it is read as often as windows need it.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.protocol import Read, SourceInfo
from beam_inference.conversion.raw_array import RawLayout
from beam_inference.errors import WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, ceil_div

WINDOW_BYTES = 64 * 2**20
"""What is held of a source at a time, by each thread; a single slice or block may be larger."""

Put = Callable[[BoundingBox, NDArray[Any]], None]


@dataclass(frozen=True, slots=True)
class ChunkShapes:
    """Shapes, ZYX, each whole blocks.

    Attributes:
        chunk: what is done at a time, and recorded.
        window: what is held in memory at a time; equal to the chunk where that is small enough.
    """

    chunk: Zyx
    window: Zyx

    def scratch_bytes(self, info: SourceInfo) -> int:
        """What a chunk needs of disk; 0 where it is held in memory."""
        if self.chunk == self.window:
            return 0
        return (
            math.prod(min(c, n) for c, n in zip(self.chunk, info.bounds.shape, strict=True))
            * info.itemsize
        )


def choose_chunk_shapes(info: SourceInfo, block_shape: Zyx) -> ChunkShapes:
    """Chunks of a source for a target with such blocks."""
    extent = _zyx(_up(n, b) for n, b in zip(info.bounds.shape, block_shape, strict=True))
    grain = _zyx(_up(g, b) for g, b in zip(info.grain, block_shape, strict=True))
    chunk = _zyx(min(g, e) for g, e in zip(grain, extent, strict=True))
    window = _shrunk(chunk, block_shape, info.itemsize)
    if window != chunk:
        return ChunkShapes(chunk if info.grain[0] == 1 else window, window)
    grown = list(chunk)
    for axis in (2, 1, 0):
        times = max(1, WINDOW_BYTES // (math.prod(grown) * info.itemsize))
        grown[axis] = min(grown[axis] * times, extent[axis])
    chunk = _zyx(grown)
    return ChunkShapes(chunk, chunk)


def _shrunk(shape: Zyx, block: Zyx, itemsize: int) -> Zyx:
    """A shape of whole blocks that fits a window, halved along y, then x, then z; a block at least."""
    shrunk = list(shape)
    while math.prod(shrunk) * itemsize > WINDOW_BYTES:
        axis = next((a for a in (1, 2, 0) if shrunk[a] > block[a]), None)
        if axis is None:
            break
        shrunk[axis] = _up(ceil_div(shrunk[axis], 2), block[axis])
    return _zyx(shrunk)


def copy(read: Read, put: Put, box: BoundingBox, shapes: ChunkShapes, info: SourceInfo) -> None:
    """Copy a chunk of a source, window by window.

    Raises:
        WorkerFault: there is no space for a slab that does not fit into memory.
    """
    size = box.size * info.itemsize
    if all(n <= w for n, w in zip(box.shape, shapes.window, strict=True)):
        put(box, read(box))
        return
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise WorkerFault(
            f"{folder} has {free / 2**30:.1f} GiB left; {box} needs {size / 2**30:.1f} GiB there. "
            "Set TMPDIR to a folder with more space, or choose blocks that are flatter."
        )
    layout = RawLayout(np.dtype(info.dtype).str, (info.channels, *box.shape), "CZYX", 0)
    with tempfile.TemporaryFile() as file:
        file.truncate(layout.stop)
        depth = max(1, WINDOW_BYTES // (size // box.shape[0]))
        for slab in _boxes(box, (depth, *box.shape[1:])):
            layout.write(file, _within(slab, box), read(slab))
        for window in _boxes(box, shapes.window):
            put(window, layout.read(file, _within(window, box)))


def _boxes(box: BoundingBox, shape: Zyx) -> Iterator[BoundingBox]:
    grid = ChunkGrid(box, shape)
    return map(grid.core_box, range(grid.count))


def _within(box: BoundingBox, frame: BoundingBox) -> BoundingBox:
    return moved(box, _zyx(-start for start in frame.start))


def moved(box: BoundingBox, by: Zyx) -> BoundingBox:
    """The box, each voxel of it moved."""
    start, stop = (
        _zyx(a + b for a, b in zip(point, by, strict=True)) for point in (box.start, box.stop)
    )
    return BoundingBox(start, stop)


def _up(n: int, unit: int) -> int:
    return ceil_div(n, unit) * unit


def _zyx(values: Iterator[int] | list[int]) -> Zyx:
    z, y, x = values
    return (z, y, x)
