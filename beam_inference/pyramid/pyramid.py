"""Multiscale pyramids of volumes: each scale is made from the one below, chunk by chunk.

A scale is listed for readers once it and all below it are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import VolumeSource
from beam_inference.errors import ConfigError, UserError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.stage_job import DoChunk, StageJob
from beam_inference.job.stage_records import StageRecords, stage_job
from beam_inference.job.stage_witnesses import Testimony, check_witnesses, is_same
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.operators.downsampling import Method, downsample
from beam_inference.pyramid.multiscale import MultiscaleVolume, multiscale_volume
from beam_inference.pyramid.scale_geometry import (
    PyramidScale,
    grow_shape,
    scales_above,
    tiles,
)
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.kvstores import (
    LOCAL,
    storage_of_environment,
)
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.outputs import LOSSY
from beam_inference.volumes.volume import Volume

if TYPE_CHECKING:
    from beam_inference.beam.stage_runner import StageOutcome

CHUNK_BYTES = 2**26
"""Bytes that a chunk reads, at most, where its blocks allow: 64 MiB."""
PART_BYTES = 2**24
"""Bytes of them held at a time, where blocks allow: 16 MiB; averaging takes some times that."""


ALL_SCALES = 64
"""More scales than any pyramid has: a pyramid ends where its volume is one voxel."""


class NoScaleNeeded(ConfigError):
    """One block holds the volume."""


@dataclass(frozen=True)
class MakeScale:
    """The stage that makes one scale; see :class:`~beam_inference.job.stage_job.ChunkStage`.

    Attributes:
        volume: the volume that gets the scale.
        below: the scale it is made from; None for the base.
        scale: the scale to make.
        chunks: grid of chunks, each of whole blocks.
        part_shape: voxels of a chunk that are made at a time, ZYX: a chunk is one block at least,
            and that may be large.
        method: "mean" or "mode".
    """

    volume: MultiscaleVolume
    below: PyramidScale | None
    scale: PyramidScale
    chunks: ChunkGrid
    part_shape: Zyx
    method: Method

    @property
    def name(self) -> str:
        """Name of the scale."""
        return self.scale.name

    @property
    def count(self) -> int:
        """Number of chunks."""
        return self.chunks.count

    def make_worker(self) -> DoChunk:
        """Return the function that makes a chunk; it reads in parts, and writes whole blocks."""
        source, target = self._open()

        def make_chunk(index: int) -> None:
            box = self.chunks.core_box(index)
            array = np.empty((target.channels, *box.shape), target.dtype)
            for part in tiles(box, self.part_shape):
                array[(slice(None), *part.slices_in(box))] = self._make_part(source, part)
            target.write(box, array)

        return make_chunk

    def hear_witnesses(self) -> Testimony:
        """Open both scales; the function returned compares a chunk's first part."""
        source, target = self._open()
        is_lossy = target.stored_spec.get("scale_metadata", {}).get("encoding") in LOSSY

        def holds(index: int) -> bool:
            part = next(iter(tiles(self.chunks.core_box(index), self.part_shape)))
            wanted = self._make_part(source, part)
            found = target.read(part)
            return bool(found.any() == wanted.any()) if is_lossy else is_same(found, wanted)

        return holds

    def _open(self) -> tuple[Volume, Volume]:
        """Open the scale that this one is made from, and this one."""
        source = (
            self.volume.open_base() if self.below is None else self.volume.open_scale(self.below)
        )
        return source, self.volume.open_scale(self.scale)

    def _make_part(self, source: Volume, part: BoundingBox) -> NDArray[Any]:
        """Read what lies below a part of this scale, and make the part of it."""
        factor = self.scale.factor
        below = part.refine(factor).intersection(source.bounds)
        return downsample(source.read(below), below.start, factor, self.method)


@dataclass(frozen=True)
class Pyramid:
    """Plan of the coarser scales of a volume.

    Attributes:
        volume: the volume.
        base: the scale that the first new one is made from, open.
        method: "mean" or "mode".
        factor: from each scale to the next, ZYX; None if voxels become isotropic first.
        stages: one for each scale, finest first.
        blocks: number of stored blocks of each scale.
        chunk_bytes: bytes that a chunk reads, at most, where its blocks allow.
    """

    volume: MultiscaleVolume
    base: Volume
    method: Method
    factor: Zyx | None
    stages: tuple[MakeScale, ...]
    blocks: tuple[int, ...]
    chunk_bytes: int

    @property
    def scales(self) -> list[PyramidScale]:
        """The scales, finest first."""
        return [stage.scale for stage in self.stages]

    @property
    def count(self) -> int:
        """Number of chunks of all stages."""
        return sum(stage.count for stage in self.stages)

    @property
    def voxels_per_chunk(self) -> float:
        """Mean number of voxels of a chunk."""
        return sum(scale.bounds.size for scale in self.scales) / self.count

    @property
    def size(self) -> int:
        """Bytes of all scales, before compression."""
        voxel_bytes = self.base.channels * self.base.dtype.itemsize
        return voxel_bytes * sum(scale.bounds.size for scale in self.scales)

    @property
    def description(self) -> Json:
        """Everything that determines the bytes of any scale, however many there are."""
        return {
            **self.volume.description(),
            "bounds": [self.base.bounds.start, self.base.bounds.stop],
            "method": self.method,
            "factor": self.factor,
            "chunk_bytes": self.chunk_bytes,
        }

    def job(self) -> StageJob:
        """The job that makes it; one with more scales continues where one with fewer ended."""
        return stage_job(
            "pyramid", self.description, self.volume.url, self.volume.storage, self.stages
        )


@dataclass(frozen=True, slots=True)
class PyramidResult:
    """Coarser scales of a volume, and the outcome of the launch that made them.

    Attributes:
        url: the volume.
        scales: the scales that were to be made, finest first; readers see those that are complete.
        outcome: outcome of the launch.
    """

    url: str
    scales: list[PyramidScale]
    outcome: StageOutcome


def make_pyramid(
    volume: str | MultiscaleVolume,
    *,
    method: Method | None = None,
    factor: Zyx | None = None,
    num_scales: int | None = None,
    base_number: int = 0,
    flags: Sequence[str] = (),
    overwrite: bool = False,
) -> PyramidResult:
    """Make the coarser scales of a volume that are missing.

    Args:
        volume: URL of a precomputed volume or an OME-Zarr group; or the volume, which knows its
            base.
        method: "mean" or "mode"; None for "mode" if the volume says that it holds labels, else
            "mean".
        factor: from each scale to the next, ZYX; None so that voxels become isotropic first.
        num_scales: number of scales to make; None until one fits into one block.
        base_number: number of the scale of a URL's volume that the first new one is made from.
        flags: of Beam, such as ``--runner``.
        overwrite: first remove such scales, whoever made them.

    Returns:
        the scales and the outcome of the launch.

    Raises:
        NoScaleNeeded: one block holds the volume.
        ConfigError: the method or the factor must be given.
        VolumeError: the volume cannot be opened, or has such a scale that was made otherwise.
        StateError: another pyramid was begun there.
    """
    if isinstance(volume, str):
        volume = multiscale_volume(volume, storage_of_environment(LOCAL), base_number)
    return run_pyramid(plan_pyramid(volume, method, factor, num_scales), flags, overwrite=overwrite)


def plan_pyramid(
    volume: MultiscaleVolume,
    method: Method | None = None,
    factor: Zyx | None = None,
    num_scales: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    base: Volume | None = None,
) -> Pyramid:
    """Plan a pyramid; opens the volume, and creates nothing.

    Args:
        volume: the volume and its base.
        method: see :func:`make_pyramid`.
        factor: see :func:`make_pyramid`.
        num_scales: see :func:`make_pyramid`.
        chunk_bytes: bytes that a chunk reads, at most, where its blocks allow.
        base: the base, open; None to open it, and to refuse one that cannot be read right.

    Raises:
        NoScaleNeeded: there is no scale to make.
        ConfigError: the method or the factor must be given.
        VolumeError: the volume cannot be opened, or TensorStore cannot write scales like it.
    """
    base = base or volume.open_base()
    method = method or _default_method(volume, base)
    _check_factor(base, factor)
    scales = scales_above(
        base.bounds, base.voxel_size_nm or (1.0, 1.0, 1.0), base.read_shape, factor, num_scales
    )
    if not scales:
        raise NoScaleNeeded(
            f"{base.url}, {zyx.as_flag(base.bounds.shape)} voxels, needs no coarser scale: "
            "one block holds it. --num-scales=1 makes one nevertheless."
        )
    volume.listed_scales(scales)  # refuses folders of other scales, before anything else
    block_shapes = [volume.block_shape(scale, base) for scale in scales]
    stages: list[MakeScale] = []
    below = None
    for scale, block_shape in zip(scales, block_shapes, strict=True):
        stages.append(_plan_stage(volume, base, below, scale, block_shape, chunk_bytes, method))
        below = scale
    return Pyramid(
        volume=volume,
        base=base,
        method=method,
        factor=factor,
        stages=tuple(stages),
        blocks=tuple(
            ChunkGrid(scale.bounds, shape).count
            for scale, shape in zip(scales, block_shapes, strict=True)
        ),
        chunk_bytes=chunk_bytes,
    )


def _check_factor(base: Volume, factor: Zyx | None) -> None:
    if factor is None and base.voxel_size_nm is None:
        raise ConfigError(
            f"{base.url} does not say its voxel size: pass --factor=2x2x2, or what fits, in z, y, x"
        )
    if factor is not None and (min(factor) < 1 or math.prod(factor) == 1):
        raise ConfigError(
            f"--factor={zyx.as_flag(factor)} makes no smaller volume: give whole numbers, "
            "in z, y, x"
        )


def _plan_stage(
    volume: MultiscaleVolume,
    base: Volume,
    below: PyramidScale | None,
    scale: PyramidScale,
    block_shape: Zyx,
    chunk_bytes: int,
    method: Method,
) -> MakeScale:
    read_bytes = math.prod(scale.factor) * base.channels * base.dtype.itemsize

    def fits(most: int) -> Callable[[Zyx], bool]:
        return lambda shape: math.prod(shape) * read_bytes <= most

    chunk = grow_shape(block_shape, scale.bounds.shape, fits(chunk_bytes))
    part = grow_shape(base.read_shape, chunk, fits(min(chunk_bytes, PART_BYTES)))
    return MakeScale(volume, below, scale, ChunkGrid(scale.bounds, chunk), part, method)


def run_pyramid(
    pyramid: Pyramid, flags: Sequence[str] = (), *, overwrite: bool = False
) -> PyramidResult:
    """Make what is missing of a planned pyramid, and list the scales that are complete then.

    Args:
        pyramid: from :func:`plan_pyramid`.
        flags: of Beam.
        overwrite: first remove such scales, whoever made them.

    Raises:
        VolumeError: the volume has such a scale, which was not made by this pyramid.
        StateError: another pyramid was begun there.
    """
    from beam_inference.beam.stage_runner import run_stages  # slow to import

    job = pyramid.job()
    warn_if_unfinished(pyramid.volume.url, job.storage)
    records = StageRecords(job)
    pyramid.volume.refuse_links(pyramid.scales)
    if overwrite:
        remove_scales(job)
    elif not records.has_begun():
        listed = pyramid.volume.listed_scales(pyramid.scales)
        if listed:
            raise VolumeError(
                f"{pyramid.volume.url} has {', '.join(scale.name for scale in listed)} of this "
                "pyramid already, made by something else, or in another way. Pass --overwrite to "
                "replace them, or --scale to begin above them."
            )
        filled = pyramid.volume.find_filled_folder(pyramid.scales)
        if filled is not None:
            raise VolumeError(
                f"{filled} is to be a scale of the pyramid, and holds files that the volume does "
                "not list. Look what they are; --overwrite removes them."
            )
    records.begin()
    check_witnesses(job, pyramid.stages, pyramid.volume.url)
    outcome = run_stages(job, flags, pyramid.voxels_per_chunk)
    list_complete_scales(job)
    return PyramidResult(pyramid.volume.url, pyramid.scales, outcome)


def remove_scales(job: StageJob) -> None:
    """Remove the scales of a pyramid's job, whoever made them, and all records of pyramids."""
    # Records first: scales that are listed and have no record are refused until they are removed.
    delete_folder(job.state_url, job.storage, f"{job.kind}/")
    stages = _stages(job)
    stages[0].volume.remove_scales([stage.scale for stage in stages])


def list_complete_scales(job: StageJob) -> None:
    """List for readers the scales that are complete, and below which all are."""
    complete = list(takewhile(lambda stage: job.count_believed(stage) == stage.count, _stages(job)))
    if complete:
        complete[0].volume.list_scales([stage.scale for stage in complete])


def _stages(job: StageJob) -> list[MakeScale]:
    return [stage for stage in job.stages if isinstance(stage, MakeScale)]


def _default_method(volume: MultiscaleVolume, base: Volume) -> Method:
    if volume.holds_labels:
        return "mode"
    if base.dtype.kind in "iu" and base.dtype.itemsize >= 4:
        raise ConfigError(
            f"{base.url} holds {base.dtype.name}, as segmentations do, and does not say that it is "
            "one. Pass --method=mode for labels, --method=mean for an image."
        )
    return "mean"


def factor_of(job: StageJob) -> Zyx | None:
    """Factor between the scales of a pyramid that was begun, as its record gives it, ZYX."""
    factor = job.description.get("factor")
    if (
        not isinstance(factor, list)
        or len(factor) != 3
        or not all(isinstance(n, int) and n > 0 for n in factor)
    ):
        return None
    z, y, x = factor
    return (z, y, x) if factor != [1, 1, 1] else None


def begun_folders(url: str, storage: Storage) -> list[str]:
    """Folders of the scales that a pyramid has begun to make in a volume, listed or not.

    Args:
        url: URL of the volume.
        storage: settings to reach it.

    Returns:
        Names relative to the volume, with "/" behind; none if no pyramid was begun, or if the
        volume cannot be understood.
    """
    earlier = StageRecords(stage_job("pyramid", {}, url, storage, ())).earlier_job()
    if earlier is None:
        return []
    try:
        volume = multiscale_volume(url, storage)
        base = open_source(VolumeSource(url, storage=storage), check_blocks=False)
        pyramid = plan_pyramid(volume, "mean", factor_of(earlier), ALL_SCALES, base=base)
    except UserError:
        return []
    entries = map(volume.codec.new_entry, pyramid.scales)
    return [f"{volume.codec.folder(entry)}/" for entry in entries]
