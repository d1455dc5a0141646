"""Chooses engine and batch size by trying the network on this machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from beam_inference.config.definite import (
    DefiniteConfig,
    EngineSettings,
    make_definite,
)
from beam_inference.config.devices import kind_of
from beam_inference.config.inference import BatchSize, Inference
from beam_inference.config.job import JobConfig
from beam_inference.config.network import Network
from beam_inference.config.operators import interval_after
from beam_inference.engines.batch_effect import BatchEffect
from beam_inference.engines.choice import describe_engine, engines_to_measure, engines_to_try
from beam_inference.engines.loading import load_predictor, load_reference, quantize_network
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.speed import WORTH_IT, fastest_batch_size, seconds_per_patch
from beam_inference.engines.trial import ContractReport
from beam_inference.errors import (
    ConfigError,
    DeviceOutOfMemory,
    EngineError,
    ModelContractError,
)
from beam_inference.job.parts import make_normalization
from beam_inference.job.place import Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.launch.decide import batch_size_request, engine_request
from beam_inference.launch.memory import check_memory
from beam_inference.launch.planned_job import NetworkNeeds, PlannedJob
from beam_inference.models.fetch import local_model
from beam_inference.models.trust import Trust
from beam_inference.worker.trial import (
    calibration_samples,
    patch_to_try,
    try_batch,
    try_network,
)

logger = logging.getLogger(__name__)

SPEED_ROUNDS = 2
"""How often int8 and float32 are timed in turn; the best ratio counts."""


@dataclass(frozen=True, slots=True)
class NetworkTrial:
    """A network that was loaded and has answered as its job says.

    Attributes:
        config: the job with the engine, and with the batch size that the device has memory for.
        engine: engine, memory format and batch size that were asked for, or chosen here.
        predictor: the network on its device.
        report: memory and range of values of the patch that was tried; its batch size is smaller
            than that of ``engine`` where the device had too little memory.
        quantized: in precision int8, the network of integers.
    """

    config: DefiniteConfig
    engine: EngineSettings
    predictor: Predictor
    report: ContractReport
    quantized: bytes | None = None

    @property
    def needs(self) -> NetworkNeeds:
        """Memory of the network, as measured."""
        report = self.report
        return NetworkNeeds.of_engine(
            self.engine.engine, report.batch_size, report.working_set_bytes
        )


def try_network_here(
    job: PlannedJob,
    place: Place,
    *,
    trust: Trust,
    earlier: ResolvedJob | None = None,
    model: Network | None = None,
    quantized: bytes | None = None,
) -> NetworkTrial:
    """Load a job's network and try it on a patch of its input; nothing is created.

    Args:
        job: the job; its device is in its settings.
        place: where the workers run.
        trust: which code that the network's files carry may run.
        earlier: the job as its first launch resolved it: its choices are kept.
        model: the job's network with its files on this machine; None to fetch them.
        quantized: in precision int8, the network of integers that the first launch has made; None
            to make one.

    Raises:
        UserError: the network does not answer as the job says.
    """
    model = model or local_model(job.config.model, job.config.storage)
    engine, memory_format = engine_request(job.config, earlier)
    batch_size = batch_size_request(job.config, earlier)
    trier = _Trier(job, place, model, trust, quantized)
    if engine == "fastest":
        engine, memory_format = trier.find_fastest_engine(batch_size)
    engines = engines_to_try(model, open_inference(job, engine))
    trial = trier.try_engines(engines, memory_format, batch_size)
    if earlier is None and batch_size == 1 and not trial.predictor.device.on_host:
        logger.warning(
            "inference.batch_size is 1: of small patches a GPU may get through several times as "
            "many with auto, which tries it"
        )
    return trial


def choose_engine_elsewhere(
    job: PlannedJob, model: Network, earlier: ResolvedJob | None
) -> EngineSettings:
    """Choose engine and batch size of workers that cannot be tried from here.

    Args:
        job: the job.
        model: its network with its files on this machine.
        earlier: the job as its first launch resolved it: its choices are kept.

    Raises:
        EngineError: no engine runs a file of this kind.
    """
    engine, memory_format = engine_request(job.config, earlier)
    batch_size = batch_size_request(job.config, earlier)
    if batch_size == "auto":
        raise ConfigError("inference.batch_size: auto is determined by a trial: write a number")
    if earlier is not None:  # a worker may have chosen an engine that this machine lacks
        return EngineSettings(engine, memory_format, batch_size)
    *_, engine = engines_to_try(model, open_inference(job, engine))  # it runs any network
    return EngineSettings(engine, memory_format, batch_size)


def describe_engine_elsewhere(
    model: Network, inference: Inference, earlier: ResolvedJob | None
) -> Mapping[str, str]:
    """Describe the engine of workers that cannot be tried from here.

    Args:
        model: the job's network with its files on this machine.
        inference: how it is applied, with every choice made.
        earlier: the job as its first launch resolved it. Where it asks for the same engine still,
            what it told of it stays: this machine may have no such engine, or another version, and
            every worker compares its own.

    Raises:
        ConfigError: workers could not tell whether they have the same network.
        EngineError: the engine is not installed.
    """
    if earlier is not None:
        before = earlier.config.inference
        keys = ("engine", "memory_format", "precision", "partition", "threads")
        is_same = all(getattr(before, key) == getattr(inference, key) for key in keys)
        if is_same and kind_of(before.device) == kind_of(inference.device):
            return earlier.engine
    return describe_engine(model, inference)


def warn_of_range(config: JobConfig, low: float, high: float) -> None:
    """Warn where the values of the tried patch fit neither output.value_range nor postprocess."""
    if config.model.heads or config.outputs:
        return  # the values of a head are not known apart from those of others
    try:
        written = interval_after(config.postprocess, (low, high), config.model.output_channels)
    except ValueError as error:
        if config.network_interval is None:  # else the job file was checked against it
            logger.warning("on a patch from the middle of the ROI: %s", error)
        return
    limits = config.output.value_range
    if limits is None or written is None:
        return
    if written[0] < limits[0] or written[1] > limits[1]:
        logger.warning(
            "on a patch from the middle of the ROI the values to be written reach from %g to %g; "
            "those beyond output.value_range %s are clipped",
            *written,
            list(limits),
        )


def _warn_of_all(texts: Sequence[str]) -> None:
    for text in texts:
        logger.warning("%s", text)


@dataclass(frozen=True, slots=True)
class _Trier:
    """Tries one job's network in several engines."""

    job: PlannedJob
    place: Place
    model: Network
    trust: Trust
    quantized: bytes | None

    def try_engines(
        self, engines: Sequence[str], memory_format: str, batch_size: BatchSize
    ) -> NetworkTrial:
        """Try engines in turn, until one runs the network.

        Raises:
            EngineError: none can.
            ModelContractError: the network does not answer as the job says.
        """
        refusals: list[str] = []
        for candidate, following in pairwise(engines):
            try:
                trial = self.try_engine(candidate, memory_format, batch_size)
                break
            except EngineError as error:
                refusals.append(f"inference.engine: auto is {following} here: {error}")
        else:
            trial = self._try_last_engine(engines[-1], memory_format, batch_size, refusals)
        _warn_of_all(refusals)
        return trial

    def _try_last_engine(
        self, engine: str, memory_format: str, batch_size: BatchSize, refusals: Sequence[str]
    ) -> NetworkTrial:
        """Try the engine that is left; where the network is at fault, no other engine was."""
        try:
            return self.try_engine(engine, memory_format, batch_size)
        except EngineError:
            _warn_of_all(refusals)
            raise

    def try_engine(self, engine: str, memory_format: str, batch_size: BatchSize) -> NetworkTrial:
        """Try an engine; ``batch_size`` "auto" is found with it.

        Raises:
            EngineError: the engine cannot run the network, or answers otherwise than PyTorch.
            ModelContractError: the network does not answer as the job says.
        """
        settings = EngineSettings(engine, memory_format, 1 if batch_size == "auto" else batch_size)
        config = self._make_definite(settings)
        quantized = self._quantize(config)
        predictor, reference = self._load(config, quantized)
        report = self._run(config, predictor, reference)
        if batch_size == "auto":
            best = self._find_batch_size(config, predictor, report)
            if best > 1 and not self._stays_the_same(config, predictor, best):
                best = 1
            settings = replace(settings, batch_size=best)
            report = self._run(self._make_definite(settings), predictor, reference)
        fitting = self._make_definite(replace(settings, batch_size=report.batch_size))
        if batch_size != "auto" and report.batch_size > 1:
            self._check_batch(config, predictor, report.batch_size)
        if quantized is not None:
            self._compare_speed(fitting, predictor)
        return NetworkTrial(fitting, settings, predictor, report, quantized)

    def find_fastest_engine(self, batch_size: BatchSize) -> tuple[str, str]:
        """Find the engine that takes the least time for a patch, of those that answer as PyTorch.

        Raises:
            ModelContractError: there is none.
        """
        refusal = ModelContractError("inference.engine: fastest: there is none")
        best: EngineSettings | None = None
        least = math.inf
        for keys in engines_to_measure(self.model, open_inference(self.job, "fastest")):
            settings = EngineSettings(
                engine=keys["engine"],
                memory_format=keys.get("memory_format", self.job.config.inference.memory_format),
                batch_size=1 if batch_size == "auto" else batch_size,
            )
            name = " ".join(keys.values())
            try:
                seconds = self._measure(settings)
            except (ModelContractError, DeviceOutOfMemory) as error:
                logger.info("inference.engine: fastest leaves out %s: %s", name, error)
                refusal = ModelContractError(str(error))
                continue
            logger.info("inference.engine: fastest: %s takes %.3g s a patch", name, seconds)
            if seconds < least:
                best = settings
                least = seconds
        if best is None:
            raise refusal
        return best.engine, best.memory_format

    def _measure(self, settings: EngineSettings) -> float:
        """Measure seconds for a patch; the network is released before the next one is loaded."""
        config = self._make_definite(settings)
        predictor, reference = self._load(config)
        report = self._run(config, predictor, reference)
        patch = patch_to_try(config, self.job.input, self.job.plan)
        normalize = make_normalization(config.model.normalize, self.job.input.values_dtype)
        return seconds_per_patch(predictor, patch, normalize, report.batch_size)

    def _check_batch(self, config: DefiniteConfig, predictor: Predictor, size: int) -> None:
        """Refuse a network that mixes the patches of a batch; warn where last bits differ.

        Raises:
            ModelContractError: it mixes them.
        """
        effect = self._try_batch(config, predictor, size)
        if not effect.is_rounding:
            raise ModelContractError(
                f"in batches of {size} the network's answer to a patch depends on the others, by "
                f"{effect.largest:.1e}, root mean square: it normalizes over the whole batch, say. "
                "The output would depend on how the volume is cut into chunks. Write "
                "inference.batch_size: 1."
            )
        if not effect.is_none:
            logger.warning(
                "in batches of %d the last bits of the network's answer to a patch depend on its "
                "batch (%.1e, root mean square): a job that is cut into other chunks has other "
                "last bits. With inference.batch_size: 1 it has the same",
                size,
                effect.largest,
            )

    def _stays_the_same(self, config: DefiniteConfig, predictor: Predictor, size: int) -> bool:
        """Whether a network answers a patch by the same bits in batches of some size."""
        try:
            effect = self._try_batch(config, predictor, size)
        except ModelContractError as error:
            logger.info("inference.batch_size: auto is 1: %s", error)
            return False
        if not effect.is_none:
            logger.info(
                "inference.batch_size: auto is 1: in batches of %d, the network's answer to a "
                "patch depends on its batch",
                size,
            )
        return effect.is_none

    def _try_batch(self, config: DefiniteConfig, predictor: Predictor, size: int) -> BatchEffect:
        return try_batch(predictor, config, self.job.input, self.job.plan, size)

    def _find_batch_size(
        self, config: DefiniteConfig, predictor: Predictor, report: ContractReport
    ) -> int:
        """Find the batch size beyond which a patch takes hardly less time, or memory is short."""
        patch = patch_to_try(config, self.job.input, self.job.plan)
        normalize = make_normalization(config.model.normalize, self.job.input.values_dtype)
        engine = config.inference.engine
        fits = self._fits(engine, report.working_set_bytes)
        return fastest_batch_size(predictor, patch, normalize, fits)

    def _fits(self, engine: str, patch_bytes: int) -> Callable[[int], bool]:
        """Make a function that says whether a batch fits; ``patch_bytes`` are those of a patch."""

        def fits(batch_size: int) -> bool:
            needs = NetworkNeeds.of_engine(engine, batch_size, patch_bytes * batch_size)
            memory = self.job.memory(self.place, needs)
            try:
                check_memory(memory, self.place, self.job.settings.device)
            except ConfigError:
                return False
            return True

        return fits

    def _make_definite(self, settings: EngineSettings) -> DefiniteConfig:
        return make_definite(self.job.config, self.job.settings, settings)

    def _quantize(self, config: DefiniteConfig) -> bytes | None:
        """Make the network of integers, unless an earlier launch has, or the job has no use of it.

        Raises:
            EngineError: the engine cannot make it.
        """
        if config.inference.precision != "int8" or self.quantized is not None:
            return self.quantized
        samples = calibration_samples(config, self.job.input, self.job.plan)
        logger.info("precision: int8 is calibrated on %d patches of the input", len(samples))
        return quantize_network(self.model, config.inference, samples, trust=self.trust)

    def _compare_speed(self, config: DefiniteConfig, predictor: Predictor) -> None:
        """Tell how much time integers save here, and warn where they save none."""
        inference = config.inference.model_copy(update={"precision": "float32"})
        plain = load_predictor(self.model, inference, trust=self.trust)
        patch = patch_to_try(config, self.job.input, self.job.plan)
        normalize = make_normalization(config.model.normalize, self.job.input.values_dtype)
        size = config.inference.patches_per_call
        share = math.inf
        for _ in range(SPEED_ROUNDS):  # in turn, because a machine's speed may drift
            seconds = seconds_per_patch(predictor, patch, normalize, size)
            share = min(share, seconds / seconds_per_patch(plain, patch, normalize, size))
        logger.info("precision: int8 takes %.2f of the time of float32 here", share)
        if share > WORTH_IT:
            logger.warning(
                "precision: int8 takes %.2f of the time of float32 on this processor, and is less "
                "exact: write precision: float32, unless the workers have another one",
                share,
            )

    def _load(
        self, config: DefiniteConfig, quantized: bytes | None = None
    ) -> tuple[Predictor, Predictor | None]:
        inference = config.inference
        predictor = load_predictor(self.model, inference, trust=self.trust, quantized=quantized)
        return predictor, load_reference(self.model, inference, trust=self.trust)

    def _run(
        self, config: DefiniteConfig, predictor: Predictor, reference: Predictor | None
    ) -> ContractReport:
        return try_network(predictor, config, self.job.input, self.job.plan, reference)


def open_inference(job: PlannedJob, engine: str) -> Inference:
    """The section ``inference`` with its device decided and its engine as it is to be tried."""
    values = dict(job.config.inference) | {"device": job.settings.device, "engine": engine}
    return Inference.model_validate(values)
