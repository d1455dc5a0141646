"""The stage that copies a source into a volume of blocks, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

from beam_inference.config.formats import OutputSpec
from beam_inference.conversion.copying import (
    WINDOW_BYTES,
    ChunkShapes,
    choose_chunk_shapes,
    copy,
)
from beam_inference.conversion.protocol import Source, Voxels
from beam_inference.errors import WorkerFault
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.job.stage_job import DoChunk
from beam_inference.job.stage_witnesses import Testimony, is_same
from beam_inference.volumes.outputs import LOSSY, open_output

_CUBE_EDGE = 64
_FLAT_DEPTH = 16
_FLAT_EDGE = 128


@dataclass(frozen=True)
class CopyBlocks:
    """The stage that copies a source into a volume; a ChunkStage.

    Attributes:
        source: the volume to read.
        target: the volume to write; it exists when the stage begins.
        box: where in the target the source's voxels are to lie.
        window_bytes: bytes of the source that a thread holds at a time.
    """

    source: Source
    target: OutputSpec
    box: BoundingBox
    window_bytes: int = WINDOW_BYTES

    @property
    def name(self) -> str:
        """Name of the stage."""
        return "copy"

    @property
    def shapes(self) -> ChunkShapes:
        """The shapes of chunks and windows: whole shards or blocks of the target."""
        return choose_chunk_shapes(self.source.info, self.target.write_shape, self.window_bytes)

    @property
    def grid(self) -> ChunkGrid:
        """The chunks, aligned with the target's blocks: the first may begin before the box."""
        origin = self.target.bounds.start
        block = self.target.write_shape
        start = zyx.triple(
            o + (a - o) // b * b for a, o, b in zip(self.box.start, origin, block, strict=True)
        )
        return ChunkGrid(BoundingBox(start, self.box.stop), self.shapes.chunk)

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.grid.count

    def make_worker(self) -> DoChunk:
        """Open source and target; the function returned copies one chunk."""
        read = self.source.open()
        volume = open_output(self.target)
        if volume is None:
            raise WorkerFault(f"the target {self.target.url} is gone")
        info = self.source.info
        to_source = zyx.subtract(info.bounds.start, self.box.start)
        shapes = self.shapes
        grid = self.grid

        def read_for_target(box: BoundingBox) -> Voxels:
            return read(box.translate(to_source))

        def copy_chunk(index: int) -> None:
            box = grid.core_box(index).intersection(self.box)
            if box.size:
                copy(read_for_target, volume.write, box, shapes, info, self.window_bytes)

        return copy_chunk

    def hear_witnesses(self) -> Testimony:
        """Open source and target; the function returned compares a chunk's first window."""
        read = self.source.open()
        volume = open_output(self.target)
        if volume is None:
            return lambda _: False
        to_source = zyx.subtract(self.source.info.bounds.start, self.box.start)
        grid = self.grid

        def holds(index: int) -> bool:
            box = grid.core_box(index).intersection(self.box)
            stop = zyx.minimum(box.stop, zyx.add(box.start, self.shapes.window))
            window = BoundingBox(box.start, stop)
            found = volume.read(window)
            wanted = read(window.translate(to_source))
            if self.target.encoding in LOSSY:
                return bool(found.any() == wanted.any())
            return is_same(found, wanted)

        return holds


def default_block_shape(shape: Zyx, voxel_size_nm: VoxelSizeNm) -> Zyx:
    """A shape of blocks, ZYX, of some 64³ voxels, not much deeper than the volume.

    Blocks are cubes in space as far as powers of two go: flat where sections are thick.

    >>> default_block_shape((500, 2000, 2000), (8, 8, 8))
    (64, 64, 64)
    >>> default_block_shape((500, 2000, 2000), (40, 4, 4))
    (16, 128, 128)
    """
    is_anisotropic = voxel_size_nm[0] / min(voxel_size_nm[1:]) >= 4
    depth = _FLAT_DEPTH if is_anisotropic else _CUBE_EDGE
    while depth >= 2 * shape[0] and depth > 1:
        depth //= 2
    edge = _FLAT_EDGE if depth <= _FLAT_DEPTH else _CUBE_EDGE
    return (depth, edge, edge)
