"""Chooses engine and batch size by trying the network on this machine."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from beam_inference.config.job import JobConfig, Network
from beam_inference.engines.loading import (
    Predictor,
    engines_to_measure,
    engines_to_try,
    load_predictor,
    load_reference,
)
from beam_inference.engines.speed import fastest_batch_size, seconds_per_patch
from beam_inference.engines.trial import ContractReport
from beam_inference.errors import ConfigError, DeviceOutOfMemory, EngineError, ModelContractError
from beam_inference.job.parts import normalization
from beam_inference.job.place import Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.launch.checks import check_memory
from beam_inference.launch.survey import Survey
from beam_inference.models.fetch import local_model
from beam_inference.worker.trial import patch_to_try, try_network

logger = logging.getLogger(__name__)


def try_network_here(
    found: Survey, place: Place, *, allow_pickle: bool
) -> tuple[Survey, Predictor]:
    """The job with what only its network can tell, and the network, loaded and tried; nothing is created.

    Raises:
        UserError: it does not answer as the job says.
    """
    model = local_model(found.job.config.model, found.job.config.storage)
    config, predictor, report = try_engines(model, found, place, allow_pickle)
    config = with_inference(config, batch_size=report.batch_size)
    known = {"config": config.model_dump(), "working_set_bytes": report.working_set_bytes}
    return (
        replace(found, job=ResolvedJob.model_validate(found.job.model_dump() | known)),
        predictor,
    )


def try_engines(
    model: Network, found: Survey, place: Place, allow_pickle: bool
) -> tuple[JobConfig, Predictor, ContractReport]:
    """Decide the engine, and try the network: of the engines that ``auto`` allows, the first one that can run it."""
    if found.job.config.inference.engine == "fastest":
        decided = found.job.model_copy(
            update={"config": choose_fastest_engine(model, found, allow_pickle)}
        )
        return try_engines(model, replace(found, job=decided), place, allow_pickle)
    first, *others = engines_to_try(model, found.job.config.inference)
    try:
        config = with_inference(found.job.config, engine=first)
        predictor = load_predictor(model, config.inference, allow_pickle=allow_pickle)
        reference = load_reference(model, config.inference, allow_pickle=allow_pickle)
        report = try_network(predictor, config, found.input, found.job.plan, reference)
        if config.inference.batch_size == "auto":
            config = with_inference(
                config,
                batch_size=choose_batch_size(predictor, found, report.working_set_bytes, place),
            )
            report = try_network(predictor, config, found.input, found.job.plan, reference)
        return config, predictor, report
    except EngineError as error:
        if not others:
            raise
        logger.warning("inference.engine: auto is %s here: %s", others[0], error)
    decided = found.job.model_copy(
        update={"config": with_inference(found.job.config, engine=others[0])}
    )
    return try_engines(model, replace(found, job=decided), place, allow_pickle)


def choose_fastest_engine(model: Network, found: Survey, allow_pickle: bool) -> JobConfig:
    """The job with the engine, of those that give what PyTorch gives, that takes the least time for a patch here."""
    config = found.job.config
    refusal = ModelContractError("inference.engine: fastest: there is none")
    patch = patch_to_try(config, found.input, found.job.plan)
    normalize = normalization(config, found.input.dtype)
    best = None
    least = math.inf
    for keys in engines_to_measure(model, config.inference):
        one = with_inference(config, **keys)
        name = " ".join(keys.values())
        try:
            predictor = load_predictor(model, one.inference, allow_pickle=allow_pickle)
            reference = load_reference(model, one.inference, allow_pickle=allow_pickle)
            report = try_network(predictor, one, found.input, found.job.plan, reference)
            seconds = seconds_per_patch(predictor, patch, normalize, report.batch_size)
            del predictor, reference  # before the next ones are loaded
        except (ModelContractError, DeviceOutOfMemory) as error:
            logger.info("inference.engine: fastest leaves out %s: %s", name, error)
            refusal = ModelContractError(str(error))
            continue
        logger.info("inference.engine: fastest: %s takes %.3g s a patch", name, seconds)
        if seconds < least:
            best = one
            least = seconds
    if best is None:
        raise refusal
    return best


def choose_batch_size(
    predictor: Predictor, found: Survey, working_set_bytes: int, place: Place
) -> int:
    """What ``auto`` means here; ``working_set_bytes`` are those of one patch."""
    job = found.job
    config = found.job.config

    def fits(batch_size: int) -> bool:
        known = {
            "config": with_inference(config, batch_size=batch_size),
            "working_set_bytes": working_set_bytes * batch_size,
        }
        try:
            check_memory(
                replace(found, job=job.model_copy(update=known)).memory(place),
                place,
                config.inference.device,
            )
        except ConfigError:
            return False
        return True

    patch = patch_to_try(config, found.input, job.plan)
    return fastest_batch_size(predictor, patch, normalization(config, found.input.dtype), fits)


def with_inference(config: JobConfig, **keys: object) -> JobConfig:
    """The job with keys of ``inference`` made definite."""
    return config.model_copy(update={"inference": config.inference.model_copy(update=keys)})


def warn_of_range(config: JobConfig, low: float, high: float) -> None:
    """Warn where the values of the tried patch lie beyond output.value_range."""
    limits = config.output.value_range
    if limits is not None and (low < limits[0] or high > limits[1]):
        logger.warning(
            "on a patch from the middle of the ROI the network's values reach from %g to %g; "
            "values beyond output.value_range %s are clipped",
            low,
            high,
            list(limits),
        )
