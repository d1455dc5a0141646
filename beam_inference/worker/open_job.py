"""What a process opens once to work on a job: its stores, its network, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from beam_inference.config.network import Network as NetworkConfig
from beam_inference.config.operators import Operator
from beam_inference.engines.choice import keeps_memory
from beam_inference.engines.loading import load_predictor, load_reference
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.trial import settle
from beam_inference.errors import WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.resampling import Resampling
from beam_inference.job.messages import Launch
from beam_inference.job.operator_files import local_operators, operator_sha256
from beam_inference.job.parts import normalization, open_input, output_spec, output_voxels
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.models.fetch import local_model
from beam_inference.models.hashes import model_sha256, network_file_states
from beam_inference.operators.normalize import AnyNormalization
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.volumes.outputs import LOSSY, open_output
from beam_inference.volumes.volume import Volume
from beam_inference.worker.device_queue import DeviceQueue
from beam_inference.worker.network_watch import NetworkWatch
from beam_inference.worker.output_mask import OutputMask, check_mask, open_output_mask
from beam_inference.worker.postprocessing import Postprocessing
from beam_inference.worker.previews import OpenPreview, open_previews
from beam_inference.worker.seam_files import SeamFiles
from beam_inference.worker.trial import try_network


@dataclass(frozen=True, slots=True)
class OpenOutput:
    """An output of a job, open.

    Attributes:
        key: its key in the job file.
        volume: the volume; blank blocks written through it are kept.
        blank_volume: the volume; blank blocks written through it are absent from the store.
        is_lossy: whether its voxels do not read back as they were written.
    """

    key: str
    volume: Volume
    blank_volume: Volume
    is_lossy: bool


@dataclass
class ProcessNetwork:
    """The network of a process, for several jobs that share it.

    Attributes:
        predictor: the network on its device.
        queue: of the threads that want the device.
        is_settled: whether it has been run in this process.
    """

    predictor: Predictor
    queue: DeviceQueue = field(default_factory=DeviceQueue)
    is_settled: bool = False


@dataclass(frozen=True)
class OpenJob:
    """A job with its stores and its network open, and the launch that works on it.

    Attributes:
        launch: the launch that this process works for.
        job: the resolved job.
        state: its state folder.
        input: the input volume.
        outputs: the output volumes, in the order of the job file.
        previews: the small copies that are written beside them.
        mask: where the output is wanted.
        postprocessing: the steps between blended values and the output.
        predictor: the network on its device.
        queue: of the threads that want the device.
        normalize: maps stored values to the network's input.
        batch_size: patches per network call.
        watch: ends the process if the network does not answer.
        seam_files: partial sums that chunks exchange.
    """

    launch: Launch
    job: ResolvedJob
    state: State
    input: InputVolume
    outputs: Sequence[OpenOutput]
    previews: Sequence[OpenPreview]
    mask: OutputMask
    postprocessing: Postprocessing
    predictor: Predictor
    queue: DeviceQueue
    normalize: AnyNormalization
    batch_size: int
    watch: NetworkWatch
    seam_files: SeamFiles


def load_job_network(launch: Launch) -> Predictor:
    """Load the network of a launch's job.

    Raises:
        WorkerFault: its files are not those of the launch.
        UserError: it cannot be loaded.
    """
    job = launch.read_job()
    return _load_network(launch, job, _local_network(job))


@dataclass(frozen=True, slots=True)
class _LocalNetwork:
    """A network whose files are on this machine.

    Attributes:
        model: the job's section, its files local.
        states: of the files before they were hashed.
    """

    model: NetworkConfig
    states: Sequence[tuple[int, ...]]


def _load_network(launch: Launch, job: ResolvedJob, network: _LocalNetwork) -> Predictor:
    sha256 = job.quantized_sha256
    quantized = None if sha256 is None else launch.state().read_network(sha256)
    predictor = load_predictor(
        network.model, job.config.inference, trust=launch.trust, quantized=quantized
    )
    if network_file_states(network.model) != network.states:
        raise WorkerFault(
            "the network's files were written or replaced while they were loaded, so that others "
            "may have been loaded than were hashed: see who writes them"
        )
    return predictor


def open_job(
    launch: Launch, predictor: Predictor | None = None, network: ProcessNetwork | None = None
) -> OpenJob:
    """Open all that a launch's job needs; load its network, unless one is given.

    A network that the launcher has not tried is tried here.

    Args:
        launch: the launch.
        predictor: the network on its device, for this job alone.
        network: the network of this process, which other jobs use, too.

    Raises:
        WorkerFault: the output is gone; the network's files, its engine or the operators' files
            are not those of the launch.
        UserError: something of the job cannot be opened or loaded.
    """
    job = launch.read_job()
    config = job.config
    state = launch.state()
    input_volume = open_input(config, job.cached_input_bytes(launch.threads_per_process))
    _check_input(input_volume, job)
    outputs = [_open_output(job, key) for key in config.output_keys]
    mask = open_output_mask(job, output_voxels(config, input_volume).rest)
    operators = _local_operators(job)
    postprocessing = Postprocessing(job, mask, operators)
    local = _local_network(job)
    model = local.model
    if network is None:
        network = ProcessNetwork(predictor or _load_network(launch, job, local))
    _check_engine(network.predictor, job)
    watch = NetworkWatch(config.job.timeouts.network)
    watched = watch.wrap_predictor(network.predictor)
    batch_size = config.inference.patches_per_call
    if not (network.is_settled and launch.contract_checked):
        with network.queue.turn():
            batch_size = _first_calls(launch, job, input_volume, model, watched, watch)
        network.is_settled = True
    # again: files may have been exchanged after they were hashed, and before they were loaded
    _check_operators(operators, job)
    _check_network(model, job)
    return OpenJob(
        launch=launch,
        job=job,
        state=state,
        input=input_volume,
        outputs=outputs,
        previews=open_previews(job),
        mask=mask,
        postprocessing=postprocessing,
        predictor=watched,
        queue=network.queue,
        normalize=normalization(config, input_volume.values_dtype),
        batch_size=batch_size,
        watch=watch,
        seam_files=SeamFiles(state.url, config.storage, job.records_key),
    )


def _check_input(volume: InputVolume, job: ResolvedJob) -> None:
    """Refuse inputs that are not those that the job began with."""
    first = (job.input_bounds, job.resampling, job.input_channels, job.input_dtype)
    _check_volume(volume, volume.bounds, first)
    _check_axes(volume, job.input_axis_layout)
    if volume.mask is not None:
        check_mask("input.mask", volume.mask, job)
    for each, known in zip(volume.further, job.further_inputs, strict=True):
        further = (known.bounds, known.resampling, known.channels, known.dtype)
        _check_volume(each.volume, each.volume.stored.bounds, further)
        _check_axes(each.volume, known.axis_layout)


def _check_axes(volume: InputVolume, known: list[list[int]]) -> None:
    """Refuse an input whose metadata tell of another order of axes or bytes by now."""
    if known and volume.stored.axis_layout != known:
        raise WorkerFault(
            f"the metadata of the input {volume.url} say now that its axes, or bytes, are stored "
            "in another order than at launch: voxels would be other ones. Restore the metadata"
        )


def _check_volume(
    volume: InputVolume,
    bounds: BoundingBox,
    known: tuple[BoundingBox, Resampling | None, int, str],
) -> None:
    """Refuse an input whose bounds, resampling, channels or dtype are not those of the launch."""
    found = (bounds, volume.resampling, volume.channels, volume.values_dtype.name)
    if found != known:
        raise WorkerFault(
            f"the input {volume.url} is {bounds} (z, y, x), {found[2]} channel(s) of {found[3]}, "
            f"and was {known[0]}, {known[2]} of {known[3]}, when the job began: it is another "
            "volume, or lies elsewhere. Put that one back, or launch a job with another output.path"
        )


def _open_output(job: ResolvedJob, key: str) -> OpenOutput:
    spec = output_spec(job, key)
    volume, blank_volume = (open_output(spec, keep_blank=each) for each in (True, False))
    if volume is None or blank_volume is None:
        raise WorkerFault(f"the output {spec.url} is gone: it was there at launch")
    return OpenOutput(key, volume, blank_volume, is_lossy=spec.encoding in LOSSY)


def _local_network(job: ResolvedJob) -> _LocalNetwork:
    """The network's files on this machine, which are those that the job was launched with."""
    model = local_model(job.config.model, job.config.storage, job.model_sha256)
    states = network_file_states(model)
    _check_network(model, job)
    return _LocalNetwork(model, states)


def _check_network(model: NetworkConfig, job: ResolvedJob) -> None:
    sha256 = model_sha256(model)
    if sha256 != job.model_sha256:
        raise WorkerFault(
            f"the network's files have the sha256 {sha256}, the job was launched with "
            f"{job.model_sha256}: they were changed since, or this machine has others."
        )


def _local_operators(job: ResolvedJob) -> list[list[Operator]]:
    """The operators of each output with their files on this machine, those of the launch."""
    config = job.config
    operators = [
        local_operators(single.postprocess, config.storage, job.operator_sha256, output=key)
        for key, single in config.by_output.items()
    ]
    _check_operators(operators, job)
    return operators


def _check_operators(operators: Sequence[Sequence[Operator]], job: ResolvedJob) -> None:
    sha256: dict[str, str] = {}
    for key, some in zip(job.config.output_keys, operators, strict=True):
        sha256 |= operator_sha256(some, key)
    if sha256 != job.operator_sha256:
        raise WorkerFault(
            f"the operators' files have the sha256 {sha256}, the job was launched with "
            f"{job.operator_sha256}: they were changed since, or this machine has others."
        )


def _check_engine(predictor: Predictor, job: ResolvedJob) -> None:
    engine = predictor.description
    if engine != job.engine:
        raise WorkerFault(
            f"this worker's engine is {engine}, the job was launched with {job.engine}: "
            "its output would differ. Use one image for launcher and workers."
        )


def _first_calls(
    launch: Launch,
    job: ResolvedJob,
    input_volume: InputVolume,
    model: NetworkConfig,
    predictor: Predictor,
    watch: NetworkWatch,
) -> int:
    """Run the network before the first chunk, as far as needed; return the batch size that fits."""
    inference = job.config.inference
    if not launch.contract_checked:
        reference = load_reference(model, inference, trust=launch.trust)
        report = try_network(predictor, job.config, input_volume, job.plan, reference)
        return report.batch_size
    # a trial would have settled it, too
    if inference.device == "cpu" and not keeps_memory(inference.engine):
        patch = grown_shape(inference.patch_shape, job.plan.crop_margin)
        with watch.watch("before the first chunk"):
            channels = job.config.model.input_channels
            settle(predictor, (inference.patches_per_call, channels, *patch))
    return inference.patches_per_call
