"""The parts that a job speaks of: its input, what its output is, how values are normalised, its network on trial."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.job import JobConfig
from beam_inference.config.normalize import Affine, Sections
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import source_sections
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.operators.levels import by_section
from beam_inference.operators.normalize import Normalization, unit
from beam_inference.volumes.mask import masked, open_mask
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import OutputSpec
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)


def open_input(config: JobConfig, cache_bytes: int = 0) -> Volume:
    """The job's input volume, masked if it says so.

    Arguments and errors as :func:`beam_inference.volumes.opening.open_volume` and
    :func:`beam_inference.volumes.mask.open_mask`.
    """
    given = config.input
    storage = config.storage
    volume = open_volume(
        given.path, given.spec, given.scale, given.channel, given.select, storage, cache_bytes
    )
    if given.mask is None:
        return volume
    return masked(
        volume, open_mask("input.mask", given.mask, voxel_size_nm(config, volume), storage)
    )


def voxel_size_nm(config: JobConfig, volume: Volume) -> VoxelSizeNm | None:
    """Of the input, ZYX: what it says itself, else what the network was trained at; None if neither is known."""
    return volume.voxel_size_nm or config.model.voxel_size_nm


def cutout(config: JobConfig, volume: Volume, box: BoundingBox) -> NDArray[Any]:
    """What patches are cut out of: the input's voxels of a box, as stored; normalised, float32, with levels by section.

    Raises as :meth:`beam_inference.volumes.volume.Volume.read`.
    """
    fill = config.input.fill
    normalize = config.model.normalize
    array = volume.cutout(box, fill, config.input.fill_value)
    if isinstance(normalize, Sections):
        return by_section(array, source_sections(box, volume.bounds, fill), normalize)
    return array


def normalization(config: JobConfig, dtype: np.dtype[Any]) -> Normalization:
    """What the network's input is of a :func:`cutout`; ``dtype`` is the volume's. ConfigError for unit with floats."""
    normalize = config.model.normalize
    if isinstance(normalize, Affine):
        return Normalization(normalize.scale, normalize.offset, normalize.clip)
    return unit(dtype) if normalize == "unit" else Normalization()


def output_spec(job: ResolvedJob) -> OutputSpec:
    """What the job's output is."""
    output = job.config.output
    return OutputSpec(
        url=output.path,
        format=output.format,
        dtype=output.dtype,
        channels=job.config.output_channels,
        labels=job.config.gives_labels,
        bounds=job.output_bounds,
        block_shape=output.block_shape,
        voxel_size_nm=job.voxel_size_nm,
        storage=job.config.storage,
        encoding=output.encoding,
        shard_shape=output.shard_shape,
    )
