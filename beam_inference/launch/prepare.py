"""From a job file to a launch: the last checks, with the network, and then what is created.

Nothing is created or written until every check has passed.
"""

from __future__ import annotations

import logging
import platform
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata

from beam_inference.config.definite import DefiniteConfig, EngineSettings, make_definite
from beam_inference.config.engines import CHOOSE
from beam_inference.config.job import JobConfig
from beam_inference.config.network import Network
from beam_inference.config.plugins import list_versions
from beam_inference.config.storage import check_url
from beam_inference.engines import identity
from beam_inference.engines.choice import engine_description
from beam_inference.environment import available_memory
from beam_inference.errors import ConfigError, StateError, VolumeError, WorkerFault
from beam_inference.geometry.sampling import sample_chunks
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.chunk_choice import choose_chunks
from beam_inference.job.enlargement import check_enlargement, enlarge_job
from beam_inference.job.messages import Launch
from beam_inference.job.ownership import Owner, check_owner, claim_output, owner_of
from beam_inference.job.parts import record_mask
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.job.provenance import record_job
from beam_inference.job.resolved_job import (
    NUMERICS,
    QuantizationError,
    ResolvedInput,
    ResolvedJob,
)
from beam_inference.job.runs import claim_length_of
from beam_inference.job.shards import Shard
from beam_inference.job.state import State, default_state_url
from beam_inference.launch import decide
from beam_inference.launch.checks import (
    check_no_auto,
    check_no_auto_of_integers,
    check_paths,
    check_shard,
)
from beam_inference.launch.decide import (
    batch_size_request,
    complete_bounds,
    decide_prediction_bounds,
    engine_request,
    job_of_engine,
    left_to_workers,
    prediction_bounds_elsewhere,
    warn_of_smaller_batch,
)
from beam_inference.launch.engine_trial import (
    choose_engine_elsewhere,
    describe_engine_elsewhere,
    warn_of_range,
)
from beam_inference.launch.kept_trial import TriedNetwork, find_out_about_network
from beam_inference.launch.memory import check_memory, check_trial_memory
from beam_inference.launch.network_question import AskWorker, WorkerChoice, make_question
from beam_inference.launch.package_keys import warn_of_departures
from beam_inference.launch.planned_job import (
    NetworkNeeds,
    PlannedJob,
    levels_request,
    plan_job,
    warn_if_inputs_unfinished,
)
from beam_inference.launch.recomputation import check_agreement
from beam_inference.launch.resume import (
    check_receipts,
    check_same,
    check_same_engine,
    check_same_network,
    check_same_roi,
)
from beam_inference.launch.state_errors import state_errors
from beam_inference.launch.strategy import cheaper_strategy
from beam_inference.launch.witnesses import find_comparable
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import model_sha256
from beam_inference.models.loading import loader_of, suffix_of
from beam_inference.models.trust import Trust
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.volumes.outputs import LOSSY, create_output
from beam_inference.volumes.provenance import read_provenance

logger = logging.getLogger(__name__)

_RECORDED_VERSIONS = ("beam-inference", "apache-beam", "tensorstore", "torch", "numpy")


def prepare(
    config: JobConfig,
    place: Place = THIS_PROCESS,
    *,
    overwrite: bool = False,
    trust: Trust = Trust.NOTHING,
    chunks: Sequence[str] = (),
    redo: bool = False,
    sample: tuple[float, int] | None = None,
    shard: Shard | None = None,
    workers: int = 1,
    claims: bool = False,
    launch_id: str | None = None,
    known: KnownNetwork | None = None,
    ask_worker: AskWorker | None = None,
) -> Launch:
    """Check all of a job, then create its output and its state, or go on with those of before.

    Args:
        config: the job file.
        place: where the workers run.
        overwrite: delete an earlier launch's state, so that every chunk is done anew.
        trust: which code that the network's files carry may run.
        chunks: indices, boxes, and paths or URLs of files of them, as
            :func:`beam_inference.job.chunk_choice.choose_chunks` reads them: only these are done.
        redo: do the chunks of ``chunks`` again that have a receipt, and keep the former ones.
        sample: a share of the chunks and a seed: only the chunks are done that
            :func:`beam_inference.geometry.sampling.sample_chunks` picks.
        shard: the shard whose chunks are done, of a job that was divided.
        workers: worker processes that run at a time, if known.
        claims: whether workers claim what they do, so that several launches share the chunks. Those
            that do only some of the chunks do not.
        launch_id: name of the launch; by default a new one.
        known: the network as the job of another volume has it, which this one shares.
        ask_worker: has a worker elsewhere try the network, where the job file leaves choices open
            that only a machine that computes can make; None where none can be asked.

    Returns:
        What the workers need to know.

    Raises:
        UserError: something is wrong; nothing was created.
    """
    _check_choice_of_chunks(chunks, sample, shard, overwrite=overwrite, redo=redo)
    check_paths(config, place)
    state = State(default_state_url(config), config.storage)
    earlier = None if overwrite else _load_earlier(state, shard)
    config = _with_earlier_choices(config, earlier, known, state)
    if earlier is None and known is None:
        _check_open_choices(config, place, may_ask=ask_worker is not None)
    planned = plan_job(config, place, workers, earlier)
    warn_if_inputs_unfinished(config)
    launch_id = launch_id or uuid.uuid4().hex[:12]
    ask = None if ask_worker is None else _Asking(ask_worker, place, state, launch_id, trust)
    is_done = (
        earlier is not None
        and not redo
        and planned.roi == earlier.roi
        and _is_done(state, earlier, shard)
    )
    job, quantized = _resolve_what_is_left(
        planned, place, earlier, state, known, is_done=is_done, trust=trust, ask=ask
    )
    damaged = [] if overwrite else _check_earlier_launches(planned, job, earlier, state)
    if earlier is not None and earlier.roi != job.roi:
        _check_enlarged_launch(earlier, job, state, shard)
    if planned.output_exists:
        read_provenance(config.output.path, config.storage)  # what cannot be read is told now
    chosen = _sample(job, *sample) if sample is not None else choose_chunks(chunks, job)
    inference = job.config.inference
    needs = NetworkNeeds.of_engine(inference.engine, inference.batch_size, job.working_set_bytes)
    planned = planned.with_strategy(inference.plan_strategy)
    io_depth = planned.io_depth(place, needs)
    _check_memory(planned, place, needs, io_depth)
    launch = Launch(
        job=job.model_dump_json(),
        state_url=state.url,
        id=launch_id,
        honour_receipts=job.config.job.resume,
        trust=trust,
        threads_per_process=place.threads_per_process,
        contract_checked=place.is_this_machine,
        chunk_list=state.chunks_url(launch_id) if chosen else None,
        io_depth=io_depth,
        shard=shard,
    )
    with state_errors():
        if overwrite:
            state.clear()
        # Before the output: where the state cannot be written, nothing is created.
        state.note_start(launch.id)
        state.create_id()
        _claim_outputs(planned, owner_of(job, state), replace=overwrite)
        if quantized is not None:
            state.write_network(quantized)
        _create_outputs(planned)
        recorded = _record_job(state, job, damaged)
        _write_choice(state.of(job), launch.id, chosen, redo=redo)
        launch = _with_claims(launch, job, state, workers) if claims else launch
    _record_provenance(recorded, job, overwrite=overwrite)
    return launch


def _check_open_choices(config: JobConfig, place: Place, *, may_ask: bool) -> None:
    """Refuse choices that are left to workers elsewhere, if no worker can be asked to make them."""
    if place.is_this_machine:
        return
    check_no_auto_of_integers(config.inference)
    if not may_ask:
        check_no_auto(config.inference)


def _record_job(state: State, job: ResolvedJob, damaged: Sequence[int]) -> ResolvedJob:
    """Record a job, or go on with one that was launched before; the job as that has it.

    Args:
        state: the state folder.
        job: the job.
        damaged: chunks of earlier launches that are to be done again.
    """
    # Another first launch may have come before this one.
    recorded = state.create_job(job)
    check_same(recorded, job, state.url)
    if recorded.roi == job.roi:
        state.of(job).forget_chunks(damaged)
        return recorded
    check_enlargement(recorded, job, state.url)
    enlarge_job(state, recorded, job, damaged)
    return recorded.with_roi(job.roi)


def _with_earlier_choices(
    config: JobConfig, earlier: ResolvedJob | None, known: KnownNetwork | None, state: State
) -> JobConfig:
    """The job file with what other volumes began with, if this one has not been launched.

    Raises:
        StateError: an earlier launch of the same job was on another device, or in other digits.
    """
    if earlier is None:
        return config if known is None else decide.with_known_device(config, known.job)
    warn_of_smaller_batch(config, earlier)
    if config.inference.engine in CHOOSE:
        # The earlier engine is kept, and may not exist on another device or in other digits.
        check_same_engine(config, earlier, state.url, ("device", "precision"))
    return config


def _with_claims(launch: Launch, job: ResolvedJob, state: State, workers: int) -> Launch:
    """The launch with the number of chunks that are claimed at once, as the first one had it."""
    if not launch.does_all_missing:
        return launch
    length = state.of(job).crew().agree_on_length(claim_length_of(job, workers))
    return replace(launch, claim_length=length)


def _load_earlier(state: State, shard: Shard | None) -> ResolvedJob | None:
    """Read the job as its first launch resolved it; a shard is refused that it does not have."""
    with state_errors():
        earlier = state.load_job()
        if shard is not None:
            check_shard(shard, state, is_prepared=earlier is not None)
        return earlier


def _record_provenance(earlier: ResolvedJob, job: ResolvedJob, *, overwrite: bool) -> None:
    """Tell in the output how it is made: by the job of its first launch, with the paths of now."""
    try:
        record_job(earlier.model_copy(update={"config": job.config}), replace=overwrite)
    except WorkerFault as error:
        raise VolumeError(
            f"the output's metadata cannot tell how it is made: {error}. Check output.path."
        ) from None


def _claim_outputs(planned: PlannedJob, owner: Owner, *, replace: bool) -> None:
    for output in planned.volumes.values():
        claim_output(output.spec.url, owner, planned.config.storage, replace=replace)


def _create_outputs(planned: PlannedJob) -> None:
    for output in planned.volumes.values():
        if not output.exists:
            create_output(output.spec)


def _check_enlarged_launch(
    earlier: ResolvedJob, job: ResolvedJob, state: State, shard: Shard | None
) -> None:
    """Refuse a ROI that is no enlargement of the earlier one, or of a shard. Raises StateError."""
    check_enlargement(earlier, job, state.url)
    if shard is not None:
        raise StateError(
            f"{state.url}: the job is divided over roi {earlier.roi}, and the job file says "
            f"{job.roi}: give the command prepare first, which does so anew"
        )


def _check_earlier_launches(
    planned: PlannedJob, job: ResolvedJob, earlier: ResolvedJob | None, state: State
) -> list[int]:
    """Check what earlier launches wrote. Returns chunks of theirs that are to be done again."""
    config = planned.config
    counted = job if earlier is None else job.with_roi(earlier.roi)
    with state_errors():
        owner = owner_of(job, state)
        for output in planned.volumes.values():
            check_owner(output.spec.url, owner, config.storage)
        return check_receipts(state.of(counted), counted, planned)


def resolve(
    planned: PlannedJob,
    place: Place,
    earlier: ResolvedJob | None = None,
    *,
    trust: Trust = Trust.NOTHING,
) -> ResolvedJob:
    """Resolve a job: with its network, which is tried where the workers run on this machine.

    A first launch settles for the batch that the device had memory for. A later one, on a smaller
    device, leaves the job as it is, and its workers halve the batch.

    Args:
        planned: the job without its network.
        place: where the workers run.
        earlier: the job as its first launch resolved it, if there was one.
        trust: which code that the network's files carry may run.

    Raises:
        UserError: the network cannot be loaded, answers otherwise than the job says, or its chunks
            do not fit this machine.
    """
    return _resolve(planned, place, earlier, None, trust=trust)[0]


@dataclass(frozen=True, slots=True)
class _Asking:
    """Asks a worker about the network of one launch.

    Attributes:
        ask_worker: has a worker answer a question.
        place: where the workers run.
        state: the state folder of the job.
        launch: name of the launch.
        trust: which code that the network's files carry may run.
    """

    ask_worker: AskWorker
    place: Place
    state: State
    launch: str
    trust: Trust

    def __call__(self, planned: PlannedJob, sha256: str, *, needs_bound: bool) -> WorkerChoice:
        """Ask about the network of a job, whose files have this hash."""
        question = make_question(
            planned,
            self.place,
            self.state,
            self.launch,
            sha256=sha256,
            needs_bound=needs_bound,
            trust=self.trust,
        )
        return self.ask_worker(question)


def _resolve(
    planned: PlannedJob,
    place: Place,
    earlier: ResolvedJob | None,
    quantized: bytes | None,
    *,
    trust: Trust,
    ask: _Asking | None = None,
) -> tuple[ResolvedJob, bytes | None]:
    """Resolve a job, as :func:`resolve` does; the job, and in precision int8 its network.

    That network is the same for every worker, whichever machine it is on: the one that the launch
    has tried.
    """
    config = planned.config
    kept = job_of_engine(config, earlier)
    _check_memory(planned, place, planned.default_needs)
    if place.is_this_machine and planned.settings.device == "cpu":
        check_trial_memory(planned.memory(place), available_memory())
    model, sha256 = _fetch_model(config, is_first=earlier is None)
    bounds = decide_prediction_bounds(config, earlier)
    tried = None
    if place.is_this_machine or config.inference.precision == "int8":
        tried = find_out_about_network(
            planned,
            place,
            model,
            trust=trust,
            earlier=kept,
            needs_bound=None in bounds,
            quantized=quantized,
        )
        quantized = tried.quantized
    elif ask is not None and kept is None and _is_to_be_tried(config, bounds):
        choice = ask(planned, sha256, needs_bound=None in bounds)
        planned = planned.with_device(choice.device)
        tried = choice.tried
    if tried is None:
        network = _resolve_untried(planned, model, sha256, bounds, kept)
    else:
        if earlier is None and planned.leaves_strategy:
            findings = tried.findings
            seconds = findings.seconds / findings.fitting_batch_size
            planned = _with_cheaper_strategy(planned, seconds)
        network = _resolve_tried(planned, tried, sha256, bounds, is_first=earlier is None)
    _check_memory(planned, place, network.needs)
    return _record(planned, network), quantized


def _is_to_be_tried(config: JobConfig, bounds: Sequence[float | None]) -> bool:
    """Whether only a trial tells what a job on machines elsewhere leaves open."""
    if left_to_workers(config.inference):
        return True
    try:
        prediction_bounds_elsewhere(config, bounds)
    except ConfigError:
        return True
    return False


def _resolve_tried(
    planned: PlannedJob,
    tried: TriedNetwork,
    sha256: str,
    bounds: Sequence[float | None],
    *,
    is_first: bool,
) -> _ResolvedNetwork:
    """What a job records of a network that was tried.

    Args:
        planned: the job.
        tried: its network.
        sha256: hash of the network's files.
        bounds: the prediction bounds that are known without the trial.
        is_first: whether the job was not launched before, and keeps a batch that fits.
    """
    trial = tried.findings
    engine = trial.settings
    fitting = trial.fitting_batch_size
    requested_batch_size = None
    if is_first and fitting != engine.batch_size:
        requested_batch_size = engine.batch_size
        engine = replace(engine, batch_size=fitting)
        logger.warning(
            "inference.batch_size stays %d in this job: %s is too much",
            fitting,
            requested_batch_size,
        )
    definite = make_definite(planned.config, planned.settings, engine)
    if trial.prediction_bounds is not None:
        bounds = complete_bounds(bounds, trial.prediction_bounds)
    warn_of_range(definite, trial.low, trial.high)
    return _ResolvedNetwork(
        config=definite,
        sha256=sha256,
        engine=tried.description,
        bounds=_known(bounds),
        working_set_bytes=trial.working_set_bytes,
        patch_seconds=trial.seconds / fitting,
        requested_batch_size=requested_batch_size,
        quantization_error=_quantization_error(tried),
    )


def _resolve_untried(
    planned: PlannedJob,
    model: Network,
    sha256: str,
    bounds: Sequence[float | None],
    earlier: ResolvedJob | None,
) -> _ResolvedNetwork:
    """What a job records of a network that its workers try: the engine is the one that it names.

    Args:
        planned: the job.
        model: its network with its files on this machine.
        sha256: hash of these files.
        bounds: the prediction bounds that are known.
        earlier: the job as its first launch resolved it: its choices are kept.
    """
    if earlier is None:
        check_no_auto(planned.config.inference)  # with mixed_devices, no launch decides for others
    engine = choose_engine_elsewhere(planned, model, earlier)
    definite = make_definite(planned.config, planned.settings, engine)
    return _ResolvedNetwork(
        config=definite,
        sha256=sha256,
        engine=describe_engine_elsewhere(model, definite.inference, earlier),
        bounds=prediction_bounds_elsewhere(planned.config, bounds),
        working_set_bytes=0,
        patch_seconds=0.0,
    )


def _fetch_model(config: JobConfig, *, is_first: bool) -> tuple[Network, str]:
    """Fetch the network's files; where they lie, and their hash."""
    model = local_model(config.model, config.storage)
    sha256 = model_sha256(model)
    if is_first:
        warn_of_departures(config, model)
    return model, sha256


def _quantization_error(tried: TriedNetwork) -> QuantizationError | None:
    """What the trial of a network of integers has measured; None of any other network."""
    difference = tried.difference
    if tried.quantized is None or difference is None:
        return None
    return QuantizationError(
        root_mean_square=difference.typical,
        largest=difference.largest,
        allowed=difference.allowed,
    )


@dataclass(frozen=True, slots=True)
class KnownNetwork:
    """The network of a job of several volumes, as it was tried on one of them.

    Attributes:
        job: the job of that volume: engine, batch size and prediction bounds are those of all.
        is_tried: whether this launch has tried the network; else the next volume with work left is
            one to try it on.
    """

    job: ResolvedJob
    is_tried: bool


def _resolve_what_is_left(
    planned: PlannedJob,
    place: Place,
    earlier: ResolvedJob | None,
    state: State,
    known: KnownNetwork | None,
    *,
    is_done: bool,
    trust: Trust,
    ask: _Asking | None,
) -> tuple[ResolvedJob, bytes | None]:
    """Resolve a job, with its network only if there are chunks left to do, or to do again.

    Returns:
        The job; and its network of integers, if one was made now.

    Raises:
        StateError: it was launched before, and is another job by now; or other volumes have
            another network.
    """
    before = earlier or (None if known is None else known.job)
    if before is None:
        return _resolve(planned, place, None, None, trust=trust, ask=ask)
    if is_done or (known is not None and known.is_tried):
        job = resolve_without_network(planned, before, place)
    else:
        quantized = _read_quantized(planned, before, state)
        if earlier is not None and quantized is not None:  # a trial would compare it with another
            check_same(earlier, resolve_without_network(planned, earlier, place), state.url)
        job, _ = _resolve(planned, place, before, quantized, trust=trust, ask=ask)
    if known is not None:
        check_same_network(job, known.job, state.url)
    if earlier is not None:
        check_same(earlier, job, state.url)
        if not is_done and job.engine != earlier.engine:  # only where several may do the job
            _check_agreement(job, state, place, trust=trust)
    return job, None


def _check_agreement(job: ResolvedJob, state: State, place: Place, *, trust: Trust) -> None:
    """Compute a chunk that another engine has done, and refuse to go on if the two disagree."""
    if not place.is_this_machine:
        raise ConfigError(
            "inference.mixed_devices: another engine has begun this job, and a launch compares "
            "itself with that on the machine that computes, which is not this one. Give the same "
            "command there, without a runner's flags, or use the engine, device and threads that "
            "the job began with."
        )
    with state_errors():
        witness = find_comparable(state.of(job), job)
    if witness is None:
        raise StateError(
            f"{state.url}: another engine has begun this job, and no chunk is done that shows "
            "whether the two agree. Give the same command again once a chunk is done."
        )
    check_agreement(job, state, witness, trust=trust)


def _read_quantized(planned: PlannedJob, earlier: ResolvedJob, state: State) -> bytes | None:
    """Read the network of integers that the first launch has made, if the job still wants one."""
    sha256 = earlier.quantized_sha256
    if sha256 is None or planned.config.inference.precision != "int8":
        return None
    with state_errors():
        return state.read_network(sha256)


def _is_done(state: State, job: ResolvedJob, shard: Shard | None) -> bool:
    """Whether every chunk of a job, or of a shard, has a receipt that can be believed."""
    count = job.plan.chunks.count
    start, stop = (0, count) if shard is None else shard.chunk_range(count)
    receipts = state.of(job)
    with state_errors():
        is_listed = receipts.count_receipts(start, stop) == stop - start
        return is_listed and receipts.tally_receipts(stop, start).chunks == stop - start


def resolve_again(config: JobConfig, earlier: ResolvedJob, url: str) -> ResolvedJob:
    """Resolve a job that was launched by its job file alone, as far as only the network tells more.

    Args:
        config: the job file as it is now.
        earlier: the job as its first launch resolved it, its output where it is now.
        url: URL of its state folder.

    Returns:
        The job; what only a trial of its network tells is as it was recorded.

    Raises:
        StateError: it gives another job.
        UserError: something that it names is gone, or wrong.
    """
    planned = plan_job(config, THIS_PROCESS, earlier=earlier)
    here = resolve_without_network(planned, earlier)
    check_same(earlier, here, url)
    check_same_roi(earlier, here, url)
    for key, single in earlier.config.by_output.items():
        encoding = single.output.encoding
        if encoding in LOSSY and config.by_output[key].output.encoding == "auto":
            raise StateError(
                f"{url}: {key} is recorded with the lossy encoding {encoding}, which "
                f"{key}.encoding: auto never chooses. If that was meant, write it in the job file; "
                "else compute every chunk again: run with --overwrite"
            )
    return here


def resolve_without_network(
    planned: PlannedJob, earlier: ResolvedJob, place: Place = THIS_PROCESS
) -> ResolvedJob:
    """Resolve a job whose chunks are all done: its network is hashed, but neither loaded nor tried.

    What only the network tells is taken as its first launch recorded it.

    Args:
        planned: the job without its network.
        earlier: the job as its first launch resolved it.
        place: where the workers run.

    Raises:
        UserError: the network's files are gone, or its engine is.
    """
    config = planned.config
    name, memory_format = engine_request(config, earlier)
    batch_size = batch_size_request(config, earlier)
    if batch_size == "auto":
        batch_size = earlier.config.inference.batch_size
    settings = EngineSettings(name, memory_format, batch_size)
    definite = make_definite(config, planned.settings, settings)
    model = local_model(config.model, config.storage)
    engine = dict(identity.DESCRIPTION)
    if not place.is_this_machine:
        engine = dict(describe_engine_elsewhere(model, definite.inference, earlier))
    elif model.path != "identity":
        engine = engine_description(model, definite.inference)
    for key in ("parameters", "quantized"):  # hashes that take the network itself
        if key in earlier.engine:
            engine[key] = earlier.engine[key]
    return _record(
        planned,
        _ResolvedNetwork(
            config=definite,
            sha256=model_sha256(model),
            engine=engine,
            bounds=_known(decide_prediction_bounds(config, earlier)),
            working_set_bytes=earlier.working_set_bytes,
            patch_seconds=earlier.patch_seconds,
            requested_batch_size=earlier.requested_batch_size,
            quantization_error=earlier.quantization_error,
        ),
    )


@dataclass(frozen=True, slots=True)
class _ResolvedNetwork:
    """What a job records of its network; see :class:`ResolvedJob`."""

    config: DefiniteConfig
    sha256: str
    engine: Mapping[str, str]
    bounds: Sequence[float]
    working_set_bytes: int
    patch_seconds: float
    requested_batch_size: int | None = None
    quantization_error: QuantizationError | None = None

    @property
    def needs(self) -> NetworkNeeds:
        """Memory of the network, as far as it is known."""
        inference = self.config.inference
        return NetworkNeeds.of_engine(
            inference.engine, inference.batch_size, self.working_set_bytes
        )


def _record_input(volume: InputVolume, planned: PlannedJob) -> ResolvedInput:
    return ResolvedInput(
        bounds=volume.stored.bounds,
        channels=volume.channels,
        dtype=volume.values_dtype.name,
        block_bytes=int(volume.block_bytes(planned.plan.totals.extremes.input)),
        resampling=volume.resampling,
        limits=list(volume.limits),
        axis_layout=volume.stored.axis_layout,
    )


def _known(bounds: Sequence[float | None]) -> list[float]:
    """Bounds that are known: all of them, but for jobs that began by older rules."""
    return [bound for bound in bounds if bound is not None]


def _record(planned: PlannedJob, network: _ResolvedNetwork) -> ResolvedJob:
    return ResolvedJob(
        config=network.config,
        requested_normalize=levels_request(planned.config),
        requested_batch_size=network.requested_batch_size,
        input_bounds=planned.input.bounds,
        input_channels=planned.input.channels,
        resampling=planned.input.resampling,
        to_output=planned.to_output,
        input_dtype=planned.input.values_dtype.name,
        input_block_shape=planned.input.read_shape,
        input_axis_layout=planned.input.stored.axis_layout,
        further_inputs=[_record_input(each.volume, planned) for each in planned.input.further],
        mask_origins=_mask_origins(planned),
        masks={key: record_mask(mask) for key, mask in planned.masks.items()},
        roi=planned.roi,
        output_bounds=planned.output.bounds,
        voxel_size_nm=planned.output.voxel_size_nm,
        model_sha256=network.sha256,
        operator_sha256=dict(planned.operator_sha256),
        engine=dict(network.engine),
        prediction_bound=max(network.bounds, default=None),
        head_bounds=list(network.bounds) if network.config.model.heads else [],
        working_set_bytes=network.working_set_bytes,
        patch_seconds=network.patch_seconds,
        quantization_error=network.quantization_error,
        versions={**_library_versions(), **_extension_versions(network.config)},
        numerics=NUMERICS,
    )


def _check_memory(
    planned: PlannedJob, place: Place, needs: NetworkNeeds, io_depth: int = 1
) -> None:
    for memory in planned.all_memory(place, needs, io_depth):
        check_memory(memory, place, planned.settings.device)


def _with_cheaper_strategy(planned: PlannedJob, seconds_per_patch: float) -> PlannedJob:
    """The job by the strategy that takes less time, now that its network was timed."""
    exchange = planned.plan_in("exchange")
    recompute = planned.plan_in("recompute")
    channels = planned.config.model.output_channels
    best = cheaper_strategy(exchange, recompute, channels, seconds_per_patch)
    logger.info("inference.strategy: auto is %s", best)
    return planned.with_strategy(best)


def _mask_origins(planned: PlannedJob) -> dict[str, Zyx]:
    """Where index zero of the masks' arrays lies, by their keys; without those at 0."""
    origins = {key: mask.volume.origin.voxel for key, mask in planned.masks.items()}
    return {key: origin for key, origin in origins.items() if any(origin)}


def _check_choice_of_chunks(
    chunks: Sequence[str],
    sample: tuple[float, int] | None,
    shard: Shard | None,
    *,
    overwrite: bool,
    redo: bool,
) -> None:
    for name in chunks:
        check_url(name, "--chunks")
    if redo and not chunks:
        raise ConfigError(
            "--redo does chunks again that are done: name them with --chunks (or pass --overwrite "
            "to do the whole job again)"
        )
    if shard is not None and overwrite:
        raise ConfigError(
            "--overwrite deletes the receipts of all shards, --shard does only one: pass "
            "--overwrite to prepare, once"
        )
    if shard is not None and (chunks or sample is not None):
        raise ConfigError(
            "--shard, --chunks and --sample each say which chunks to do: give one of them"
        )
    if (chunks or sample is not None) and overwrite:
        raise ConfigError(
            "--overwrite deletes the receipts of all chunks, --chunks does only some: give one of "
            "them"
        )
    if chunks and sample is not None:
        raise ConfigError("--chunks and --sample both say which chunks to do: give one of them")


def _write_choice(state: State, launch: str, chosen: Sequence[int], *, redo: bool) -> None:
    if chosen:
        state.write_chunks(launch, chosen)
    if redo:
        state.set_receipts_aside(chosen, launch)


def _sample(job: ResolvedJob, share: float, seed: int) -> list[int]:
    chunks = list(sample_chunks(job.plan.chunks, share, seed))
    if not chunks:
        raise ConfigError(
            f"--sample {share:g} holds none of the {job.plan.chunks.count} chunks: take a larger "
            "share, or another --seed"
        )
    return chunks


def _extension_versions(config: DefiniteConfig) -> dict[str, str]:
    """Versions of the distributions that bring the job's extensions."""
    suffixes = [suffix_of(config.model).removeprefix(".")] if loader_of(config.model) else []
    outputs = config.by_output.values()
    operators = [each.operator for single in outputs for each in single.postprocess]
    return (
        list_versions("operators", operators)
        | list_versions("formats", [single.output.format for single in outputs])
        | list_versions("engines", [config.inference.engine])
        | list_versions("models", suffixes)
    )


@cache
def _library_versions() -> Mapping[str, str]:
    versions = {"python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
