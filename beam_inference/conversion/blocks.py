"""Conversion into a volume of blocks: one stage of chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from beam_inference.beam.stages import DoChunk
from beam_inference.config.formats import OutputSpec
from beam_inference.conversion.copying import ChunkShapes, choose_chunk_shapes, copy, moved
from beam_inference.conversion.protocol import Source
from beam_inference.errors import WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.outputs import open_output

_EDGE = 64
_SMALLEST = 16


@dataclass(frozen=True)
class CopyBlocks:
    """The stage that copies a source into a volume; a ChunkStage.

    Attributes:
        source: what is read.
        target: what is written, and exists when the stage begins.
        box: where in the target the source's voxels come to lie.
    """

    source: Source
    target: OutputSpec
    box: BoundingBox

    @property
    def name(self) -> str:
        """Of the stage."""
        return "copy"

    @property
    def shapes(self) -> ChunkShapes:
        """How the source is cut, into whole shards or blocks."""
        return choose_chunk_shapes(self.source.info, self.target.write_shape)

    @property
    def grid(self) -> ChunkGrid:
        """The chunks, on the target's blocks: the first ones may begin before the box."""
        origin = self.target.bounds.start
        block = self.target.write_shape
        start = tuple(
            o + (a - o) // b * b for a, o, b in zip(self.box.start, origin, block, strict=True)
        )
        return ChunkGrid(BoundingBox(start, self.box.stop), self.shapes.chunk)  # type: ignore[arg-type]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.grid.count

    def make_worker(self) -> DoChunk:
        """Open both; what is returned copies one chunk."""
        read = self.source.open()
        volume = open_output(self.target)
        if volume is None:
            raise WorkerFault(f"the target {self.target.url} is gone")
        start = self.source.info.bounds.start
        back: Zyx = (
            start[0] - self.box.start[0],
            start[1] - self.box.start[1],
            start[2] - self.box.start[2],
        )

        def read_moved(box: BoundingBox) -> NDArray[Any]:
            return read(moved(box, back))

        def do(index: int) -> None:
            box = self.grid.core_box(index).intersection(self.box)
            if box.size:
                copy(read_moved, volume.write, box, self.shapes, self.source.info)

        return do


def default_block_shape(shape: Zyx, voxel_size_nm: tuple[float, float, float]) -> Zyx:
    """Blocks of some 64³ voxels: cubes of space, as far as powers of two go; not deeper than the volume.

    >>> default_block_shape((500, 2000, 2000), (8, 8, 8)), default_block_shape((500, 2000, 2000), (40, 4, 4))
    ((64, 64, 64), (16, 128, 128))
    """
    ratio = voxel_size_nm[0] / min(voxel_size_nm[1:])
    z, yx = (_EDGE, _EDGE) if ratio < 4 else (_SMALLEST, 2 * _EDGE)
    while z >= 2 * shape[0] and z > 1:
        z //= 2
    if z <= _SMALLEST:
        yx = 2 * _EDGE
    return (z, yx, yx)
