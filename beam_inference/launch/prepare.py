"""From a job file to a launch: the last checks, with the network, and then what is created.

Nothing is created or written until every check has passed.
"""

from __future__ import annotations

import logging
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata

from beam_inference.config.job import JobConfig
from beam_inference.config.operators import operator_versions
from beam_inference.engines.choice import describe_engine
from beam_inference.engines.loading import engines_to_try
from beam_inference.errors import (
    ConfigError,
    StateError,
    WorkerFault,
)
from beam_inference.geometry.sampling import sampled
from beam_inference.job.messages import Launch
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.runs import chunks_of_file
from beam_inference.job.state import State, default_state_url
from beam_inference.launch.checks import check_memory, check_paths
from beam_inference.launch.engine_trial import try_engines, warn_of_range, with_inference
from beam_inference.launch.resume import as_begun, check_no_other_state, check_receipts, check_same
from beam_inference.launch.survey import Survey, survey
from beam_inference.models.fetch import local_model
from beam_inference.models.files import model_sha256
from beam_inference.volumes.kvstores import url_of
from beam_inference.volumes.outputs import create_output

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

    ``overwrite`` deletes an earlier launch's state, so that every chunk is done anew.
    ``chunks_file`` is a path or URL of a quarantine file or of chunk indices, one a line, to do
    these only; ``sample`` is a share of the chunks and a seed, to do those that
    :func:`beam_inference.geometry.sampling.sampled` tells. ``workers`` are those at a time, if
    known.

    Raises:
        UserError: something is wrong; nothing was created.
    """
    if (chunks_file is not None or sample is not None) and overwrite:
        raise ConfigError(
            "--overwrite deletes the receipts of all chunks, --chunks does only some: give one of "
            "them"
        )
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
            check_no_other_state(state, job)
            check_receipts(state.of(job), job, found)
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
        # before the output: where the state cannot be written, nothing is created
        state.note_start(launch.id)
        if some is not None:
            state.write_chunks(launch.id, some)
        if not found.output_exists:
            create_output(found.output)
        # another first launch may have come before this one
        check_same(state.create_job(job), job, state.url)
    return launch


def _sample(job: ResolvedJob, share: float, seed: int) -> list[int]:
    chunks = list(sampled(job.plan.chunks, share, seed))
    if not chunks:
        raise ConfigError(
            f"--sample {share:g} holds none of the {job.plan.chunks.count} chunks: take a larger "
            "share, or another --seed"
        )
    return chunks


@contextmanager
def _state_errors() -> Iterator[None]:
    """A state folder that cannot be read or written is, before the launch, the user's to mend."""
    try:
        yield
    except WorkerFault as error:
        raise StateError(
            f"the state folder cannot be used: {error}. Check output.path and job.state_path."
        ) from None


def _with_network(
    found: Survey, place: Place, allow_pickle: bool, *, alone: bool, is_first: bool
) -> ResolvedJob:
    """The resolved job, with what only the network can tell; where it will run here, it is tried.

    ``alone`` says that chunks will be done without their neighbours. A first launch settles for the
    batch that the device had memory for; a later one, on a smaller device, leaves the job what it
    is, and its workers halve it.
    """
    config = found.job.config
    check_memory(found.memory(place, alone=alone), place, config.inference.device)
    model = local_model(config.model, config.storage)
    known: dict[str, object] = {
        "model_sha256": model_sha256(model),
        "versions": _versions() | operator_versions(config.postprocess),
    }
    if place.is_this_machine:
        config, predictor, report = try_engines(model, found, place, allow_pickle)
        known |= {"engine": predictor.description, "working_set_bytes": report.working_set_bytes}
        asked = config.inference.batch_size
        if is_first and report.batch_size != asked:
            config = with_inference(config, batch_size=report.batch_size)
            known["asked_batch_size"] = asked
            logger.warning(
                "inference.batch_size is %d in this job, and will be: %s is too much",
                report.batch_size,
                asked,
            )
        warn_of_range(config, report.low, report.high)
    else:
        (engine,) = engines_to_try(model, config.inference)
        config = with_inference(config, engine=engine)
        known["engine"] = describe_engine(model, config.inference)
    known["config"] = config.model_dump()
    # Not model_copy: a copy keeps the plan and the fingerprint that its original has computed.
    job = ResolvedJob.model_validate(found.job.model_dump() | known)
    check_memory(replace(found, job=job).memory(place, alone=alone), place, config.inference.device)
    return job


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
