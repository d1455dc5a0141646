"""What a job is told by the trial of its network, which is not repeated where nothing has changed.

A trial is kept under a key of everything that it depends on: the network's files, the patches of
the input that were tried, the job's settings, libraries, processor and memory; see
:mod:`beam_inference.engines.cache`. What the job records of it is what it was found to be then. Two
things are not taken from there: the description of the engine, which enters the fingerprint, and
whether there is memory for it now.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Annotated

from pydantic import Field, FiniteFloat, PositiveFloat, ValidationError

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import EngineSettings, make_definite
from beam_inference.config.fields import Count, Frozen, Json, Natural, SafeText
from beam_inference.config.inference import BatchSize
from beam_inference.config.network import Network
from beam_inference.engines.cache import user_cache
from beam_inference.engines.choice import (
    engine_description,
    engines_to_measure,
    engines_to_try,
)
from beam_inference.engines.surroundings import describe_surroundings
from beam_inference.engines.trial import Difference
from beam_inference.environment import available_memory
from beam_inference.errors import ModelContractError, PermanentReadError, TransientReadError
from beam_inference.foreign_text import clean_text
from beam_inference.job.parts import cutout
from beam_inference.job.place import Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.launch.decide import batch_size_request, engine_request
from beam_inference.launch.engine_trial import (
    NetworkTrial,
    open_inference,
    try_network_here,
)
from beam_inference.launch.planned_job import PlannedJob
from beam_inference.models.hashes import NetworkFiles, model_sha256, network_file_states
from beam_inference.models.loading import suffix_of
from beam_inference.models.trust import Trust
from beam_inference.worker.trial import find_prediction_bounds, patches_to_bound

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 2000
_MOST_WARNINGS = 20


class TrialFindings(Frozen):
    """What a trial of a network has found.

    Attributes:
        engine: the engine that was chosen, or asked for.
        memory_format: its memory format.
        batch_size: patches of a batch that were asked for, or chosen.
        fitting_batch_size: those that the device had memory for.
        working_set_bytes: memory that the network allocates for such a batch.
        seconds: that such a batch took.
        low, high: range of the values for the patch in the middle of the domain.
        prediction_bounds: powers of two that the values of each head stay within, or those of the
            network if it has none; None if the job states them all.
        warnings: what the trial warned of.
    """

    engine: SafeText
    memory_format: SafeText
    batch_size: Count
    fitting_batch_size: Count
    working_set_bytes: Natural
    seconds: PositiveFloat
    low: FiniteFloat
    high: FiniteFloat
    prediction_bounds: tuple[PositiveFloat, ...] | None
    warnings: Annotated[
        tuple[Annotated[SafeText, Field(max_length=_LONGEST_TEXT)], ...],
        Field(max_length=_MOST_WARNINGS),
    ]

    @property
    def settings(self) -> EngineSettings:
        """The choices that the trial has made."""
        return EngineSettings(self.engine, self.memory_format, self.batch_size)


@dataclass(frozen=True, slots=True)
class TriedNetwork:
    """A network that was tried, now or before.

    Attributes:
        findings: what the trial has found.
        description: what of the engine determines bits.
        quantized: in precision int8, the network of integers; such trials are not kept.
        difference: how far the network is from the one in float32, where that was measured now.
    """

    findings: TrialFindings
    description: Mapping[str, str]
    quantized: bytes | None = None
    difference: Difference | None = None


def find_out_about_network(
    job: PlannedJob,
    place: Place,
    model: Network,
    *,
    trust: Trust,
    earlier: ResolvedJob | None,
    needs_bound: bool,
    quantized: bytes | None = None,
) -> TriedNetwork:
    """Try a job's network on patches of its input, unless the same trial was made before.

    Args:
        job: the job; its device is in its settings.
        place: where the workers run.
        model: the job's network with its files on this machine.
        trust: which code that the network's files carry may run.
        earlier: the job as its first launch resolved it: its choices are kept.
        needs_bound: whether the prediction bound is to be found.
        quantized: in precision int8, the network of integers that the first launch has made.

    Raises:
        UserError: the network does not answer as the job says, or its files were changed meanwhile.
    """
    states = network_file_states(model)
    files = None if trust else NetworkFiles.of(model)
    sha256 = model_sha256(model) if files is None else files.sha256
    engine, memory_format = engine_request(job.config, earlier)
    request = _Request(engine, memory_format, batch_size_request(job.config, earlier), needs_bound)
    keys = None
    is_kept = job.settings.device == "cpu" and job.config.inference.precision != "int8"
    if files is not None and is_kept:
        with suppress(TransientReadError, PermanentReadError):  # the trial itself tells
            keys = _Keys.of(job, place, files, request)
    kept = None if keys is None else _read(keys, job, model)
    if kept is not None:
        return kept
    with _warnings() as warnings:
        trial = try_network_here(
            job,
            place,
            trust=trust,
            earlier=earlier,
            model=model,
            quantized=quantized,
        )
        if network_file_states(model) != states or model_sha256(model) != sha256:
            raise ModelContractError(
                f"model.path {job.config.model.path}: the network's files were changed while they "
                "were loaded. Give the same command again once nobody writes them."
            )
        bounds = None
        if needs_bound:
            bounds = find_prediction_bounds(
                trial.predictor, trial.config, job.input, job.plan, trial.report.batch_size
            )
    tried = TriedNetwork(
        findings=_findings(trial, bounds, warnings),
        description=trial.predictor.description,
        quantized=trial.quantized,
        difference=trial.report.difference,
    )
    is_described = tried.description == engine_description(model, trial.config.inference)
    if keys is not None and keys.files.are_unchanged() and is_described:
        _keep(keys, tried.findings)
    return tried


def _findings(
    trial: NetworkTrial, bounds: tuple[float, ...] | None, warnings: list[str]
) -> TrialFindings:
    engine = trial.engine
    report = trial.report
    return TrialFindings(
        engine=engine.engine,
        memory_format=engine.memory_format,
        batch_size=engine.batch_size,
        fitting_batch_size=report.batch_size,
        working_set_bytes=report.working_set_bytes,
        seconds=report.seconds,
        low=report.low,
        high=report.high,
        prediction_bounds=bounds,
        warnings=tuple(text[:_LONGEST_TEXT] for text in warnings[:_MOST_WARNINGS]),
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked of a trial: the engine, or how to choose it, and whether to find the bound."""

    engine: str
    memory_format: str
    batch_size: BatchSize
    needs_bound: bool


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of the trials of one job's network, which differ in what is asked of them.

    Attributes:
        files: the network's files.
        request: what is asked.
        common: what a trial depends on beyond that and the patches.
        memory: that the job takes, on which a batch size depends that is to be found.
        patches: hashes of the patches that are tried, the one in the middle first.
    """

    files: NetworkFiles
    request: _Request
    common: Json
    memory: int
    patches: Sequence[str]

    @classmethod
    def of(cls, job: PlannedJob, place: Place, files: NetworkFiles, request: _Request) -> _Keys:
        """Read the patches that a trial would run on, and gather what else it depends on.

        Raises:
            TransientReadError: a patch cannot be read.
            PermanentReadError: as before.
        """
        # Any engine: the input does not depend on it.
        config = make_definite(job.config, job.settings, EngineSettings("torch", "contiguous", 1))
        read = partial(cutout, config, job.input)
        patches = patches_to_bound(read, job.plan)
        return cls(
            files=files,
            request=request,
            common={
                "network": files.sha256,
                "suffix": suffix_of(files.model),
                "model": config.model.model_dump(mode="json", exclude=_WHERE),
                "inference": config.inference.model_dump(mode="json", include=_OF_A_PATCH),
                "timeout": job.config.job.timeouts.network,
                "place": [place.processes_per_host, place.threads_per_process],
                "surroundings": describe_surroundings(),
            },
            memory=job.memory(place).host_bytes,
            patches=list(map(_hash_of, patches)),
        )

    def key(self, request: _Request) -> Json:
        """The key of a trial."""
        return {
            **self.common,
            "request": list(astuple(request)),
            "patches": self.patches,
            "memory": self.memory if request.batch_size == "auto" else None,
        }


_WHERE = {"path", "weights", "sha256"}
"""Keys of ``model`` that say where its files are."""
_OF_A_PATCH = {"device", "precision", "augment", "threads", "patch_shape", "partition"}
"""Keys of ``inference`` on which a patch's prediction depends, apart from the engine's."""


def _hash_of(patch: AnyArray) -> str:
    digest = hashlib.sha256(f"{patch.shape} {patch.dtype.str}".encode())
    digest.update(patch.tobytes())
    return digest.hexdigest()


def _keep(keys: _Keys, findings: TrialFindings) -> None:
    """Keep what a trial has found, also for the launches that go on with the job.

    These ask for what was chosen here. What they would be warned of, only their own trial knows.
    """
    user_cache().write("trial", keys.key(keys.request), findings.model_dump_json().encode())
    size = findings.fitting_batch_size
    later = _Request(findings.engine, findings.memory_format, size, needs_bound=False)
    if later != keys.request and not findings.warnings:
        content = findings.model_copy(update={"batch_size": size, "prediction_bounds": None})
        user_cache().write("trial", keys.key(later), content.model_dump_json().encode())


def _read(keys: _Keys, job: PlannedJob, model: Network) -> TriedNetwork | None:
    """Read what was found before, if it can be believed and holds here and now."""
    request = keys.request
    content = user_cache().read("trial", keys.key(request))
    if content is None:
        return None
    try:
        findings = TrialFindings.model_validate_json(content)
        fitting = replace(findings.settings, batch_size=findings.fitting_batch_size)
        config = make_definite(job.config, job.settings, fitting)
    except ValidationError as error:
        logger.debug("a trial that was kept is ignored: %s", error)
        return None
    is_possible = (
        findings.engine in _possible_engines(job, model, request.engine)
        and request.batch_size in ("auto", findings.batch_size)
        and findings.fitting_batch_size <= findings.batch_size
        and findings.low <= findings.high
        and request.needs_bound == (findings.prediction_bounds is not None)
        and len(findings.prediction_bounds or model.stated_bounds) == len(model.stated_bounds)
    )
    available = available_memory()
    if not is_possible or (available is not None and findings.working_set_bytes > available):
        return None
    logger.info("the network was tried before, with the same files, input and libraries")
    for warning in findings.warnings:
        logger.warning("%s", clean_text(warning))
    return TriedNetwork(findings, engine_description(model, config.inference))


def _possible_engines(job: PlannedJob, model: Network, engine: str) -> Collection[str]:
    inference = open_inference(job, engine)
    if engine == "fastest":
        return [keys["engine"] for keys in engines_to_measure(model, inference)]
    return engines_to_try(model, inference)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect what this thread warns of meanwhile; others may still end what they began."""
    texts: list[str] = []
    thread = threading.get_ident()

    class Collector(logging.Handler):
        """Keeps the text of each record."""

        def emit(self, record: logging.LogRecord) -> None:
            """Keep it."""
            if record.thread == thread:
                texts.append(record.getMessage())

    collector = Collector(logging.WARNING)
    package = logging.getLogger("beam_inference")
    package.addHandler(collector)
    try:
        yield texts
    finally:
        package.removeHandler(collector)
