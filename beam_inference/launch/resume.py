"""Going on with a job: is it still the one that began, and do its receipts match its output?"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace

from beam_inference.config.definite import EngineSettings, as_definite, make_definite
from beam_inference.config.devices import kind_of
from beam_inference.config.job import JobConfig
from beam_inference.config.normalize import dump_normalize, levels_files
from beam_inference.errors import StateError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.place import THIS_PROCESS
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import State
from beam_inference.launch import decide
from beam_inference.launch.planned_job import PlannedJob, levels_request
from beam_inference.launch.witnesses import find_witnesses
from beam_inference.volumes.outputs import open_output

logger = logging.getLogger(__name__)

ENGINE_KEYS = ("device", "engine", "memory_format", "precision", "threads")
"""Keys of ``inference`` that belong to the engine."""


def relocate_job(config: JobConfig, earlier: ResolvedJob, url: str) -> ResolvedJob:
    """Return the launched job with its output where the job file has it now.

    A state folder moves with its output. Neither the input nor the network nor a levels file is
    opened.

    Args:
        config: the job file as it is now.
        earlier: the job as its first launch resolved it.
        url: URL of its state folder.

    Raises:
        StateError: ``config`` is another job.
    """
    config = decide.keep_layouts(decide.keep_levels_of_input(config, earlier), earlier)
    _check_same_voxels(config, earlier, url)
    check_same_engine(config, earlier, url)
    requested = config.model.normalize
    if levels_files(requested):
        if not decide.requests_same_levels(requested, earlier):
            raise StateError(
                f"{url} belongs to another job: model.normalize is {dump_normalize(requested)} "
                "here. "
                f"It began with model.normalize: {_describe_normalize(earlier)}. Use another "
                "output.path, or pass --overwrite to compute every chunk again."
            )
        normalize = earlier.config.model.normalize
    else:
        normalize = as_definite(requested)
    before = earlier.config.inference
    settings = decide.decide_settings(config, THIS_PROCESS, normalize, earlier, earlier)
    batch_size = decide.batch_size_request(config, earlier)
    if config.inference.mixed_devices:  # what this file says of the engine, others need not say
        settings = replace(settings, device=before.device, threads=before.threads)
        batch_size = before.batch_size
    engine = EngineSettings(
        engine=before.engine,
        memory_format=before.memory_format,
        batch_size=before.batch_size if batch_size == "auto" else batch_size,
    )
    roi = config.roi
    bounds = decide.decide_prediction_bounds(config, earlier)
    job = earlier.with_config(
        make_definite(config, settings, engine),
        roi=earlier.whole_roi if roi is None else BoundingBox(roi.start, roi.stop),
        requested_normalize=levels_request(config),
        bounds=[bound for bound in bounds if bound is not None],
    )
    check_same(earlier, job, url)
    check_same_roi(earlier, job, url)
    return job


def check_same_roi(earlier: ResolvedJob, job: ResolvedJob, url: str) -> None:
    """Refuse to judge a job by the records of a launch that had another ROI.

    Args:
        earlier: the job as it was launched; it has the same fingerprint.
        job: the job as it is now.
        url: URL of its state folder.

    Raises:
        StateError: the ROI is another one.
    """
    if earlier.roi != job.roi:
        raise StateError(
            f"{url}: the job was launched with roi {earlier.roi}, and the job file says {job.roi}: "
            "give the command run first, which does what is new"
        )


def _check_same_voxels(config: JobConfig, earlier: ResolvedJob, url: str) -> None:
    """Refuse a job file that asks for other voxels, which only an opened input could tell."""
    before = earlier.config
    pairs = {
        "input.resample": (config.input.resample, before.input.resample),
        "model.voxel_size_nm": (config.resampled_voxel_size_nm, before.resampled_voxel_size_nm),
        "output.voxel_size_nm": (config.output.voxel_size_nm, before.output.voxel_size_nm),
        "output.resample": (config.output.how_resampled, before.output.how_resampled),
    }
    for key, (now, there) in pairs.items():
        if now != there:
            raise StateError(
                f"{url} belongs to another job: {key} is {there} there, here {now}. Use another "
                "output.path, or pass --overwrite to compute every chunk again."
            )


def check_same_engine(
    config: JobConfig,
    earlier: ResolvedJob,
    url: str,
    keys: Collection[str] = ENGINE_KEYS,
) -> None:
    """Refuse a job file that asks for another engine, before the network is loaded.

    Nothing is refused of a job that may be done by several.

    Args:
        config: the job file.
        earlier: the job as its first launch resolved it.
        url: URL of its state folder.
        keys: the keys of ``inference`` to compare.

    Raises:
        StateError: one of them differs.
    """
    if config.inference.mixed_devices:
        return
    engine, memory_format = decide.engine_request(config, earlier)
    before = dict(earlier.config.inference) | {"device": kind_of(earlier.config.inference.device)}
    now = {
        "device": kind_of(decide.decide_device(config, earlier)),
        "engine": engine,
        "memory_format": memory_format,
        "precision": config.inference.precision,
        "threads": decide.decide_threads(config, THIS_PROCESS, earlier),
    }
    for key, value in now.items():
        if key in keys and value != before[key]:
            raise StateError(
                f"{url} belongs to another job: inference.{key} is {before[key]} there, "
                f"here {value}"
            )


def _describe_normalize(earlier: ResolvedJob) -> object:
    requested = earlier.requested_normalize
    return earlier.config.model.normalize if requested is None else dump_normalize(requested)


def check_same_network(job: ResolvedJob, other: ResolvedJob, url: str) -> None:
    """Refuse a volume whose network would answer otherwise than those of the job's other volumes.

    Args:
        job: the job of the volume.
        other: the job of the volume that the network was tried on first.
        url: URL of the volume's state folder.

    Raises:
        StateError: network, engine or batch size differ.
    """
    now = _describe_network(job)
    there = _describe_network(other)
    different = [key for key in {**now, **there} if now.get(key) != there.get(key)]
    if different:
        key = different[0]
        raise StateError(
            f"{url}: the network's {key} is {now.get(key)} here, and {there.get(key)} in the "
            "volumes that this job began with, which all share. Restore it, or use another "
            "job.state_path, or pass --overwrite to compute every volume again."
        )


def _describe_network(job: ResolvedJob) -> dict[str, object]:
    batch_size = job.config.inference.batch_size
    return {"sha256": job.model_sha256, **job.engine, "batch_size": batch_size}


def check_same(earlier: ResolvedJob, job: ResolvedJob, url: str) -> None:
    """Refuse to go on with a job other than the one that began; other versions are warned about.

    Args:
        earlier: the job as its first launch resolved it.
        job: the job as it is now.
        url: URL of the state folder.

    Raises:
        StateError: its output would be mixed with the other's.
    """
    if earlier.numerics != job.numerics:
        raise StateError(
            f"{url} belongs to a job that began by version {earlier.numerics} of the rules by "
            f"which patches are added up, and this version of beam-inference follows version "
            f"{job.numerics}, which gives other bits: going on would mix two results in one "
            "volume. Finish it with the version of beam-inference that it began with (see versions "
            "in job.json), use another output.path, or pass --overwrite to compute every chunk "
            "again."
        )
    if earlier.fingerprint != job.fingerprint:
        differences = "\n".join(f"  {line}" for line in job.differences(earlier))
        raise StateError(
            f"{url} belongs to another job (fingerprint {earlier.fingerprint[:12]}, this one "
            f"{job.fingerprint[:12]}); going on would mix two results in one volume. What "
            f"differs:\n{differences}\n{_explain_levels(earlier, job)}"
            f"{_explain_origins(earlier, job)}"
            "Use another output.path, or pass "
            "--overwrite to compute every chunk again."
        )
    layouts = zip(earlier.axis_layouts, job.axis_layouts, strict=True)
    if any(before and before != now for before, now in layouts):
        raise StateError(
            "the metadata of an input say now that its axes, or bytes, are stored in another order "
            f"than when the job of {url} began: voxels would be other ones. Restore the metadata, "
            "use another output.path, or pass --overwrite to compute every chunk again."
        )
    for key, mask in job.masks.items():
        before = earlier.masks.get(key, mask)
        if before != mask:
            raise StateError(
                f"{key} is {mask.describe()}, and was {before.describe()}, when the job of {url} "
                "began: it is another volume, or lies elsewhere. Put that one back, use another "
                "output.path, or pass --overwrite to compute every chunk again."
            )
    theirs = earlier.config.output.path
    ours = job.config.output.path
    if job.config.job.state_path and theirs != ours:  # a state inside its output moves with it
        raise StateError(
            f"{url} is the state of a job that writes {theirs}, this one writes {ours}: its "
            "receipts say nothing of this output. Use another job.state_path, or pass "
            "--overwrite to compute every chunk again."
        )
    changed = [
        f"{k} {earlier.versions[k]} → {v}"
        for k, v in job.versions.items()
        if earlier.versions.get(k, v) != v
    ]
    if changed:
        logger.warning("versions differ from the first launch's: %s", ", ".join(changed))


def _explain_levels(earlier: ResolvedJob, job: ResolvedJob) -> str:
    """Advice for a levels file that no longer says what it said; empty if that is not the fault."""
    requested = earlier.requested_normalize
    if requested is None or earlier.config.model.normalize == job.config.model.normalize:
        return ""
    now = job.requested_normalize
    if now is None or not decide.requests_same_levels(now, earlier):
        return f"It began with model.normalize: {dump_normalize(requested)}.\n"
    files = " or ".join(dict.fromkeys(levels_files(now)))
    return (
        f"{files} was made again from other values after the job began. If its input is still "
        "the same, restore that file, or remove it: without it, the job continues with the values "
        "that it began with.\n"
    )


def _explain_origins(earlier: ResolvedJob, job: ResolvedJob) -> str:
    """Explanation for masks that lie elsewhere; empty if all lie where they did."""
    moved = [
        key for key, origin in job.mask_origins.items() if earlier.mask_origins.get(key) != origin
    ]
    if not moved or not job.mask_origins.keys() > earlier.mask_origins.keys():
        return ""
    return (
        f"The metadata of {' and '.join(moved)} state a translation, which was not read when the "
        "job began.\n"
    )


def check_receipts(state: State, job: ResolvedJob, planned: PlannedJob) -> list[int]:
    """Refuse receipts that are not to be honoured, or whose blocks are gone.

    The blocks of one chunk are read back, the first that has a receipt. That is enough to notice an
    output that was emptied or replaced; ``verify --deep`` finds every damaged block.

    Args:
        state: the job's state folder.
        job: the job.
        planned: the same job, with its output.

    Returns:
        Chunks whose blocks were found to be damaged: they are to be done again.

    Raises:
        StateError: going on would call complete what is not.
    """
    witnesses = find_witnesses(state, job)
    if not witnesses:
        return []
    outputs = {}
    for key, each in planned.volumes.items():
        output = open_output(each.spec)  # another launch may have created it since
        if output is None:
            raise StateError(
                f"{state.url} holds receipts, but there is no output at {each.spec.url}: going on "
                "would report missing data as complete. Restore the output, or pass --overwrite to "
                "compute every chunk again."
            )
        outputs[key] = output
    if not job.config.job.resume:
        raise StateError(
            f"job.resume is false, but {state.url} holds receipts of an earlier launch. Pass "
            "--overwrite to compute every chunk again, or set job.resume: true to do what is "
            "missing."
        )
    return witnesses.damaged_chunks(outputs)
