"""The pyramid of a job's output: planned with the job, begun with a launch, made once every chunk of it is done.

It is the pyramid that the command ``pyramid`` makes of the same volume, with the same records:
either goes on where the other stood. Levels are only as good as what they are made of, so those
that were made while chunks were missing are made anew.
"""

from __future__ import annotations

import logging
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from beam_inference.beam.stage_runner import StageRecords, stage_job
from beam_inference.beam.stages import StageJob
from beam_inference.config.job import JobConfig
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import ConfigError
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.messages import Launch
from beam_inference.launch.cost import Totals
from beam_inference.launch.planned_job import PlannedJob
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.pyramid.pyramid import NoScaleNeeded, Pyramid, plan_pyramid, remove_scales
from beam_inference.volumes.detection import volume_at
from beam_inference.volumes.kvstores import delete_folder, open_kvstore
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.outputs import create_output

logger = logging.getLogger(__name__)

_EVERY = 64
"""More levels than there are: a pyramid ends where its volume is one voxel."""


@dataclass(frozen=True, slots=True)
class PyramidStatus:
    """How far a job's pyramid is.

    Attributes:
        levels: of it. method: "mean" or "mode".
        chunks: of all levels. done: how many of them are.
        listed: whether readers are told of every level.
        failures: why chunks could not be done, the first few of each level.
    """

    levels: int
    method: str
    chunks: int
    done: int
    listed: bool
    failures: Sequence[str]

    @property
    def complete(self) -> bool:
        """Whether all of it is there, and readers know."""
        return self.done == self.chunks and self.listed


def plan_output_pyramid(job: PlannedJob) -> Pyramid | None:
    """What a job's pyramid would be, also where its output is not there yet; creates nothing that stays.

    None if the job asks for none, or one block holds its output.

    Raises:
        UserError: it cannot be made.
    """
    output = job.output
    if job.config.output.pyramid is not None and not job.output_exists:
        output = replace(output, url=f"memory://{uuid.uuid4().hex}/")
        create_output(output)
    return output_pyramid(job.config, output.url)


def output_pyramid(config: JobConfig, url: str | None = None) -> Pyramid | None:
    """What a job asks for of its output, or of one like it at ``url``, which is there.

    None and errors as for :func:`planned`.
    """
    asked = config.output.pyramid
    if asked is None:
        return None
    method = asked.method or ("mode" if config.gives_labels else "mean")
    url = url or config.output.path
    # its blocks are not checked: there may be nothing in it yet
    base = open_source(VolumeSource(url, storage=config.storage), check_blocks=False)
    try:
        return plan_pyramid(
            multiscale_volume(url, config.storage), method, asked.factor, asked.levels, base=base
        )
    except NoScaleNeeded:
        return None


def check_scales(config: JobConfig, *, overwrite: bool) -> None:
    """Refuse an output whose levels are not those that the job asks for, before anything is created.

    Raises:
        ConfigError: it has such levels, and is not to be made anew.
    """
    found = None if config.output.pyramid is None else volume_at(config.output.path, config.storage)
    if found is None or not found.is_multiscale:
        return  # nothing is there, or what the job is refused for
    pyramid = output_pyramid(config)
    if pyramid is None or overwrite:
        return
    job = pyramid.job()
    before = StageRecords(job).earlier_job()
    if before is not None and before.fingerprint == job.fingerprint:
        return
    if pyramid.volume.listed_scales(pyramid.scales) or (
        before is not None and StageRecords(before).chunk_counter()()
    ):
        raise ConfigError(
            f"output.pyramid: {config.output.path} has coarser levels already, made by something "
            "else, or in another way. Make them as this job says with: "
            f"{_command(config, pyramid)} --overwrite; or remove the key."
        )


def begin_scales(launch: Launch, *, overwrite: bool) -> Pyramid | None:
    """Record what this launch will make of the output, which is there; what is of an earlier state of it is removed.

    None if the job asks for none, or one block holds its output.

    Raises:
        StateError: another launch is making another pyramid.
    """
    resolved = launch.resolved()
    state = launch.state()
    config = resolved.config
    count = resolved.plan.chunks.count
    pyramid = output_pyramid(config)
    if pyramid is None:
        job = stage_job("pyramid", {}, config.output.path, config.storage, ())
        if StageRecords(job).earlier_job() is not None and state.count_receipts(0, count) < count:
            delete_folder(open_kvstore(job.state_url, job.storage), job.state_url, f"{job.kind}/")
            logger.warning(
                "%s has coarser levels, made before all chunks of this job are done. Make them "
                "anew then, with: beam-inference pyramid %s --overwrite",
                *[config.output.path] * 2,
            )
        return None
    job = pyramid.job()
    before = StageRecords(job).earlier_job()
    # nothing came of it: it was looked at
    other = before is not None and before.fingerprint != job.fingerprint
    if overwrite or other or (before is not None and state.count_receipts(0, count) < count):
        factors = {
            pyramid.factor,
            pyramid.factor if before is None else _factor(before),
        }
        # An earlier launch, or the command, may have made more of them, or others.
        several = [
            plan_pyramid(pyramid.volume, pyramid.method, each, _EVERY, base=pyramid.base)
            for each in factors
        ]
        if any(each.volume.listed_scales(each.scales) for each in several):
            logger.warning(
                "%s has coarser levels, made before all chunks of this job are done: they are "
                "removed, and made anew",
                config.output.path,
            )
        for each in several:
            remove_scales(each.job())
    StageRecords(job).begin()
    return pyramid


def pyramid_status(pyramid: Pyramid) -> PyramidStatus:
    """How far it is, from its records.

    Raises:
        WorkerFault: they cannot be read.
    """
    job = pyramid.job()
    done = StageRecords(job).chunk_counter()()
    return PyramidStatus(
        levels=len(pyramid.scales),
        method=pyramid.method,
        chunks=pyramid.count,
        done=done,
        listed=len(pyramid.volume.listed_scales(pyramid.scales)) == len(pyramid.scales),
        failures=[] if done == pyramid.count else StageRecords(job).failures(),
    )


def add_pyramid(whole: Totals, pyramid: Pyramid | None) -> Totals:
    """What is stored and asked of the object store, with a pyramid's share of it; hours remain those of the chunks."""
    if pyramid is None:
        return whole
    below = [pyramid.base.bounds, *(level.bounds for level in pyramid.scales[:-1])]
    return replace(
        whole,
        stored_bytes=whole.stored_bytes + pyramid.size,
        read_requests=whole.read_requests
        + sum(ChunkGrid(each, pyramid.base.read_shape).count for each in below),
        write_requests=whole.write_requests + sum(pyramid.blocks) + pyramid.count,
    )


def _factor(job: StageJob) -> Zyx | None:
    """From each level of a pyramid that was begun to the next, as far as its record says."""
    factor = job.description.get("factor")
    if (
        not isinstance(factor, list)
        or len(factor) != 3
        or not all(isinstance(n, int) and n > 0 for n in factor)
    ):
        return None
    z, y, x = factor
    return (z, y, x) if factor != [1, 1, 1] else None


def _command(config: JobConfig, pyramid: Pyramid) -> str:
    """The command that makes the same."""
    asked = config.output.pyramid
    words = ["beam-inference", "pyramid", config.output.path, f"--method={pyramid.method}"]
    if asked is not None and asked.factor is not None:
        words.append(f"--factor={'x'.join(map(str, asked.factor))}")
    if asked is not None and asked.levels is not None:
        words.append(f"--levels={asked.levels}")
    return shlex.join(words)


def describe_pyramid_status(status: PyramidStatus, *, waits: bool) -> str:
    """The same in a line, without why chunks could not be done."""
    if waits:
        return (
            "not made yet, because not all chunks of the job are done; once they are, run makes it"
        )
    if status.complete:
        return f"complete, {status.levels} levels by {status.method}"
    return f"{status.done} of {status.chunks} chunks done"
