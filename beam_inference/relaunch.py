"""What an earlier launch has decided, and whether a job is still the one that it began."""

from __future__ import annotations

import logging

from beam_inference.config import JobConfig
from beam_inference.errors import StateError, VolumeError
from beam_inference.normalize_config import FromLevels
from beam_inference.resolved_job import ResolvedJob
from beam_inference.stores import read_file
from beam_inference.survey import THIS_PROCESS, definite

logger = logging.getLogger(__name__)


def as_begun(config: JobConfig, before: ResolvedJob) -> JobConfig:
    """A job, going on: what it leaves open is as the first launch decided it.

    Where the levels file of ``model.normalize`` is gone, so are the values that were made of it, if the job asks for
    the same of it as then.
    """
    if config.inference.batch_size == before.asked_batch_size:
        logger.warning(
            "inference.batch_size is %d in this job: its first launch had no memory on the device for %d. To try that "
            "anew, with every chunk, pass --overwrite.",
            before.config.inference.batch_size,
            before.asked_batch_size,
        )
    config = _as_decided(config, before)
    normalize = config.model.normalize
    if isinstance(normalize, FromLevels) and _asks_for_the_same(normalize, before):
        try:
            read_file(normalize.levels, config.storage)
        except VolumeError as error:
            logger.warning("model.normalize.levels: %s; going on with what this job began with", error)
            return _with_recorded_values(config, before)
    return config


def as_launched(config: JobConfig, before: ResolvedJob, url: str) -> ResolvedJob:
    """The job that was launched, writing where ``config`` says now: a state folder moves with its output.

    ``url`` is the state's. Neither the input nor the network nor a levels file is opened.

    Raises:
        StateError: ``config`` is another job.
    """
    config = definite(_as_decided(config, before), THIS_PROCESS)
    asked = config.model.normalize
    if _asks_for_the_same(asked, before):
        config = _with_recorded_values(config, before)
    here, there = config.inference, before.config.inference
    for key in (
        "device",
        "engine",
        "memory_format",
        "precision",
        "threads",
    ):  # what the engine, which is not loaded, would tell
        if getattr(here, key) != getattr(there, key):
            raise StateError(
                f"{url} belongs to another job: inference.{key} is {getattr(there, key)} there, here "
                f"{getattr(here, key)}"
            )
    roi = config.roi or before.input_bounds
    known = {
        "config": config.model_dump(),
        "asked_normalize": asked.model_dump() if isinstance(asked, FromLevels) else None,
        "roi": {"start": roi.start, "stop": roi.stop},
    }
    job = ResolvedJob.model_validate(before.model_dump() | known)
    check_same(before, job, url)
    return job


def check_same(before: ResolvedJob, job: ResolvedJob, url: str) -> None:
    """Refuse a job other than the one whose state is at ``url``; other versions of libraries are warned about.

    Raises:
        StateError: its output would be mixed with the other's.
    """
    if before.fingerprint != job.fingerprint:
        differences = "\n".join(f"  {line}" for line in job.differences(before))
        raise StateError(
            f"{url} belongs to another job (fingerprint {before.fingerprint[:12]}, this one {job.fingerprint[:12]}); "
            f"going on would mix two results in one volume. What differs:\n{differences}\n"
            f"{_of_levels(before, job)}Use another output.path, or pass --overwrite to do every chunk anew."
        )
    theirs, ours = before.config.output.path, job.config.output.path
    if job.config.job.state_path and theirs != ours:  # a state inside its output moves with it
        raise StateError(
            f"{url} is the state of a job that writes {theirs}, this one writes {ours}: its receipts say nothing of "
            "this output. Use another job.state_path, or pass --overwrite to do every chunk anew."
        )
    changed = [f"{k} {before.versions[k]} → {v}" for k, v in job.versions.items() if before.versions.get(k, v) != v]
    if changed:
        logger.warning("versions differ from the first launch's: %s", ", ".join(changed))


def _as_decided(config: JobConfig, before: ResolvedJob) -> JobConfig:
    """What the job leaves open, as the first launch decided it: another device, say, would be another job."""
    open_keys = {
        "device": config.inference.device == "auto",
        "engine": config.inference.engine in ("auto", "fastest"),
        "memory_format": config.inference.engine in ("auto", "fastest"),
        "batch_size": config.inference.batch_size in ("auto", before.asked_batch_size),
        "chunk_shape": config.inference.chunk_shape == "auto",
        "threads": config.inference.threads is None,
    }
    decided = {key: getattr(before.config.inference, key) for key, is_open in open_keys.items() if is_open}
    return config.model_copy(update={"inference": config.inference.model_copy(update=decided)})


def _asks_for_the_same(normalize: object, before: ResolvedJob) -> bool:
    """Whether the same is to be made of a levels file, wherever it lies now, as when the job began."""
    asked = before.asked_normalize
    if asked is None or not isinstance(normalize, FromLevels):
        return False
    return normalize.model_copy(update={"levels": asked.levels}) == asked


def _with_recorded_values(config: JobConfig, before: ResolvedJob) -> JobConfig:
    model = config.model.model_copy(update={"normalize": before.config.model.normalize})
    return config.model_copy(update={"model": model})


def _of_levels(before: ResolvedJob, job: ResolvedJob) -> str:
    """What to do where a levels file no longer says what it said."""
    asked = before.asked_normalize
    if asked is None or before.config.model.normalize == job.config.model.normalize:
        return ""
    if job.asked_normalize is None or not _asks_for_the_same(job.asked_normalize, before):
        return f"It began with model.normalize: {asked.model_dump()}.\n"
    return (
        f"{job.asked_normalize.levels} was made anew, of other values, since the job began. If its input is still the "
        "same, restore that file, or remove it: without it, the job goes on with the values that it began with.\n"
    )
