"""What an earlier launch has decided, and whether a job is still the one that it began."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

from beam_inference.config.job import JobConfig
from beam_inference.config.normalize import FromLevels
from beam_inference.errors import StateError, VolumeError
from beam_inference.geometry.partition import index_ranges
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER
from beam_inference.job.place import THIS_PROCESS
from beam_inference.job.records import Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.state import STATE_FOLDER, State
from beam_inference.job.verification import parts_fault, receipt_fault
from beam_inference.launch.survey import Survey, definite
from beam_inference.volumes.kvstores import read_file
from beam_inference.volumes.outputs import open_output

logger = logging.getLogger(__name__)


def as_begun(config: JobConfig, before: ResolvedJob) -> JobConfig:
    """A job, going on: what it leaves open is as the first launch decided it.

    Where the levels file of ``model.normalize`` is gone, so are the values that were made of it, if
    the job asks for the same of it as then.
    """
    if config.inference.batch_size == before.asked_batch_size:
        logger.warning(
            "inference.batch_size is %d in this job: its first launch had no memory on the device "
            "for %d. To try that anew, with every chunk, pass --overwrite.",
            before.config.inference.batch_size,
            before.asked_batch_size,
        )
    config = _as_decided(config, before)
    normalize = config.model.normalize
    if isinstance(normalize, FromLevels) and _asks_for_the_same(normalize, before):
        try:
            read_file(normalize.levels, config.storage)
        except VolumeError as error:
            logger.warning(
                "model.normalize.levels: %s; going on with what this job began with", error
            )
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
    here = config.inference
    there = before.config.inference
    for key in (
        "device",
        "engine",
        "memory_format",
        "precision",
        "threads",
    ):  # what the engine, which is not loaded, would tell
        if getattr(here, key) != getattr(there, key):
            raise StateError(
                f"{url} belongs to another job: inference.{key} is {getattr(there, key)} there, "
                f"here {getattr(here, key)}"
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
            f"{url} belongs to another job (fingerprint {before.fingerprint[:12]}, this one "
            f"{job.fingerprint[:12]}); going on would mix two results in one volume. What "
            f"differs:\n{differences}\n{_of_levels(before, job)}Use another output.path, or pass "
            "--overwrite to do every chunk anew."
        )
    theirs = before.config.output.path
    ours = job.config.output.path
    if job.config.job.state_path and theirs != ours:  # a state inside its output moves with it
        raise StateError(
            f"{url} is the state of a job that writes {theirs}, this one writes {ours}: its "
            "receipts say nothing of this output. Use another job.state_path, or pass "
            "--overwrite to do every chunk anew."
        )
    changed = [
        f"{k} {before.versions[k]} → {v}"
        for k, v in job.versions.items()
        if before.versions.get(k, v) != v
    ]
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
    decided = {
        key: getattr(before.config.inference, key) for key, is_open in open_keys.items() if is_open
    }
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
        f"{job.asked_normalize.levels} was made anew, of other values, since the job began. If its "
        "input is still the same, restore that file, or remove it: without it, the job goes on "
        "with the values that it began with.\n"
    )


def check_receipts(state: State, job: ResolvedJob, found: Survey) -> None:
    """Refuse receipts that are not to be honoured, or that speak of blocks which are gone.

    Of the blocks one chunk is read back, the first that has a receipt: enough to notice an output
        that was emptied or exchanged, not a damaged block (that is what ``verify --deep`` is for).
    """
    count = job.plan.chunks.count
    first = _some_receipt(state, count)
    summed = None if job.plan.exchange is None else _some_sums(state, count)
    if first is None and summed is None:
        return
    output = open_output(found.output) if found.output_exists else None
    if output is None:
        raise StateError(
            f"{state.url} holds receipts, but there is no output at {found.output.url}: resuming "
            "would call complete what is not there. Restore the output, or pass --overwrite to "
            "do every chunk anew."
        )
    if not job.config.job.resume:
        raise StateError(
            f"job.resume is false, but {state.url} holds receipts of an earlier launch. Pass "
            "--overwrite to do every chunk anew, or set job.resume: true to do what is missing."
        )
    fault = receipt_fault(first, job, output) if first else None
    if fault is None and summed is not None:
        first = summed
        fault = parts_fault(summed.parts, output)
    if fault and first:
        raise StateError(
            f"{state.url} says that chunk {first.chunk} is done, but in {found.output.url} "
            f"{fault}. The output was changed, or is not the one these receipts speak of. See "
            "what is left with verify --deep, or pass --overwrite to do every chunk anew."
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
    for start in (
        range(0, count, CHUNKS_PER_FOLDER) if few else [start for start, _ in index_ranges(count)]
    ):
        yield start, min(count, start + CHUNKS_PER_FOLDER)


def check_no_other_state(state: State, job: ResolvedJob) -> None:
    """Refuse to write with a state elsewhere into an output that holds the state of another job."""
    beside = f"{job.config.output.path.rstrip('/')}/{STATE_FOLDER}"
    if state.url == beside:
        return
    other = State(beside, job.config.storage).load_job()
    if other is not None and other.fingerprint != job.fingerprint:
        raise StateError(
            f"the output {job.config.output.path} was written by another job, whose receipts are "
            f"in {beside}; this one would overwrite its blocks behind their back. Use another "
            "output.path, or remove that folder."
        )
