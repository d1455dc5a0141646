"""From a job file to a launch: the last checks, with the network, and then what is created.

Nothing is created or written until every check has passed.
"""

from __future__ import annotations

import logging
import math
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from itertools import islice

from beam_inference.chunk_entries import CHUNKS_PER_FOLDER
from beam_inference.config import JobConfig, Network
from beam_inference.elements import Launch
from beam_inference.environment import usable_memory
from beam_inference.errors import (
    ConfigError,
    DeviceOutOfMemory,
    EngineError,
    ModelContractError,
    StateError,
    WorkerFault,
)
from beam_inference.files import local_model
from beam_inference.job_parts import normalization, patch_to_try, try_network
from beam_inference.memory import MemoryProjection
from beam_inference.outputs import create_output, open_output
from beam_inference.partition import index_ranges
from beam_inference.predictors import (
    Predictor,
    describe_engine,
    device_memory,
    engines_to_measure,
    engines_to_try,
    load_predictor,
    load_reference,
    model_sha256,
)
from beam_inference.predictors.contract import ContractReport
from beam_inference.predictors.probe import fastest_batch_size, seconds_per_patch
from beam_inference.relaunch import as_begun, check_same
from beam_inference.resolved_job import ResolvedJob
from beam_inference.runs import chunks_of_file
from beam_inference.sample import sampled
from beam_inference.state import Receipt, State
from beam_inference.stores import url_of
from beam_inference.survey import (
    STATE_FOLDER,
    THIS_PROCESS,
    Place,
    Survey,
    check_paths,
    default_state_url,
    survey,
)
from beam_inference.verification import parts_fault, receipt_fault

logger = logging.getLogger(__name__)

_RECORDED_VERSIONS = ("beam-inference", "apache-beam", "tensorstore", "torch", "numpy")


def prepare(
    config: JobConfig,
    place: Place = THIS_PROCESS,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    chunks_file: str | None = None,
    sample: tuple[float, int] | None = None,
    workers: int = 1,
) -> Launch:
    """Check a job to the last, then create its output and its state (or find them as an earlier launch left them).

    ``overwrite`` deletes an earlier launch's state, so that every chunk is done anew. ``chunks_file`` is a path or URL
    of a quarantine file or of chunk indices, one a line, to do these only; ``sample`` is a share of the chunks and a
    seed, to do those that :func:`beam_inference.sample.sampled` tells. ``workers`` are those at a time, if known.

    Raises:
        UserError: something is wrong; nothing was created.
    """
    if (chunks_file is not None or sample is not None) and overwrite:
        raise ConfigError("--overwrite deletes the receipts of all chunks, --chunks does only some: give one of them")
    if chunks_file is not None and sample is not None:
        raise ConfigError("--chunks and --sample both say which chunks to do: give one of them")
    check_paths(config, place, chunks_file)
    state = State(default_state_url(config), config.storage)
    with _state_errors():
        before = None if overwrite else state.load_job()
    if before is not None:
        config = as_begun(config, before)
    found = survey(config, place, workers)
    alone = chunks_file is not None or sample is not None
    job = _with_network(found, place, allow_pickle, alone=alone, is_first=before is None)
    if before is not None:
        check_same(before, job, state.url)
    if not overwrite:
        with _state_errors():
            _check_no_other_state(state, job)
            _check_receipts(state.of(job), job, found)
    if chunks_file is not None:
        chunks_file = url_of(chunks_file)
        chunks_of_file(chunks_file, job.fingerprint, job.plan.chunks.count, config.storage)
    launch_id = uuid.uuid4().hex[:12]
    some = None if sample is None else _sample(job, *sample)
    launch = Launch(
        job=job.model_dump_json(),
        state_url=state.url,
        id=launch_id,
        honour_receipts=job.config.job.resume,
        allow_pickle=allow_pickle,
        threads_per_process=place.threads_per_process,
        contract_checked=place.is_this_machine,
        chunks_file=chunks_file if some is None else state.chunks_url(launch_id),
    )
    with _state_errors():
        if overwrite:
            state.clear()
        state.note_start(launch.id)  # before the output: where the state cannot be written, nothing is created
        if some is not None:
            state.write_chunks(launch.id, some)
        if not found.output_exists:
            create_output(found.output)
        check_same(state.create_job(job), job, state.url)  # another first launch may have come before this one
    return launch


def _sample(job: ResolvedJob, share: float, seed: int) -> list[int]:
    chunks = list(sampled(job.plan.chunks, share, seed))
    if not chunks:
        raise ConfigError(
            f"--sample {share:g} holds none of the {job.plan.chunks.count} chunks: take a larger share, or another "
            "--seed"
        )
    return chunks


@contextmanager
def _state_errors() -> Iterator[None]:
    """A state folder that cannot be read or written is, before the launch, the user's to mend."""
    try:
        yield
    except WorkerFault as error:
        raise StateError(f"the state folder cannot be used: {error}. Check output.path and job.state_path.") from None


def _with_network(found: Survey, place: Place, allow_pickle: bool, *, alone: bool, is_first: bool) -> ResolvedJob:
    """The resolved job, with what only the network can tell; where it will run here, it is tried.

    ``alone`` says that chunks will be done without their neighbours. A first launch settles for the batch that the
    device had memory for; a later one, on a smaller device, leaves the job what it is, and its workers halve it.
    """
    config = found.job.config
    _check_memory(found.memory(place, alone=alone), place, config.inference.device)
    model = local_model(config.model, config.storage)
    known: dict[str, object] = {"model_sha256": model_sha256(model), "versions": _versions()}
    if place.is_this_machine:
        config, predictor, report = _tried(model, found, place, allow_pickle)
        known |= {"engine": predictor.describe(), "working_set_bytes": report.working_set_bytes}
        asked = config.inference.batch_size
        if is_first and report.batch_size != asked:
            config = _decided(config, batch_size=report.batch_size)
            known["asked_batch_size"] = asked
            logger.warning(
                "inference.batch_size is %d in this job, and will be: %s is too much", report.batch_size, asked
            )
        _warn_of_range(config, report.low, report.high)
    else:
        (engine,) = engines_to_try(model, config.inference)
        config = _decided(config, engine=engine)
        known["engine"] = describe_engine(model, config.inference)
    known["config"] = config.model_dump()
    # Not model_copy: a copy keeps the plan and the fingerprint that its original has computed.
    job = ResolvedJob.model_validate(found.job.model_dump() | known)
    _check_memory(replace(found, job=job).memory(place, alone=alone), place, config.inference.device)
    return job


def tried(found: Survey, place: Place, *, allow_pickle: bool) -> tuple[Survey, Predictor]:
    """The job with what only its network can tell, and the network, loaded and tried; nothing is created.

    Raises:
        UserError: it does not answer as the job says.
    """
    model = local_model(found.job.config.model, found.job.config.storage)
    config, predictor, report = _tried(model, found, place, allow_pickle)
    config = _decided(config, batch_size=report.batch_size)
    known = {"config": config.model_dump(), "working_set_bytes": report.working_set_bytes}
    return replace(found, job=ResolvedJob.model_validate(found.job.model_dump() | known)), predictor


def _tried(
    model: Network, found: Survey, place: Place, allow_pickle: bool
) -> tuple[JobConfig, Predictor, ContractReport]:
    """The job with its engine, and the network, tried; where ``auto`` leaves a choice, the first engine that can."""
    if found.job.config.inference.engine == "fastest":
        decided = found.job.model_copy(update={"config": _with_fastest_engine(model, found, allow_pickle)})
        return _tried(model, replace(found, job=decided), place, allow_pickle)
    first, *others = engines_to_try(model, found.job.config.inference)
    try:
        config = _decided(found.job.config, engine=first)
        predictor = load_predictor(model, config.inference, allow_pickle=allow_pickle)
        reference = load_reference(model, config.inference, allow_pickle=allow_pickle)
        report = try_network(predictor, config, found.input, found.job.plan, reference)
        if config.inference.batch_size == "auto":
            config = _decided(config, batch_size=_batch_size(predictor, found, report.working_set_bytes, place))
            report = try_network(predictor, config, found.input, found.job.plan, reference)
        return config, predictor, report
    except EngineError as error:
        if not others:
            raise
        logger.warning("inference.engine: auto is %s here: %s", others[0], error)
    decided = found.job.model_copy(update={"config": _decided(found.job.config, engine=others[0])})
    return _tried(model, replace(found, job=decided), place, allow_pickle)


def _with_fastest_engine(model: Network, found: Survey, allow_pickle: bool) -> JobConfig:
    """The job with the engine, of those that give what PyTorch gives, that takes the least time for a patch here."""
    config, refusal = found.job.config, ModelContractError("inference.engine: fastest: there is none")
    patch, normalize = patch_to_try(config, found.input, found.job.plan), normalization(config, found.input.dtype)
    best, least = None, math.inf
    for keys in engines_to_measure(model, config.inference):
        one, name = _decided(config, **keys), " ".join(keys.values())
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
            best, least = one, seconds
    if best is None:
        raise refusal
    return best


def _batch_size(predictor: Predictor, found: Survey, working_set_bytes: int, place: Place) -> int:
    """What ``auto`` means here; ``working_set_bytes`` are those of one patch."""
    job, config = found.job, found.job.config

    def fits(batch_size: int) -> bool:
        known = {"config": _decided(config, batch_size=batch_size), "working_set_bytes": working_set_bytes * batch_size}
        try:
            _check_memory(
                replace(found, job=job.model_copy(update=known)).memory(place), place, config.inference.device
            )
        except ConfigError:
            return False
        return True

    patch = patch_to_try(config, found.input, job.plan)
    return fastest_batch_size(predictor, patch, normalization(config, found.input.dtype), fits)


def _decided(config: JobConfig, **keys: object) -> JobConfig:
    """The job with keys of ``inference`` made definite."""
    return config.model_copy(update={"inference": config.inference.model_copy(update=keys)})


def _check_memory(memory: MemoryProjection, place: Place, device: str) -> None:
    """Refuse chunks that cannot fit this machine; of other machines nothing is known here."""
    if not place.is_this_machine:
        return
    needed, total = memory.host_bytes * place.processes_per_host, usable_memory()
    if needed > total:
        raise ConfigError(
            f"{place.processes_per_host} worker process(es) would need {needed / 2**30:.1f} GiB for their chunks, this "
            f"machine has {total / 2**30:.1f} GiB. Make inference.chunk_shape or inference.batch_size (or "
            "model.crop_margin) smaller."
        )
    on_device = device_memory() if device == "cuda" else None
    if on_device is not None and memory.device_bytes > on_device:
        raise ConfigError(
            f"a chunk would need {memory.device_bytes / 2**30:.1f} GiB on the GPU, which has {on_device / 2**30:.1f} "
            "GiB. Make inference.chunk_shape or inference.batch_size (or model.crop_margin) smaller."
        )


def _warn_of_range(config: JobConfig, low: float, high: float) -> None:
    limits = config.output.value_range
    if limits is not None and (low < limits[0] or high > limits[1]):
        logger.warning(
            "on a patch from the middle of the ROI the network's values reach from %g to %g; values beyond "
            "output.value_range %s are clipped",
            low,
            high,
            list(limits),
        )


def _check_receipts(state: State, job: ResolvedJob, found: Survey) -> None:
    """Refuse receipts that are not to be honoured, or that speak of blocks which are gone.

    Of the blocks one chunk is read back, the first that has a receipt: enough to notice an output that was emptied or
    exchanged, not a damaged block (that is what ``verify --deep`` is for).
    """
    count = job.plan.chunks.count
    first = _some_receipt(state, count)
    summed = _some_sums(state, count) if job.plan.seams == "exchange" else None
    if first is None and summed is None:
        return
    output = open_output(found.output) if found.output_exists else None
    if output is None:
        raise StateError(
            f"{state.url} holds receipts, but there is no output at {found.output.url}: resuming would call complete "
            "what is not there. Restore the output, or pass --overwrite to do every chunk anew."
        )
    if not job.config.job.resume:
        raise StateError(
            f"job.resume is false, but {state.url} holds receipts of an earlier launch. Pass --overwrite to do "
            "every chunk anew, or set job.resume: true to do what is missing."
        )
    fault = receipt_fault(first, job, output) if first else None
    if fault is None and summed is not None:
        first, fault = summed, parts_fault(summed.parts, output)
    if fault and first:
        raise StateError(
            f"{state.url} says that chunk {first.chunk} is done, but in {found.output.url} {fault}. The output was "
            "changed, or is not the one these receipts speak of. See what is left with verify --deep, or pass "
            "--overwrite to do every chunk anew."
        )


def _some_receipt(state: State, count: int) -> Receipt | None:
    """The first receipt where workers begin."""
    for start, stop in _folders(count):
        first = next(state.receipt_indices(start, stop), None)
        if first is not None:
            return state.read_receipt(first)
    return None


def _some_sums(state: State, count: int) -> Receipt | None:
    """The same of ``seams: exchange``'s first stage, one that speaks of blocks if there is one."""
    found = None
    for start, stop in _folders(count):
        for receipt in state.read_sums(list(islice(state.sums_indices(start, stop), 64))):
            if receipt.parts:
                return receipt
            found = receipt
    return found


def _folders(count: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks to list, a bounded number, also for 10^9 chunks."""
    few = count <= 512 * CHUNKS_PER_FOLDER
    for start in range(0, count, CHUNKS_PER_FOLDER) if few else [start for start, _ in index_ranges(count)]:
        yield start, min(count, start + CHUNKS_PER_FOLDER)


def _check_no_other_state(state: State, job: ResolvedJob) -> None:
    """Refuse to write with a state elsewhere into an output that holds the state of another job."""
    beside = f"{job.config.output.path.rstrip('/')}/{STATE_FOLDER}"
    if state.url == beside:
        return
    other = State(beside, job.config.storage).load_job()
    if other is not None and other.fingerprint != job.fingerprint:
        raise StateError(
            f"the output {job.config.output.path} was written by another job, whose receipts are in {beside}; this one "
            "would overwrite its blocks behind their back. Use another output.path, or remove that folder."
        )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
