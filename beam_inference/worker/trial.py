"""Tries a network on one patch of a job's own input."""

from __future__ import annotations

import logging

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteConfig
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.trial import ContractReport, check_contract, check_difference
from beam_inference.errors import (
    DeviceOutOfMemory,
    ModelContractError,
    PermanentReadError,
    TransientReadError,
)
from beam_inference.geometry.plan import InferencePlan
from beam_inference.job.parts import cutout, normalization
from beam_inference.volumes.volume import Volume
from beam_inference.worker.network_watch import NetworkWatch

logger = logging.getLogger(__name__)


def patch_to_try(config: DefiniteConfig, volume: Volume, plan: InferencePlan) -> AnyArray:
    """Read the network's input for the patch in the middle of the ROI.

    Returns:
        Stored values, shape (C, Z, Y, X); zeros where they cannot be read.
    """
    z, y, x = (axis.count // 2 for axis in plan.lattice.axes)
    box = plan.lattice.patch_box((z, y, x)).grow(plan.crop_margin)
    try:
        return cutout(config, volume, box)
    except (TransientReadError, PermanentReadError) as error:
        logger.warning("trying the network on zeros, because %s", error)
        return np.zeros((volume.channels, *box.shape), volume.dtype)


def try_network(
    predictor: Predictor,
    config: DefiniteConfig,
    volume: Volume,
    plan: InferencePlan,
    reference: Predictor | None = None,
) -> ContractReport:
    """Run the network on the patch in the middle of the ROI, and check its answer.

    Args:
        predictor: the network on its device.
        config: the job.
        volume: its input.
        plan: its geometry.
        reference: the same network in PyTorch, in float32, to compare with.

    Raises:
        ModelContractError: the network does not answer as the job says.
        EngineError: it does not answer as ``reference`` does.
    """
    patch = patch_to_try(config, volume, plan)
    normalize = normalization(config, volume.dtype)
    watch = NetworkWatch(config.job.timeouts.network)
    with watch.watch("the trial of the network"):
        report = check_contract(
            watch.wrap_predictor(predictor),
            patch,
            normalize,
            batch_size=config.inference.patches_per_call,
            patch_shape=plan.lattice.patch_shape,
            crop_margin=plan.crop_margin,
            output_channels=config.model.output_channels,
        )
    if reference is None:
        return report
    watch = NetworkWatch(config.job.timeouts.network)  # PyTorch may take longer
    with watch.watch("the comparison with PyTorch"):
        try:
            check_difference(
                watch.wrap_predictor(predictor),
                watch.wrap_predictor(reference),
                patch,
                normalize,
                report.batch_size,
            )
        except DeviceOutOfMemory as error:
            raise ModelContractError(
                f"the device is out of memory for {report.batch_size} patches a batch in PyTorch "
                "in float32, with which the network is compared. Make inference.batch_size "
                f"smaller, or inference.patch_shape. ({error})"
            ) from None
    return report
