"""What all jobs of labels have in common, from what a user asks for; everything is checked, and nothing is created."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.config.fields import refuse_credentials
from beam_inference.config.formats import OutputSpec, get_format, sharded_formats
from beam_inference.config.storage import Storage
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.segmentation.labelling import cc3d_library
from beam_inference.segmentation.plans import LabelPlan
from beam_inference.volumes.kvstores import place_of_url
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import check_output, default_bounds, open_output
from beam_inference.volumes.volume import Volume

_BLOCK_SIDE = 64
_LABEL_ENCODING = "compressed_segmentation"
_MOST_VOXELS = 2**31
"""Of a chunk: its labels are 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an output is to be laid out, and made.

    Attributes:
        format: see :class:`~beam_inference.config.formats.OutputSpec`.
        chunk_shape: what is done at once, ZYX; None for what a kind of job takes by default.
        block_shape: ZYX; None for the input's.
        shard_shape: ZYX; None for a file a block.
    """

    format: str = "precomputed"
    chunk_shape: Zyx | None = None
    block_shape: Zyx | None = None
    shard_shape: Zyx | None = None


def open_input(source: str, target: str, scale: int, storage: Storage) -> Volume:
    """The input, of which an output can be made elsewhere.

    Raises:
        UserError: it cannot be read, or lacks its voxel size, or is the output; or a library is not
            installed.
    """
    cc3d_library()
    for url in (source, target):
        try:
            refuse_credentials(url)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    volume = open_volume(source, scale=scale, storage=storage)
    if volume.voxel_size_nm is None:
        raise VolumeError(
            f"{source} does not state its voxel size, which the output and the table need"
        )
    if volume.place == place_of_url(target, storage):
        raise ConfigError(f"input and output are the same place: {target}")
    return volume


def plan_output(
    volume: Volume, target: str, layout: Layout, side: int, storage: Storage
) -> tuple[OutputSpec, ChunkGrid]:
    """The output, and chunks that tile the input and write whole blocks.

    Args:
        volume: the input.
        target: URL of the output.
        layout: of the output.
        side: voxels of a chunk on a side, about, where its shape is not given.
        storage: how object stores are reached.

    Raises:
        UserError: it cannot be done so, or something else is there.
    """
    format = layout.format
    if layout.shard_shape and not get_format(format).has_shards:
        raise ConfigError(
            f"--shard_shape: {format} holds a file for each block; {sharded_formats()} hold shards"
        )
    bounds = volume.bounds
    assert volume.voxel_size_nm is not None
    output = OutputSpec(
        url=target,
        format=format,
        dtype="uint32" if bounds.size < 2**32 else "uint64",
        channels=1,
        bounds=default_bounds(format, bounds),
        block_shape=layout.block_shape or _default_block(volume, side),
        voxel_size_nm=volume.voxel_size_nm,
        storage=storage,
        encoding=_LABEL_ENCODING if _LABEL_ENCODING in get_format(format).encodings else "raw",
        shard_shape=layout.shard_shape,
        labels=True,
    )
    grid = ChunkGrid(bounds, layout.chunk_shape or _default_chunk(output.write_shape, side))
    _check_alignment(grid, output)
    check_output(output)
    open_output(output)  # refuses one that differs
    return output, grid


def _check_alignment(grid: ChunkGrid, output: OutputSpec) -> None:
    """Every block, or shard, of the output is written whole by one chunk."""
    if math.prod(grid.chunk_shape) >= _MOST_VOXELS:
        raise ConfigError(
            f"--chunk_shape {_text(grid.chunk_shape)}: a chunk must have fewer than 2^31 voxels"
        )
    unit = output.write_shape
    if any(chunk % size for chunk, size in zip(grid.chunk_shape, unit, strict=True)):
        z, y, x = (
            ceil_div(chunk, size) * size for chunk, size in zip(grid.chunk_shape, unit, strict=True)
        )
        raise AlignmentError(
            f"--chunk_shape {_text(grid.chunk_shape)} is no multiple of {_text(unit)}, what is "
            "written at once: two chunks would write into one file. Nearest above: "
            f"{_text((z, y, x))}."
        )
    if any(
        (a - b) % size for a, b, size in zip(grid.roi.start, output.bounds.start, unit, strict=True)
    ):
        raise AlignmentError(
            f"the input starts at {list(grid.roi.start)}, in the midst of a block of {_text(unit)} "
            f"of an output that starts at 0, as {output.format} does. Use --format precomputed, "
            "or a --block_shape that divides it."
        )


def described(plan: LabelPlan) -> dict[str, Any]:
    """What determines the bytes that are written, whatever they are labels of."""
    return {
        "min_size": plan.min_size,
        "bounds": [plan.grid.roi.start, plan.grid.roi.stop],
        "chunk_shape": plan.grid.chunk_shape,
        "output": {
            "format": plan.output.format,
            "dtype": plan.output.dtype,
            "block_shape": plan.output.block_shape,
            "shard_shape": plan.output.shard_shape,
            "voxel_size_nm": plan.output.voxel_size_nm,
        },
        "stages": 2,  # counts up when what they leave for one another changes
    }


def memory_gib(plan: LabelPlan) -> float:
    """What the largest chunk takes, with each of a worker's threads."""
    shape = (min(a, b) for a, b in zip(plan.grid.chunk_shape, plan.grid.roi.shape, strict=True))
    return math.prod(shape) * plan.bytes_per_voxel / 2**30


def comparable_threshold(threshold: float, dtype: np.dtype[Any]) -> float:
    """Integers are compared with the next whole number: exact, where a float could not hold their values."""
    return threshold if dtype.kind == "f" else math.ceil(threshold)


def _default_block(volume: Volume, side: int) -> Zyx:
    z, y, x = (size if size <= side else _BLOCK_SIDE for size in volume.read_shape)
    return (z, y, x)


def _default_chunk(block: Zyx, side: int) -> Zyx:
    z, y, x = (size * max(1, side // size) for size in block)
    return (z, y, x)


def _text(shape: Zyx) -> str:
    return "x".join(map(str, shape))
