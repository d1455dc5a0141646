"""From a job file to a launch: open what it names, check everything that can be checked, make every default definite.

Nothing is created or written until every check has passed.
"""

from __future__ import annotations

import logging
import os
import platform
import uuid
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.bounding_box import BoundingBox
from beam_inference.chunk_run import LOOK_AHEAD, TRAILING_WRITES
from beam_inference.config import INTEGER_DTYPES, JobConfig
from beam_inference.errors import AlignmentError, ConfigError, StateError, VolumeError, WorkerFault
from beam_inference.memory import MemoryProjection, projected_memory
from beam_inference.outputs import OutputSpec, create_output, default_bounds, open_output
from beam_inference.plan import check_alignment
from beam_inference.predictors import describe_engine, load_predictor, model_sha256, resolved_device
from beam_inference.runs import chunks_of_file
from beam_inference.state import Box, ResolvedJob, State
from beam_inference.volumes import Volume, detect_driver, precomputed_scales
from beam_inference.worker import Launch, normalization, open_input, try_network

logger = logging.getLogger(__name__)

_RECORDED_VERSIONS = ("beam-inference", "apache-beam", "tensorstore", "torch", "numpy")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is going to run, as far as checks depend on it.

    Attributes:
        is_this_machine: workers run here, so the network can be tried at launch and ``device: auto`` be resolved.
        shares_files: workers see this machine's files.
        processes_per_host: worker processes that share a machine.
        threads_per_process: harness threads that share a process.
    """

    is_this_machine: bool = True
    shares_files: bool = True
    processes_per_host: int = 1
    threads_per_process: int = 2


@dataclass(frozen=True, slots=True)
class Survey:
    """What a job comes to once its input is known, before its network is.

    Attributes:
        job: resolved but for the network: no hash, no working set.
        output: what the output is, or is to be.
        output_exists: whether it is there already.
    """

    job: ResolvedJob
    output: OutputSpec
    output_exists: bool

    def memory(self, place: Place) -> MemoryProjection:
        """Projected memory of one worker process."""
        job = self.job
        plan, config = job.plan, job.config
        patch_input = BoundingBox((0, 0, 0), plan.lattice.patch_shape).grow(plan.crop_margin).shape
        return projected_memory(
            input_shape=plan.largest_input_shape,
            core_shape=plan.largest_core_shape,
            patch_input_shape=patch_input,
            input_channels=job.input_channels,
            output_channels=config.model.output_channels,
            input_itemsize=np.dtype(job.input_dtype).itemsize,
            output_itemsize=np.dtype(config.output.dtype).itemsize,
            batch_size=config.inference.batch_size,
            working_set_bytes=job.working_set_bytes,
            threads=place.threads_per_process,
            look_ahead=LOOK_AHEAD,
            trailing_writes=TRAILING_WRITES,
            device_is_host=config.inference.device != "cuda",
        )


def default_state_url(config: JobConfig) -> str:
    """Where a job's state is: ``job.state_path``, or beside its output."""
    return config.job.state_path or f"{config.output.path.rstrip('/')}/_beam_inference"


def survey(config: JobConfig, place: Place = Place()) -> Survey:
    """Open the job's input, derive its geometry, and check all of it against its output; nothing is written.

    Raises:
        UserError: any of it is wrong.
    """
    _check_places(config, place)
    volume = open_input(config)
    if volume.channels != config.model.input_channels:
        raise VolumeError(
            f"the input {volume.url} has {volume.channels} channels{_selected(config)}, the job says "
            f"model.input_channels: {config.model.input_channels}. Select with input.channel, or change the model."
        )
    normalization(config, volume.dtype)
    if config.input.fill == "constant":
        _check_fill_value(config.input.fill_value, volume.dtype)
    _check_voxel_size(config, volume)
    roi = BoundingBox(config.roi.start, config.roi.stop) if config.roi else volume.bounds
    if not volume.bounds.contains(roi):
        raise AlignmentError(
            f"roi {roi} is not inside the input {volume.url}, which is {volume.bounds} (z, y, x; stop exclusive). "
            f"The part inside is {roi.intersection(volume.bounds)}."
        )
    output, exists = _output(config, volume, roi)
    job = ResolvedJob(
        config=_definite(config),
        input_bounds=Box.of(volume.bounds),
        input_channels=volume.channels,
        input_dtype=volume.dtype.name,
        roi=Box.of(roi),
        output_bounds=Box.of(output.bounds),
        voxel_size_nm=output.voxel_size_nm,
        model_sha256="",
        engine={},
        working_set_bytes=0,
        versions={},
    )
    check_alignment(job.plan.chunks, output.block_shape, output.bounds)
    return Survey(job, output, exists)


def prepare(
    config: JobConfig,
    place: Place = Place(),
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    chunks_file: str | None = None,
) -> Launch:
    """Check a job to the last, then create its output and its state (or find them as an earlier launch left them).

    ``overwrite`` deletes an earlier launch's state, so that every chunk is done anew. ``chunks_file`` is a path or URL
    of a quarantine file or of chunk indices, one a line, to do these only.

    Raises:
        UserError: something is wrong; nothing was created.
    """
    if chunks_file is not None and overwrite:
        raise ConfigError("--overwrite deletes the receipts of all chunks, --chunks does only some: give one of them")
    _check_places(config, place)
    state = State(default_state_url(config))
    before = None if overwrite else state.load_job()
    if before is not None and config.inference.device == "auto":
        # Resume derives nothing again: another device would be another job.
        config = _with_device(config, before.config.inference.device)
    found = survey(config, place)
    config = found.job.config
    _check_memory(found.memory(place))
    digest = model_sha256(config.model)
    if place.is_this_machine:
        predictor = load_predictor(config.model, config.inference, allow_pickle=allow_pickle)
        report = try_network(predictor, config, open_input(config), found.job.plan)
        engine, working_set = predictor.describe(), report.working_set_bytes
        _warn_of_range(config, report.low, report.high)
    else:
        engine, working_set = describe_engine(config.model, config.inference), 0
    job = found.job.model_copy(
        update={
            "model_sha256": digest,
            "engine": engine,
            "working_set_bytes": working_set,
            "versions": _versions(),
        }
    )
    job = ResolvedJob.model_validate(job.model_dump())  # a copy keeps what its original has computed
    _check_memory(replace(found, job=job).memory(place))
    if before is not None:
        _check_same(before, job, state.url)
        _check_receipts(state, job, found)
    if chunks_file is not None:
        chunks_file = chunks_file if "://" in chunks_file else f"file://{Path(chunks_file).absolute()}"
        chunks_of_file(chunks_file, job.fingerprint, job.plan.chunks.count)
    try:
        if overwrite:
            state.clear()
        if not found.output_exists:
            create_output(found.output)
        job = state.create_job(job)
    except WorkerFault as error:
        raise VolumeError(f"the destination is not writable: {error}") from None
    return Launch(
        job=job.model_copy(update={"config": config}).model_dump_json(),
        state_url=state.url,
        id=uuid.uuid4().hex[:12],
        honour_receipts=config.job.resume,
        allow_pickle=allow_pickle,
        contract_checked=place.is_this_machine,
        processes_per_host=place.processes_per_host,
        chunks_file=chunks_file,
    )


def _definite(config: JobConfig) -> JobConfig:
    """The job with its own defaults made definite; those that need a device or a volume are made so elsewhere."""
    inference, output = config.inference, config.output
    if inference.device == "auto":
        inference = inference.model_copy(update={"device": resolved_device("auto")})
    if inference.seams == "crop" and inference.chunk_crop_margin is None:
        inference = inference.model_copy(update={"chunk_crop_margin": inference.patch_overlap})
    if output.dtype in INTEGER_DTYPES and output.value_range is None:
        output = output.model_copy(update={"value_range": (0.0, 1.0)})  # sigmoid or softmax: the config saw to it
    return config.model_copy(update={"inference": inference, "output": output})


def _with_device(config: JobConfig, device: str) -> JobConfig:
    return config.model_copy(update={"inference": config.inference.model_copy(update={"device": device})})


def _check_places(config: JobConfig, place: Place) -> None:
    if config.output.path.startswith(("http://", "https://")):
        raise ConfigError(f"output.path {config.output.path}: HTTP is read-only; write to file://, gs:// or s3://")
    if config.input.path is not None and config.input.path.rstrip("/") == config.output.path.rstrip("/"):
        raise ConfigError(
            f"output.path {config.output.path} is the input: choose another place, so as not to overwrite it"
        )
    if not place.is_this_machine and config.inference.device == "auto":
        raise ConfigError(
            "inference.device: auto is not known before the launch on a remote runner (the launcher has no GPU to "
            "look at). Write device: cuda or device: cpu."
        )
    if place.shares_files:
        return
    paths = {
        "input.path": config.input.path,
        "output.path": config.output.path,
        "job.state_path": config.job.state_path,
        "model.weights": config.model.weights,
    }
    for key, path in paths.items():
        if path is not None and (path.startswith("file://") or "://" not in path):
            raise ConfigError(
                f"{key} {path} lies on this machine, which remote workers do not see. Use gs:// or s3://."
            )


def _selected(config: JobConfig) -> str:
    return "" if config.input.channel is None else " selected by input.channel"


def _check_fill_value(value: float, dtype: np.dtype[Any]) -> None:
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if value != int(value) or not info.min <= value <= info.max:
            raise ConfigError(
                f"input.fill_value {value} is not a value of the input's dtype {dtype} ({info.min} … {info.max}); "
                "it is in stored units, before model.normalize"
            )


def _check_voxel_size(config: JobConfig, volume: Volume) -> None:
    wanted, found = config.model.voxel_size_nm, volume.voxel_size_nm
    if wanted is None:
        return
    if found is None:
        logger.warning("the input does not say its voxel size; taking model.voxel_size_nm %s for it", list(wanted))
        return
    if _same_size(wanted, found):
        return
    hint = "No scale of the input fits."
    path = config.input.path
    if path is not None and detect_driver(path) == "neuroglancer_precomputed":
        for index, scale in enumerate(precomputed_scales(path)):
            if _same_size(wanted, scale["resolution"][::-1]):
                hint = f"Scale {index} fits: write input.scale: {index}."
    raise ConfigError(
        f"model.voxel_size_nm is {list(wanted)} (z, y, x), the input {volume.url} at scale {config.input.scale} has "
        f"{list(found)}: the network would see objects of another size than it was trained on. {hint}"
    )


def _same_size(a: object, b: object) -> bool:
    return bool(np.allclose(np.asarray(a, float), np.asarray(b, float), rtol=0.01, atol=0))


def _output(config: JobConfig, volume: Volume, roi: BoundingBox) -> tuple[OutputSpec, bool]:
    """What the output is to be, and whether it is there already."""
    output = config.output
    bounds = default_bounds(output.format, roi)
    if output.bounds is not None:
        bounds = BoundingBox(output.bounds.start, output.bounds.stop)
        if output.format != "precomputed" and any(bounds.start):
            raise ConfigError(
                f"output.bounds start at {list(bounds.start)}, but a {output.format} array has no offset: "
                "write start: [0, 0, 0]"
            )
    voxel_size = volume.voxel_size_nm or config.model.voxel_size_nm
    if voxel_size is None:
        logger.warning("the input does not say its voxel size, nor does model.voxel_size_nm: the output will say 1 nm")
        voxel_size = (1.0, 1.0, 1.0)
    spec = OutputSpec(
        url=output.path,
        format=output.format,
        dtype=output.dtype,
        channels=config.model.output_channels,
        bounds=bounds,
        block_shape=output.block_shape,
        voxel_size_nm=voxel_size,
    )
    existing = open_output(spec)
    if existing is None:
        return spec, False
    if output.bounds is not None and existing.bounds != bounds:
        raise VolumeError(
            f"the output {output.path} exists with bounds {existing.bounds}, output.bounds say {bounds}. "
            "Remove output.bounds, or choose another output.path."
        )
    return replace(spec, bounds=existing.bounds), True


def _check_memory(memory: MemoryProjection) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory.host_bytes > total:
        raise ConfigError(
            f"a worker process would need {memory.host_bytes / 2**30:.1f} GiB for its chunks, this machine has "
            f"{total / 2**30:.1f} GiB. Make inference.chunk_shape smaller."
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


def _check_same(before: ResolvedJob, job: ResolvedJob, url: str) -> None:
    if before.fingerprint != job.fingerprint:
        differences = "\n".join(f"  {line}" for line in job.differences(before))
        raise StateError(
            f"{url} belongs to another job (fingerprint {before.fingerprint[:12]}, this one {job.fingerprint[:12]}); "
            f"going on would mix two results in one volume. What differs:\n{differences}\n"
            "Use another output.path or job.state_path, or pass --overwrite to do every chunk anew."
        )
    changed = [f"{k} {before.versions[k]} → {v}" for k, v in job.versions.items() if before.versions.get(k, v) != v]
    if changed:
        logger.warning("versions differ from the first launch's: %s", ", ".join(changed))


def _check_receipts(state: State, job: ResolvedJob, found: Survey) -> None:
    """Refuse receipts that are not to be honoured, or that speak of blocks which are gone."""
    if next(state.receipts(0, job.plan.chunks.count), None) is None:
        return
    if not found.output_exists:
        raise StateError(
            f"{state.url} holds receipts, but the output they speak of, {found.output.url}, is gone: resuming would "
            "call complete what is not there. Restore the output, or pass --overwrite to do every chunk anew."
        )
    if not job.config.job.resume:
        raise StateError(
            f"job.resume is false, but {state.url} holds receipts of an earlier launch. Pass --overwrite to do "
            "every chunk anew, or set job.resume: true to do what is missing."
        )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
