"""A multiscale pyramid over a volume: each level is made from the one below, chunk by chunk; listed once complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np

from beam_inference.beam.stage_runner import StageOutcome, StageRecords, run_stages, stage_job
from beam_inference.beam.stages import DoChunk, StageJob
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.pyramid.downsampling import Method, downsampled
from beam_inference.pyramid.levels import Level, covered, grown, levels_above, parts
from beam_inference.pyramid.scales import MultiscaleVolume
from beam_inference.volumes.kvstores import delete_folder, open_kvstore
from beam_inference.volumes.volume import Volume

CHUNK_BYTES = 2**26
"""What a chunk reads, at most, where its blocks allow: 64 MiB."""
PART_BYTES = 2**24
"""What of that is held at a time, at most, where blocks allow: 16 MiB, and some times that while it is averaged."""


class NoLevelNeeded(ConfigError):
    """One block holds the volume."""


@dataclass(frozen=True)
class MakeLevel:
    """The stage that makes one level; see :class:`~beam_inference.beam.stages.ChunkStage`.

    Attributes:
        volume: of which it is a level.
        below: the level it is made from; None for the base.
        level: what is made.
        chunks: whole blocks of it.
        part_shape: how much of a chunk is made at a time, ZYX: a chunk is one block at least, and
            that may be large.
        method: how.
    """

    volume: MultiscaleVolume
    below: Level | None
    level: Level
    chunks: ChunkGrid
    part_shape: Zyx
    method: Method

    @property
    def name(self) -> str:
        """The level's."""
        return self.level.name

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunks.count

    def make_worker(self) -> DoChunk:
        """Makes one chunk: reads what its voxels are made of, part by part, and writes whole blocks."""
        source = (
            self.volume.open_base() if self.below is None else self.volume.open_level(self.below)
        )
        target = self.volume.open_level(self.level)

        def do(index: int) -> None:
            box = self.chunks.core_box(index)
            made = np.empty((target.channels, *box.shape), target.dtype)
            for part in parts(box, self.part_shape):
                read = covered(part, self.level.factor, source.bounds)
                voxels = downsampled(source.read(read), read.start, self.level.factor, self.method)
                made[(slice(None), *part.slices_in(box))] = voxels
            target.write(box, made)

        return do


@dataclass(frozen=True)
class Pyramid:
    """What is to be made of a volume.

    Attributes:
        volume: the volume.
        base: its scale that the first level is made from, open.
        method: "mean" or "mode".
        stages: one a level, finest first.
        blocks: number of stored blocks of each level.
        description: what determines the bytes of any level, however many there are.
    """

    volume: MultiscaleVolume
    base: Volume
    method: Method
    stages: tuple[MakeLevel, ...]
    blocks: tuple[int, ...]
    description: dict[str, Any]

    @property
    def levels(self) -> list[Level]:
        """Its levels, finest first."""
        return [stage.level for stage in self.stages]

    @property
    def count(self) -> int:
        """Number of chunks of all stages."""
        return sum(stage.count for stage in self.stages)

    @property
    def voxels_per_chunk(self) -> float:
        """On average."""
        return sum(stage.level.bounds.size for stage in self.stages) / self.count

    @property
    def size(self) -> int:
        """Bytes of all levels, before compression."""
        voxel = self.base.channels * self.base.dtype.itemsize
        return voxel * sum(level.bounds.size for level in self.levels)

    def job(self) -> StageJob:
        """The job that makes it; one with more levels goes on where one with fewer has ended."""
        return stage_job(
            "pyramid", self.description, self.volume.url, self.volume.storage, self.stages
        )


def plan_pyramid(
    volume: MultiscaleVolume,
    method: Method | None = None,
    factor: Zyx | None = None,
    count: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    base: Volume | None = None,
) -> Pyramid:
    """What a pyramid would be; opens the volume, and creates nothing.

    Args:
        volume: of which scale of what.
        method: "mean" or "mode"; None for "mode" if the volume says that it holds labels, else
            "mean".
        factor: from each level to the next, ZYX; None so that voxels become isotropic first.
        count: number of levels; None until a level fits into one block as readers read them.
        chunk_bytes: what a chunk reads, at most, where its blocks allow.
        base: the scale that it is of, open; None to open it, and to refuse one that cannot be read
            right.

    Raises:
        NoLevelNeeded: there is no level to make.
        ConfigError: the method or the factor must be given.
        VolumeError: the volume cannot be opened, or TensorStore cannot write scales like it.
    """
    base = base or volume.open_base()
    method = method or _method(volume, base)
    if factor is None and base.voxel_size_nm is None:
        raise ConfigError(
            f"{base.url} does not say its voxel size: pass --factor=2x2x2, or what fits, in z, y, x"
        )
    if factor is not None and (min(factor) < 1 or math.prod(factor) == 1):
        raise ConfigError(
            f"--factor={'x'.join(map(str, factor))} makes no smaller volume: give whole numbers, "
            "in z, y, x"
        )
    levels = levels_above(
        base.bounds, base.voxel_size_nm or (1.0, 1.0, 1.0), base.read_shape, factor, count
    )
    if not levels:
        raise NoLevelNeeded(
            f"{base.url}, {'x'.join(map(str, base.bounds.shape))} voxels, needs no level: one "
            "block holds it. --levels=1 makes one nevertheless."
        )
    volume.listed(levels)  # refuses folders of other scales, before anything else
    block_shapes = [volume.block_shape(level) for level in levels]
    voxel_bytes = base.channels * base.dtype.itemsize
    stages: list[MakeLevel] = []
    below = None
    for level, block_shape in zip(levels, block_shapes, strict=True):
        cell = math.prod(level.factor) * voxel_bytes

        def fits(shape: Zyx, cell: int = cell, most: int = chunk_bytes) -> bool:
            return math.prod(shape) * cell <= most

        chunk = grown(block_shape, level.bounds.shape, fits)
        part = grown(base.read_shape, chunk, partial(fits, most=min(chunk_bytes, PART_BYTES)))
        stages.append(MakeLevel(volume, below, level, ChunkGrid(level.bounds, chunk), part, method))
        below = level
    return Pyramid(
        volume=volume,
        base=base,
        method=method,
        stages=tuple(stages),
        blocks=tuple(
            ChunkGrid(each.bounds, shape).count
            for each, shape in zip(levels, block_shapes, strict=True)
        ),
        description={
            **volume.description(),
            "bounds": [base.bounds.start, base.bounds.stop],
            "method": method,
            "factor": factor,
            "chunk_bytes": chunk_bytes,
        },
    )


def make_pyramid(
    pyramid: Pyramid, flags: Sequence[str] = (), *, overwrite: bool = False
) -> StageOutcome:
    """Make what is missing of a pyramid; ``flags`` are Beam's. Levels that are complete then are listed, others never.

    ``overwrite`` removes such levels first, whoever made them.

    Raises:
        VolumeError: the volume has such a level, which was not made by this pyramid.
        StateError: another pyramid was begun there.
    """
    job = pyramid.job()
    if overwrite:
        remove(job)
    elif not StageRecords(job).has_begun() and (taken := pyramid.volume.listed(pyramid.levels)):
        raise VolumeError(
            f"{pyramid.volume.url} has {', '.join(level.name for level in taken)} of this pyramid "
            "already, made by something else, or in another way. Pass --overwrite to replace "
            "them, or --scale to begin above them."
        )
    StageRecords(job).begin()
    outcome = run_stages(job, flags, pyramid.voxels_per_chunk)
    list_complete(job)
    return outcome


def remove(job: StageJob) -> None:
    """Forget what was made of a volume's pyramid, ``job`` or another, and remove such levels, whoever made them."""
    # Records first: what is listed and has no record is refused, until this was done to its end.
    delete_folder(open_kvstore(job.state_url, job.storage), job.state_url, f"{job.kind}/")
    first, *_ = stages = _stages(job)
    first.volume.remove([stage.level for stage in stages])


def list_complete(job: StageJob) -> None:
    """Tell readers of the levels that are complete, and whose levels below are."""
    complete = list(
        takewhile(lambda stage: job.done(stage).count(0, stage.count) == stage.count, _stages(job))
    )
    if complete:
        complete[0].volume.list_levels([stage.level for stage in complete])


def _stages(job: StageJob) -> list[MakeLevel]:
    """Of a pyramid's job."""
    return [task for task in job.stages if isinstance(task, MakeLevel)]


def _method(volume: MultiscaleVolume, base: Volume) -> Method:
    if volume.holds_labels:
        return "mode"
    if base.dtype.kind in "iu" and base.dtype.itemsize >= 4:
        raise ConfigError(
            f"{base.url} holds {base.dtype.name}, as segmentations do, and does not say that it is "
            "one. Pass --method=mode for labels, --method=mean for an image."
        )
    return "mean"
