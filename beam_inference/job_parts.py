"""The parts that a job speaks of: its input, what its output is, how values are normalised, its network on trial."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.bounding_box import BoundingBox
from beam_inference.config import JobConfig
from beam_inference.errors import DeviceOutOfMemory, ModelContractError, PermanentReadError, TransientReadError
from beam_inference.fill import source_sections
from beam_inference.levels import by_section
from beam_inference.mask import masked, open_mask
from beam_inference.normalize_config import Affine, Sections
from beam_inference.operators.normalize import Normalization, unit
from beam_inference.outputs import OutputSpec
from beam_inference.plan import InferencePlan
from beam_inference.predictors import Predictor
from beam_inference.predictors.contract import ContractReport, check_contract, check_difference
from beam_inference.resolved_job import ResolvedJob
from beam_inference.volumes import Volume, VoxelSizeNm, open_volume

logger = logging.getLogger(__name__)


def open_input(config: JobConfig, cache_bytes: int = 0) -> Volume:
    """The job's input volume, masked if it says so.

    Arguments and errors as :func:`beam_inference.volumes.open_volume` and :func:`beam_inference.mask.open_mask`.
    """
    given, storage = config.input, config.storage
    volume = open_volume(given.path, given.spec, given.scale, given.channel, given.select, storage, cache_bytes)
    if given.mask is None:
        return volume
    return masked(volume, open_mask("input.mask", given.mask, voxel_size_nm(config, volume), storage))


def voxel_size_nm(config: JobConfig, volume: Volume) -> VoxelSizeNm | None:
    """Of the input, ZYX: what it says itself, else what the network was trained at; None if neither is known."""
    return volume.voxel_size_nm or config.model.voxel_size_nm


def cutout(config: JobConfig, volume: Volume, box: BoundingBox) -> NDArray[Any]:
    """What patches are cut out of: the input's voxels of a box, as stored; normalised, float32, with levels by section.

    Raises as :meth:`beam_inference.volumes.Volume.read`.
    """
    fill, normalize = config.input.fill, config.model.normalize
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
        bounds=job.output_bounds.box(),
        block_shape=output.block_shape,
        voxel_size_nm=job.voxel_size_nm,
        storage=job.config.storage,
        encoding=output.encoding,
        shard_shape=output.shard_shape,
    )


def patch_to_try(config: JobConfig, volume: Volume, plan: InferencePlan) -> NDArray[Any]:
    """The network's input, stored values, for the patch in the middle of the ROI; zeros where it cannot be read."""
    z, y, x = (axis.count // 2 for axis in plan.lattice.axes)
    box = plan.lattice.patch_box((z, y, x)).grow(plan.crop_margin)
    try:
        return cutout(config, volume, box)
    except (TransientReadError, PermanentReadError) as error:
        logger.warning("trying the network on zeros, because %s", error)
        return np.zeros((volume.channels, *box.shape), volume.dtype)


def try_network(
    predictor: Predictor, config: JobConfig, volume: Volume, plan: InferencePlan, reference: Predictor | None = None
) -> ContractReport:
    """Run the network once, on the patch in the middle of the ROI, and hold it against ``reference`` if there is one.

    Raises:
        ModelContractError: it does not answer as the job says.
        EngineError: it does not answer as ``reference`` does.
    """
    patch = patch_to_try(config, volume, plan)
    normalize = normalization(config, volume.dtype)
    report = check_contract(
        predictor,
        patch,
        normalize,
        batch_size=config.inference.patches_per_call,
        patch_shape=plan.lattice.patch_shape,
        crop_margin=plan.crop_margin,
        output_channels=config.model.output_channels,
    )
    if reference is not None:
        try:
            check_difference(predictor, reference, patch, normalize, report.batch_size)
        except DeviceOutOfMemory as error:
            raise ModelContractError(
                f"the device is out of memory for {report.batch_size} patches a batch in PyTorch in float32, which the "
                f"network is held against. Make inference.batch_size smaller, or inference.patch_shape. ({error})"
            ) from None
    return report
