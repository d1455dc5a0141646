"""Input, output and chunks of label jobs: checked before anything is created."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from beam_inference.beam.stage_runner import check_place
from beam_inference.config.formats import OutputSpec, get_format, sharded_formats
from beam_inference.config.storage import Storage, check_writable
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.segmentation.labelling import cc3d_library
from beam_inference.volumes.kvstores import is_within, place_of_url
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import check_output, default_bounds, open_output
from beam_inference.volumes.volume import Volume

_BLOCK_SIDE = 64
_MOST_VOXELS = 2**31
"""Voxels that a chunk may have: its labels have 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of an output.

    Attributes:
        format: name of the format.
        chunk_shape: unit of work, ZYX; None for the default of the kind of job.
        block_shape: ZYX; None for the input's.
        shard_shape: ZYX; None for one file a block.
    """

    format: str = "precomputed"
    chunk_shape: Zyx | None = None
    block_shape: Zyx | None = None
    shard_shape: Zyx | None = None


def check_urls(source: str, target: str, flags: Sequence[str]) -> None:
    """Refuse URLs that the workers could not reach, and targets that cannot be written to.

    Args:
        source: URL of the input.
        target: URL of the output.
        flags: Beam's flags.

    Raises:
        ConfigError: a URL is refused, or a flag.
    """
    check_place(flags, [source, target])
    check_writable(target)


def open_input(source: str, target: str, scale: int, storage: Storage) -> Volume:
    """Open the input.

    Args:
        source: URL of the input.
        target: URL of the output, which must be another place.
        scale: number of the input's scale.
        storage: how object stores are reached.

    Raises:
        UserError: it cannot be read, or lacks its voxel size, or is the output; or a library is not
            installed.
    """
    cc3d_library()
    volume = open_volume(source, scale=scale, storage=storage)
    if volume.voxel_size_nm is None:
        raise VolumeError(
            f"{source} does not state its voxel size, which the output and the table need"
        )
    place = place_of_url(target, storage)
    if volume.place == place:
        raise ConfigError(f"input and output are the same place: {target}")
    if is_within(volume.place, place):
        raise ConfigError(
            f"the output {target} holds the input {source}: choose another place, so as not to "
            "overwrite it"
        )
    return volume


def plan_output(
    volume: Volume,
    target: str,
    layout: Layout,
    side: int,
    storage: Storage,
    *,
    overwrite: bool = False,
) -> tuple[OutputSpec, ChunkGrid]:
    """Plan the output, and chunks that tile the input and write whole blocks.

    Args:
        volume: the input.
        target: URL of the output.
        layout: layout of the output.
        side: edge of a chunk in voxels, about, where its shape is not given.
        storage: how object stores are reached.
        overwrite: whether an existing target will be replaced.

    Raises:
        UserError: the layout does not fit the input, or the target is another volume.
    """
    format = layout.format
    if layout.shard_shape and not get_format(format).has_shards:
        raise ConfigError(
            f"--shard_shape: {format} holds a file for each block; {sharded_formats()} hold shards"
        )
    bounds = volume.bounds
    assert volume.voxel_size_nm is not None
    dtype = "uint32" if bounds.size < 2**32 else "uint64"
    output = OutputSpec(
        url=target,
        format=format,
        dtype=dtype,
        channels=1,
        bounds=default_bounds(format, bounds, "convert what is written to this format with --pad"),
        block_shape=layout.block_shape or _default_block(volume, side),
        voxel_size_nm=volume.voxel_size_nm,
        storage=storage,
        encoding=get_format(format).usual_encoding(dtype, 1, labels=True),
        shard_shape=layout.shard_shape,
        labels=True,
        rest=volume.origin.rest,
    )
    grid = ChunkGrid(bounds, layout.chunk_shape or _default_chunk(output.write_shape, side))
    _check_alignment(grid, output)
    check_output(output)
    if not overwrite:
        open_output(output)  # raises if an existing volume differs
    return output, grid


def _check_alignment(grid: ChunkGrid, output: OutputSpec) -> None:
    """Refuse chunks that would write parts of blocks or shards, or hold too many voxels."""
    if math.prod(grid.chunk_shape) >= _MOST_VOXELS:
        raise ConfigError(
            f"--chunk_shape {zyx.as_flag(grid.chunk_shape)}: a chunk must have fewer than "
            "2^31 voxels"
        )
    unit = output.write_shape
    if any(chunk % size for chunk, size in zip(grid.chunk_shape, unit, strict=True)):
        raise AlignmentError(
            f"--chunk_shape {zyx.as_flag(grid.chunk_shape)} is not a multiple of "
            f"{zyx.as_flag(unit)}, which is written at once: two chunks would write into one file. "
            "Nearest above: "
            f"{zyx.as_flag(zyx.round_up_each(grid.chunk_shape, unit))}."
        )


def _default_block(volume: Volume, side: int) -> Zyx:
    return zyx.triple(size if size <= side else _BLOCK_SIDE for size in volume.read_shape)


def _default_chunk(block: Zyx, side: int) -> Zyx:
    return zyx.triple(size * max(1, side // size) for size in block)
