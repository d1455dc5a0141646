"""From what a user asks for to the stages that make it; everything is checked, and nothing is created."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from beam_inference.bounding_box import Zyx
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.grids import ChunkGrid
from beam_inference.outputs import OutputSpec, check_output, default_bounds, open_output
from beam_inference.segmentation.labelling import cc3d_library
from beam_inference.segmentation.work import Components
from beam_inference.storage import Storage, refuse_credentials
from beam_inference.stores import place_of_url
from beam_inference.volumes import Volume, open_volume

_SIDE, _BLOCK_SIDE = 256, 64
_MOST_VOXELS = 2**31
"""Of a chunk: its labels are 32 bits."""

_BYTES_PER_VOXEL = 16
"""Memory that a chunk takes while it is labelled, beside the input's own bytes: measured, see docs/components.md."""


def planned(
    source: str,
    target: str,
    *,
    threshold: float | None,
    channel: int | None = None,
    scale: int = 0,
    connectivity: int = 6,
    min_size: int = 1,
    format: str = "precomputed",
    chunk_shape: Zyx | None = None,
    block_shape: Zyx | None = None,
    shard_shape: Zyx | None = None,
    storage: Storage,
) -> Components:
    """What is to be made, all open questions decided; its scratch folder is named later.

    Args:
        source: URL of the input.
        target: URL of the output.
        threshold: voxels of this value or more, in stored units, are foreground; None: the input is a segmentation.
        channel: of the input; may be left out where there is one.
        scale: of a precomputed input.
        connectivity: 6, 18 or 26.
        min_size: components of fewer voxels are removed.
        format: of the output, see :class:`~beam_inference.outputs.OutputSpec`.
        chunk_shape: ZYX; some 256 on a side by default.
        block_shape: ZYX; as the input's by default.
        shard_shape: ZYX; by default a file holds one block.
        storage: how object stores are reached.

    Raises:
        UserError: it cannot be done as asked.
    """
    cc3d_library()
    for url in (source, target):
        try:
            refuse_credentials(url)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    volume = open_volume(source, scale=scale, storage=storage)
    if channel is None and volume.channels > 1:
        raise ConfigError(f"{source} has the channels 0 … {volume.channels - 1}: say which with --channel")
    if channel is not None and not 0 <= channel < volume.channels:
        raise ConfigError(f"--channel {channel}: {source} has the channels 0 … {volume.channels - 1}")
    if threshold is None and volume.dtype.kind not in "iu":
        raise ConfigError(f"{source} holds {volume.dtype}: --multilabel takes a segmentation, of integers")
    if threshold is not None and not math.isfinite(threshold):
        raise ConfigError(f"--threshold {threshold} is no number that voxels can be compared with")
    if volume.voxel_size_nm is None:
        raise VolumeError(f"{source} does not state its voxel size, which the output and the table need")
    if volume.place == place_of_url(target, storage):
        raise ConfigError(f"input and output are the same place: {target}")
    bounds = volume.bounds
    output = OutputSpec(
        url=target,
        format=format,
        dtype="uint32" if bounds.size < 2**32 else "uint64",
        channels=1,
        bounds=default_bounds(format, bounds),
        block_shape=block_shape or _default_block(volume),
        voxel_size_nm=volume.voxel_size_nm,
        storage=storage,
        encoding="compressed_segmentation" if format == "precomputed" else "raw",
        shard_shape=shard_shape,
        labels=True,
    )
    grid = ChunkGrid(bounds, chunk_shape or _default_chunk(output.write_shape))
    _check_alignment(grid, output)
    check_output(output)
    open_output(output)  # refuses one that differs
    return Components(
        source=source,
        scale=scale,
        channel=channel or 0,
        threshold=_comparable(threshold, volume.dtype),
        connectivity=connectivity,
        min_size=min_size,
        grid=grid,
        output=output,
        storage=storage,
        input_itemsize=volume.dtype.itemsize,
    )


def _check_alignment(grid: ChunkGrid, output: OutputSpec) -> None:
    """Every block, or shard, of the output is written whole by one chunk."""
    if math.prod(grid.chunk_shape) >= _MOST_VOXELS:
        raise ConfigError(f"--chunk_shape {_text(grid.chunk_shape)}: a chunk must have fewer than 2^31 voxels")
    unit = output.write_shape
    if any(chunk % size for chunk, size in zip(grid.chunk_shape, unit, strict=True)):
        z, y, x = (-(-chunk // size) * size for chunk, size in zip(grid.chunk_shape, unit, strict=True))
        raise AlignmentError(
            f"--chunk_shape {_text(grid.chunk_shape)} is no multiple of {_text(unit)}, what is written at once: two "
            f"chunks would write into one file. Nearest above: {_text((z, y, x))}."
        )
    if any((a - b) % size for a, b, size in zip(grid.roi.start, output.bounds.start, unit, strict=True)):
        raise AlignmentError(
            f"the input starts at {list(grid.roi.start)}, in the midst of a block of {_text(unit)} of an output that "
            f"starts at 0, as {output.format} does. Use --format precomputed, or a --block_shape that divides it."
        )


def description(work: Components) -> dict[str, Any]:
    """What determines the bytes that are written."""
    return {
        "input": {"path": work.source, "scale": work.scale, "channel": work.channel},
        "threshold": work.threshold,
        "connectivity": work.connectivity,
        "min_size": work.min_size,
        "bounds": [work.grid.roi.start, work.grid.roi.stop],
        "chunk_shape": work.grid.chunk_shape,
        "output": {
            "format": work.output.format,
            "dtype": work.output.dtype,
            "block_shape": work.output.block_shape,
            "shard_shape": work.output.shard_shape,
            "voxel_size_nm": work.output.voxel_size_nm,
        },
        "stages": 1,  # counts up when what they leave for one another changes
    }


def memory_gib(work: Components) -> float:
    """What the largest chunk takes, with each of a worker's threads."""
    shape = (min(a, b) for a, b in zip(work.grid.chunk_shape, work.grid.roi.shape, strict=True))
    return math.prod(shape) * (_BYTES_PER_VOXEL + work.input_itemsize) / 2**30


def _comparable(threshold: float | None, dtype: np.dtype[Any]) -> float | None:
    """Integers are compared with the next whole number: exact, where a float could not hold their values."""
    return threshold if threshold is None or dtype.kind == "f" else math.ceil(threshold)


def _default_block(volume: Volume) -> Zyx:
    z, y, x = (size if size <= _SIDE else _BLOCK_SIDE for size in volume.read_shape)
    return (z, y, x)


def _default_chunk(block: Zyx) -> Zyx:
    z, y, x = (size * max(1, _SIDE // size) for size in block)
    return (z, y, x)


def _text(shape: Zyx) -> str:
    return "x".join(map(str, shape))
