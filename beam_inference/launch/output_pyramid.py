"""The pyramid of a job's output: planned with the job, made once every chunk of it is done.

It is the pyramid that the command ``pyramid`` makes of the same volume, with the same records, so
either goes on where the other stopped. Scales are only as good as the output that they are made of:
those that were made while chunks were missing are made anew.
"""

from __future__ import annotations

import logging
import shlex
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from beam_inference.config.job import OUTPUT, JobConfig
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.messages import Launch
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.launch.cost import Totals
from beam_inference.launch.planned_job import PlannedJob
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import (
    ALL_SCALES,
    NoScaleNeeded,
    Pyramid,
    factor_of,
    plan_pyramid,
    remove_scales,
)
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.outputs import create_output

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PyramidStatus:
    """Progress of a job's pyramid.

    Attributes:
        scales: number of its scales.
        method: "mean" or "mode".
        chunks: number of chunks of all scales.
        done: number of these that are done.
        listed: whether the output's metadata lists every scale, so that readers see it.
        failures: why chunks could not be done, the first few of each scale.
    """

    scales: int
    method: str
    chunks: int
    done: int
    listed: bool
    failures: Sequence[str]

    @property
    def complete(self) -> bool:
        """Whether every chunk is done and readers see every scale."""
        return self.done == self.chunks and self.listed


def plan_output_pyramid(job: PlannedJob, key: str = OUTPUT) -> Pyramid | None:
    """Plan the pyramid of a job's output, also where that is not there yet.

    Args:
        job: the job.
        key: the key of the output in the job file.

    Returns:
        The pyramid; None if the job asks for none, or one block holds its output.

    Raises:
        UserError: it cannot be made.
    """
    config = job.config.by_output[key]
    output = job.outputs[key].spec
    if config.output.pyramid is not None and not job.outputs[key].exists:
        output = replace(output, url=f"memory://{uuid.uuid4().hex}/")
        create_output(output)
    return output_pyramid(config, output.url)


def plan_output_pyramids(job: PlannedJob) -> dict[str, Pyramid]:
    """Plan the pyramids that a job has to make, by the keys of its outputs.

    Raises:
        UserError: one cannot be made.
    """
    planned = {key: plan_output_pyramid(job, key) for key in job.outputs}
    return {key: pyramid for key, pyramid in planned.items() if pyramid is not None}


def output_pyramids(config: JobConfig) -> list[Pyramid]:
    """Plan the pyramids that a job has to make of its outputs, which must be there.

    Raises:
        UserError: one cannot be made.
    """
    planned = map(output_pyramid, config.by_output.values())
    return [pyramid for pyramid in planned if pyramid is not None]


def output_pyramid(config: JobConfig, url: str | None = None) -> Pyramid | None:
    """Plan the pyramid that a job asks for, of its first output.

    Args:
        config: the job file, or what it says of one output.
        url: URL of a volume like the output; by default the output itself, which must be there.

    Returns:
        The pyramid; None if the job asks for none, or one block holds its output.

    Raises:
        UserError: it cannot be made.
    """
    request = config.output.pyramid
    if request is None:
        return None
    method = request.method or ("mode" if config.gives_labels else "mean")
    url = url or config.output.path
    # Blocks are not checked, because there may be none yet.
    base = open_source(VolumeSource(url, storage=config.storage), check_blocks=False)
    volume = multiscale_volume(url, config.storage)
    try:
        return plan_pyramid(volume, method, request.factor, request.levels, base=base)
    except NoScaleNeeded:
        return None


def check_scales(config: JobConfig, *, overwrite: bool) -> None:
    """Refuse an output whose scales are not those the job asks for, before anything is created.

    Args:
        config: the job file.
        overwrite: whether the output is made anew, so that its scales do not matter.

    Raises:
        ConfigError: it has other scales.
    """
    for single in config.by_output.values():
        if single.output.pyramid is not None:
            _check_scales_of(single, overwrite=overwrite)


def _check_scales_of(config: JobConfig, *, overwrite: bool) -> None:
    """Refuse an output whose scales are not those that ``config.output`` asks for."""
    output = volume_at(config.output.path, config.storage)
    if output is None or not output.is_multiscale:
        return  # There is no output, or one that the job is refused for later.
    pyramid = output_pyramid(config)
    if pyramid is None or overwrite:
        return
    job = pyramid.job()
    earlier = StageRecords(job).earlier_job()
    if earlier is not None and earlier.fingerprint == job.fingerprint:
        return
    was_begun = earlier is not None and StageRecords(earlier).chunk_counter()() > 0
    volume = pyramid.volume
    is_taken = volume.listed_scales(pyramid.scales) or volume.find_filled_folder(pyramid.scales)
    if was_begun or is_taken:
        raise ConfigError(
            f"output.pyramid: {config.output.path} has coarser scales already, made by something "
            "else, or in another way. Make them as this job says with: "
            f"{_command(config, pyramid)} --overwrite; or remove the key."
        )


def begin_all_scales(launch: Launch, *, overwrite: bool) -> list[Pyramid]:
    """Begin the pyramids of all outputs of a launch; see :func:`begin_scales`."""
    keys = launch.read_job().config.output_keys
    begun = [begin_scales(launch, overwrite=overwrite, key=key) for key in keys]
    return [pyramid for pyramid in begun if pyramid is not None]


def begin_scales(launch: Launch, *, overwrite: bool, key: str = OUTPUT) -> Pyramid | None:
    """Record the pyramid that a launch will make of its output, and remove scales that are too old.

    Args:
        launch: the launch, whose output is there.
        overwrite: whether the output is made anew.
        key: the key of the output in the job file.

    Returns:
        The pyramid; None if the job asks for none, or one block holds its output.

    Raises:
        StateError: another launch is making another pyramid.
    """
    resolved = launch.read_job()
    config = resolved.config.by_output[key]
    count = resolved.plan.chunks.count
    pyramid = output_pyramid(config)
    if pyramid is None:
        if launch.state().count_receipts(0, count) < count:
            _forget_scales(config)
        return None
    job = pyramid.job()
    pyramid.volume.refuse_links(pyramid.scales)
    earlier = StageRecords(job).earlier_job()
    # A launch with another fingerprint made no chunk: check_scales has looked.
    is_other = earlier is not None and earlier.fingerprint != job.fingerprint
    is_of_holes = earlier is not None and launch.state().count_receipts(0, count) < count
    if overwrite or is_other or is_of_holes:
        factors = {pyramid.factor} | ({factor_of(earlier)} if earlier is not None else set())
        _remove_scales(pyramid, factors)
    StageRecords(job).begin()
    return pyramid


def _forget_scales(config: JobConfig) -> None:
    """Forget the records of scales that were made before all chunks of a job were done."""
    job = stage_job("pyramid", {}, config.output.path, config.storage, ())
    if StageRecords(job).earlier_job() is None:
        return
    delete_folder(job.state_url, job.storage, f"{job.kind}/")
    logger.warning(
        "%s has coarser scales, made before all chunks of this job are done. Then make them again, "
        "with: beam-inference pyramid %s --overwrite",
        config.output.path,
        config.output.path,
    )


def _remove_scales(pyramid: Pyramid, factors: set[Zyx | None]) -> None:
    """Remove all scales of a volume, also those that an earlier launch or the command has added."""
    several = [
        plan_pyramid(pyramid.volume, pyramid.method, factor, ALL_SCALES, base=pyramid.base)
        for factor in factors
    ]
    if any(each.volume.listed_scales(each.scales) for each in several):
        logger.warning(
            "%s has coarser scales, made before all chunks of this job are done: they are removed, "
            "and made again",
            pyramid.volume.url,
        )
    for each in several:
        remove_scales(each.job())


def pyramid_status(pyramid: Pyramid) -> PyramidStatus:
    """Read how far a pyramid is from its records.

    Raises:
        WorkerFault: they cannot be read.
    """
    job = pyramid.job()
    done = StageRecords(job).count_done()
    return PyramidStatus(
        scales=len(pyramid.scales),
        method=pyramid.method,
        chunks=pyramid.count,
        done=done,
        listed=len(pyramid.volume.listed_scales(pyramid.scales)) == len(pyramid.scales),
        failures=[] if done == pyramid.count else StageRecords(job).failures(),
    )


def pyramids_status(pyramids: Sequence[Pyramid]) -> PyramidStatus | None:
    """Read how far the pyramids of a job are, all together; None if there are none.

    Raises:
        WorkerFault: their records cannot be read.
    """
    if not pyramids:
        return None
    statuses = list(map(pyramid_status, pyramids))
    return PyramidStatus(
        scales=sum(each.scales for each in statuses),
        method=" and ".join(dict.fromkeys(each.method for each in statuses)),
        chunks=sum(each.chunks for each in statuses),
        done=sum(each.done for each in statuses),
        listed=all(each.listed for each in statuses),
        failures=[failure for each in statuses for failure in each.failures],
    )


def add_pyramids(whole: Totals, pyramids: Iterable[Pyramid]) -> Totals:
    """Add the bytes and requests of pyramids to the totals of a job; their time is not counted."""
    for pyramid in pyramids:
        whole = _add_pyramid(whole, pyramid)
    return whole


def _add_pyramid(whole: Totals, pyramid: Pyramid) -> Totals:
    sources = [pyramid.base.bounds, *(scale.bounds for scale in pyramid.scales[:-1])]
    read = sum(ChunkGrid(bounds, pyramid.base.read_shape).count for bounds in sources)
    return replace(
        whole,
        stored_bytes=whole.stored_bytes + pyramid.size,
        read_requests=whole.read_requests + read,
        write_requests=whole.write_requests + sum(pyramid.blocks) + pyramid.count,
    )


def _command(config: JobConfig, pyramid: Pyramid) -> str:
    """The command that makes the pyramid of a job."""
    request = config.output.pyramid
    words = ["beam-inference", "pyramid", config.output.path, f"--method={pyramid.method}"]
    if request is not None and request.factor is not None:
        words.append(f"--factor={zyx.as_flag(request.factor)}")
    if request is not None and request.levels is not None:
        words.append(f"--levels={request.levels}")
    return shlex.join(words)


def describe_pyramid_status(status: PyramidStatus, *, waits: bool) -> str:
    """Describe the progress of a pyramid in a line.

    Args:
        status: the progress.
        waits: whether chunks of the job are not done yet, so that the pyramid cannot be made.
    """
    if waits:
        return (
            "not made yet, because not all chunks of the job are done; once they are, run makes it"
        )
    if status.complete:
        return f"complete, {status.scales} scales by {status.method}"
    return f"{status.done} of {status.chunks} chunks done"
