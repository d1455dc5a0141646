"""Tries a network on a few patches of a job's own input."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteConfig
from beam_inference.engines.batch_effect import BatchEffect, effect_of_batch
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.trial import (
    ContractReport,
    check_contract,
    check_difference,
    check_no_numbers,
    is_blank,
    network_failures,
    without_blank,
)
from beam_inference.environment import bound_memory
from beam_inference.errors import (
    DeviceOutOfMemory,
    EngineError,
    ModelContractError,
    NonFiniteError,
    PermanentReadError,
    TransientReadError,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.exact_sums import bound_after_trial
from beam_inference.geometry.plan import InferencePlan
from beam_inference.geometry.zyx import triple
from beam_inference.job.parts import cutout, normalization
from beam_inference.operators.normalize_steps import predict_normalized
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.worker.network_watch import NetworkWatch
from beam_inference.worker.non_finite import is_finite

logger = logging.getLogger(__name__)

_ANSWERS_OTHERS = (
    " It may answer others: look at which values its code refuses. Places without data can be left "
    "out by `mask`."
)
_NOISE_IN_BATCHES = (
    " It is tried on noise, too, to see whether patches of a batch are mixed: if its code refuses "
    "that, write inference.batch_size: 1."
)


def boxes_to_try(plan: InferencePlan) -> list[BoundingBox]:
    """Input boxes of up to three patches on the domain's diagonal, the one in its middle first.

    Their places depend on the patch lattice alone, not on chunks.
    """
    lattice = plan.lattice
    indices = [
        triple(axis.count * quarters // 4 for axis in lattice.axes) for quarters in (2, 1, 3)
    ]
    return [lattice.patch_box(index).grow(plan.crop_margin) for index in dict.fromkeys(indices)]


def patch_to_try(config: DefiniteConfig, volume: InputVolume, plan: InferencePlan) -> AnyArray:
    """Read the network's input for the patch in the middle of the domain.

    Returns:
        Stored values, shape (C, Z, Y, X); zeros where they cannot be read. If that patch is blank,
        or holds other than numbers, it is the first one of :func:`patches_to_bound` that is not,
        and does not, where there is one.
    """
    patches = patches_to_bound(partial(_read, config, volume), plan)
    first = next(patches)
    if not is_blank(first):
        return first
    return next((patch for patch in patches if not is_blank(patch)), first)


def patches_to_try(
    config: DefiniteConfig, volume: InputVolume, plan: InferencePlan
) -> Iterator[AnyArray]:
    """Read the network's input at :func:`boxes_to_try`, as :func:`patch_to_try` does."""
    return (_read(config, volume, box) for box in boxes_to_try(plan))


def patches_to_bound(
    read: Callable[[BoundingBox], AnyArray], plan: InferencePlan
) -> Iterator[AnyArray]:
    """Read what a network is tried on to find how large its values are.

    These are the patches at :func:`boxes_to_try`; if all of them are blank, also those at
    :func:`boxes_to_calibrate`. Only those that hold numbers alone, if there is any: chunks with NaN
    are quarantined, and no job fails by a place that it need not have been tried at.

    Args:
        read: reads the network's input in a box, stored values (C, Z, Y, X).
        plan: the geometry.
    """
    is_varied = False
    first_with_holes: AnyArray | None = None
    is_any = False
    for boxes in (boxes_to_try(plan), boxes_to_calibrate(plan)):
        if is_varied:
            break
        for patch in map(read, boxes):
            if is_finite(patch):
                is_any = True
                is_varied = is_varied or not is_blank(patch)
                yield patch
            elif first_with_holes is None:
                first_with_holes = patch
    if first_with_holes is not None and not is_any:
        yield first_with_holes


def boxes_to_calibrate(plan: InferencePlan) -> list[BoundingBox]:
    """Input boxes of up to eight patches, an eighth and five eighths along each axis of the domain.

    Their places depend on the patch lattice alone, not on chunks. None is one of
    :func:`boxes_to_try`, unless the lattice has few patches.
    """
    lattice = plan.lattice
    indices = product(*({axis.count * eighths // 8 for eighths in (1, 5)} for axis in lattice.axes))
    return [lattice.patch_box(triple(index)).grow(plan.crop_margin) for index in sorted(indices)]


def calibration_samples(
    config: DefiniteConfig, volume: InputVolume, plan: InferencePlan
) -> list[NDArray[np.float32]]:
    """Read what the network is calibrated on for precision int8, as the network takes it.

    Returns:
        Arrays (C, Z, Y, X), normalised.

    Raises:
        EngineError: one cannot be read, or the input has one value at all of them.
    """
    normalize = normalization(config, volume.values_dtype)
    try:
        patches = [cutout(config, volume, box) for box in boxes_to_calibrate(plan)]
    except (TransientReadError, PermanentReadError) as error:
        raise EngineError(
            f"precision: int8 is calibrated on patches of the input, and {error}. Restore it, or "
            "write precision: float32."
        ) from None
    patches = [patch for patch in patches if is_finite(patch) and not is_blank(patch)]
    if not patches:
        raise EngineError(
            "precision: int8 is calibrated on patches of the input, an eighth and five eighths "
            "along each axis of the domain, and each of them has one value throughout. Choose "
            "another roi, or write precision: float32."
        )
    return [normalize(patch.astype(np.float32)[None])[0] for patch in patches]


def _read(config: DefiniteConfig, volume: InputVolume, box: BoundingBox) -> AnyArray:
    try:
        return cutout(config, volume, box)
    except (TransientReadError, PermanentReadError) as error:
        logger.warning("trying the network on zeros, because %s", error)
        return np.zeros((volume.all_channels, *box.shape), volume.cutout_dtype)


def find_prediction_bounds(
    predictor: Predictor,
    config: DefiniteConfig,
    volume: InputVolume,
    plan: InferencePlan,
    batch_size: int,
) -> tuple[float, ...]:
    """Find the powers of two that a network's values are to stay within, by trying it.

    Args:
        predictor: the network on its device.
        config: the job.
        volume: its input.
        plan: its geometry.
        batch_size: patches per call that fit the device.

    Returns:
        One for each head, or one for a network without heads.

    Raises:
        ModelContractError: it fails, or returns NaN or infinite values.
    """
    patches = patches_to_bound(partial(_read, config, volume), plan)
    normalize = normalization(config, volume.values_dtype)
    channels = config.model.channel_ranges
    watch = NetworkWatch(config.job.timeouts.network)
    try:
        with watch.watch("the search for the largest prediction"):
            largest = largest_predictions(
                _tell_failures(watch.wrap_predictor(predictor)),
                patches,
                _tell_of_noise,
                normalize,
                batch_size,
                channels,
            )
    except NonFiniteError as error:
        raise ModelContractError(
            f"{error} for a patch of the input. Check model.normalize, model.weights and "
            "inference.precision."
        ) from None
    return tuple(map(bound_after_trial, largest))


def _tell_failures(predictor: Predictor) -> Predictor:
    """The network, with errors of its own code told as such."""

    def predict(batch: Any) -> Any:
        with network_failures(batch.shape, _ANSWERS_OTHERS):
            return predictor.predict(batch)

    return Predictor(predictor.device, predict, predictor.description)


def _tell_of_noise(patch: AnyArray) -> AnyArray:
    logger.warning(
        "the input has one value at each place where the network is tried: how large its answers "
        "are was found by noise, which may be far from what they are. Sums are rounded to 2^-23 of "
        "that; to state it, write model.prediction_bound."
    )
    return without_blank(patch)


def largest_predictions(
    predictor: Predictor,
    patches: Iterable[AnyArray],
    make_noise: Callable[[AnyArray], AnyArray],
    normalize: Callable[[Any], Any],
    batch_size: int,
    channels: Sequence[range],
) -> list[float]:
    """Measure how large a network's predictions are.

    Args:
        predictor: the network on its device.
        patches: its inputs, stored values (C, Z, Y, X).
        make_noise: makes what is tried, too, of a patch, if all patches are blank: networks may say
            little of background. Where they fail on it, that is no fault of theirs.
        normalize: maps a float32 batch of stored values to the network's input.
        batch_size: patches of a batch that fits the device.
        channels: channels of the predictions that are looked at together.

    Returns:
        The largest magnitude among the predictions of each of these.

    Raises:
        NonFiniteError: there are NaN or infinite values among them.
    """
    largest = [0.0] * len(channels)
    device = predictor.device

    def look_at(patch: AnyArray) -> None:
        batch = device.empty((batch_size, *patch.shape))
        batch[:] = device.upload(patch)
        predictions = predict_normalized(predictor.predict, normalize, batch)
        for number, some in enumerate(channels):
            part = predictions[:, some.start : some.stop]
            magnitude = float(device.largest_magnitude(part))
            if not math.isfinite(magnitude):
                raise NonFiniteError("the network returns NaN or infinite values")
            largest[number] = max(largest[number], magnitude)

    with device.session():
        is_varied = False
        for patch in patches:
            look_at(patch)
            is_varied = is_varied or not is_blank(patch)
        if not is_varied:
            with suppress(NonFiniteError, ModelContractError):
                look_at(make_noise(patch))
    return largest


def try_network(
    predictor: Predictor,
    config: DefiniteConfig,
    volume: InputVolume,
    plan: InferencePlan,
    reference: Predictor | None = None,
) -> ContractReport:
    """Run the network on the patch in the middle of the domain, and check its answer.

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
    normalize = normalization(config, volume.values_dtype)
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
    patches = [patch]
    if config.inference.precision == "int8":
        # Integers suit some places better than others, and noise not at all.
        others = patches_to_try(config, volume, plan)
        patches = [each for each in others if is_finite(each) and not is_blank(each)] or patches
    bound = bound_memory() if reference.device.on_host else nullcontext()
    with watch.watch("the comparison with PyTorch"), bound:
        try:
            differences = [
                check_difference(
                    watch.wrap_predictor(predictor),
                    watch.wrap_predictor(reference),
                    each,
                    normalize,
                    report.batch_size,
                )
                for each in patches
            ]
            if predictor.description["engine"] != reference.description["engine"]:
                check_no_numbers(
                    watch.wrap_predictor(predictor),
                    watch.wrap_predictor(reference),
                    patch,
                    normalize,
                    report.batch_size,
                )
        except DeviceOutOfMemory as error:
            if config.inference.members > 1:  # it is divided because it does not fit otherwise
                logger.warning(
                    "inference.partition: whether the network answers divided as it does undivided "
                    "was not compared, for which this machine has too little memory: %s",
                    error,
                )
                return report
            raise ModelContractError(
                f"the device is out of memory for {report.batch_size} patches a batch in PyTorch "
                "in float32, with which the network is compared. Make inference.batch_size "
                f"smaller, or inference.patch_shape. ({error})"
            ) from None
    return replace(report, difference=max(differences, key=attrgetter("typical")))


def try_batch(
    predictor: Predictor,
    config: DefiniteConfig,
    volume: InputVolume,
    plan: InferencePlan,
    batch_size: int,
) -> BatchEffect:
    """Try how far the answer to the patch in the middle of the domain depends on its batch.

    Args:
        predictor: the network on its device.
        config: the job.
        volume: its input.
        plan: its geometry.
        batch_size: patches of a batch, 2 or more, for which the device has memory.

    Raises:
        ModelContractError: the network fails, or the device has too little memory.
    """
    patch = patch_to_try(config, volume, plan)
    watch = NetworkWatch(config.job.timeouts.network)
    with watch.watch("the trial of its batches"):
        try:
            with network_failures((batch_size, *patch.shape), _NOISE_IN_BATCHES):
                return effect_of_batch(
                    watch.wrap_predictor(predictor),
                    patch,
                    normalization(config, volume.values_dtype),
                    batch_size,
                )
        except DeviceOutOfMemory as error:
            raise ModelContractError(
                f"the device is out of memory for {batch_size} patches a batch and one more. Make "
                f"inference.batch_size smaller, or inference.patch_shape. ({error})"
            ) from None
