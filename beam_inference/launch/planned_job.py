"""A job before its network is loaded: its input opened, its geometry derived, its output compared.

Nothing is written, and no network is loaded: this is all that ``plan`` needs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.definite import Settings
from beam_inference.config.formats import OutputSpec, get_format
from beam_inference.config.job import JobConfig
from beam_inference.config.normalize import (
    Contrast,
    LevelsRequest,
    Sections,
    Standard,
    levels_files,
)
from beam_inference.config.operators import operator_bytes
from beam_inference.engines.choice import keeps_memory
from beam_inference.engines.devices import device_memory
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.geometry.alignment import check_alignment
from beam_inference.geometry.blending import kept_bytes
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.chunk_shape import AUTO_MEMORY_BYTES, with_best_chunk_shape
from beam_inference.geometry.origin import pad_to_zero
from beam_inference.geometry.plan import InferencePlan, Strategy
from beam_inference.geometry.plan_totals import Extremes
from beam_inference.job.geometry import plan_geometry
from beam_inference.job.operator_files import local_operators, operator_sha256
from beam_inference.job.parts import describe_output, make_normalization, open_input, voxel_size_nm
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.launch import decide
from beam_inference.launch.checks import (
    check_fill_value,
    check_halos,
    check_no_auto,
    check_output_scale,
    check_position,
    check_sections,
    check_voxel_size,
    open_masks,
)
from beam_inference.launch.memory import (
    FLOAT_BYTES,
    ChunkShapes,
    Exchanged,
    MemoryProjection,
    ProcessSettings,
    ValueSizes,
)
from beam_inference.launch.strategy import cheaper_strategy, nominal_seconds
from beam_inference.limits import maximum
from beam_inference.operators.postprocess import build_functions
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.volumes.kvstores import is_within, place_of_url
from beam_inference.volumes.mask import Mask
from beam_inference.volumes.outputs import (
    LOSSY,
    check_output,
    default_bounds,
    open_output,
)
from beam_inference.volumes.volume import Volume
from beam_inference.worker.read_infer_write import LARGEST_DEPTH

logger = logging.getLogger(__name__)

_EXACT_STRATEGIES: tuple[Strategy, Strategy] = ("exchange", "recompute")


@dataclass(frozen=True, slots=True)
class NetworkNeeds:
    """Memory of a network, as far as it is known.

    Attributes:
        batch_size: patches per call.
        working_set_bytes: memory that one call allocates; 0 as long as the network was not tried.
        keeps_working_set: whether the engine keeps that memory between calls.
    """

    batch_size: int
    working_set_bytes: int
    keeps_working_set: bool

    @classmethod
    def of_engine(cls, engine: str, batch_size: int, working_set_bytes: int = 0) -> NetworkNeeds:
        """The memory of a network that some engine runs."""
        return cls(batch_size, working_set_bytes, keeps_memory(engine))


@dataclass(frozen=True)
class PlannedJob:
    """A job whose input is open and whose geometry is decided; its network was not loaded.

    Attributes:
        config: the job file, as the user wrote it, but for a box that a levels file holds.
        settings: the choices that it leaves open and that need no network.
        input: the input, open.
        masks: the masks of input and output, open, by their keys.
        roi: the box to produce.
        output: description of the output, which is there or is to be made.
        output_exists: whether it is there.
        operator_sha256: hashes of the files that operators need.
    """

    config: JobConfig
    settings: Settings
    input: InputVolume
    masks: Mapping[str, Mask]
    roi: BoundingBox
    output: OutputSpec
    output_exists: bool
    operator_sha256: Mapping[str, str]

    @cached_property
    def plan(self) -> InferencePlan:
        """The job's geometry."""
        return self.plan_in(self.settings.strategy)

    @property
    def leaves_strategy(self) -> bool:
        """Whether the strategy is to be found by what it costs."""
        return self.config.stated_strategy is None

    def with_strategy(self, strategy: Strategy) -> PlannedJob:
        """This job by another strategy."""
        return replace(self, settings=replace(self.settings, strategy=strategy))

    def plan_in(self, strategy: Strategy) -> InferencePlan:
        """Plan the job's geometry as it would be by another strategy."""
        return plan_geometry(
            self.config,
            volume=self.input.bounds,
            roi=self.roi,
            chunk_shape=self.settings.chunk_shape,
            strategy=strategy,
            input_block_shape=self.input.read_shape,
            resampling=self.input.resampling,
            output=self.output.bounds,
        )

    @property
    def default_needs(self) -> NetworkNeeds:
        """Memory of the network as far as the job file tells."""
        inference = self.config.inference
        batch_size = 1 if inference.batch_size == "auto" else inference.batch_size
        return NetworkNeeds.of_engine(inference.engine, batch_size)

    def memory(
        self, place: Place, needs: NetworkNeeds | None = None, io_depth: int = 1
    ) -> MemoryProjection:
        """Project the memory of one worker process.

        Args:
            place: where the workers run.
            needs: memory of the network; by default what the job file tells.
            io_depth: chunks per thread that are read ahead, and written behind.
        """
        plan = self.plan
        needs = needs or self.default_needs
        return self.memory_for(plan, plan.totals.extremes, place, needs, io_depth)

    def all_memory(
        self, place: Place, needs: NetworkNeeds | None = None, io_depth: int = 1
    ) -> list[MemoryProjection]:
        """Project the memory of one worker process by each way in which chunks may be done.

        By the strategy ``exchange`` a chunk is done without its neighbours where sums are lost.
        """
        own = self.memory(place, needs, io_depth)
        if self.plan.exchange is None:
            return [own]
        return [own, self.with_strategy("recompute").memory(place, needs, io_depth)]

    def io_depth(self, place: Place, needs: NetworkNeeds | None = None) -> int:
        """Choose how many chunks per thread may be read ahead, and written behind.

        It is what the job file says; or else as many as fit the memory that ``chunk_shape: auto``
        leaves to a worker process, and at least one.
        """
        stated = self.config.job.io_depth
        if stated is not None:
            return stated
        depth = LARGEST_DEPTH
        while depth > 1 and not self._fits(place, needs, depth):
            depth -= 1
        return depth

    def _fits(self, place: Place, needs: NetworkNeeds | None, io_depth: int) -> bool:
        bytes_of_each = [memory.host_bytes for memory in self.all_memory(place, needs, io_depth)]
        return max(bytes_of_each) <= AUTO_MEMORY_BYTES

    def memory_for(
        self,
        plan: InferencePlan,
        extremes: Extremes[Any],
        place: Place,
        needs: NetworkNeeds,
        io_depth: int = 1,
    ) -> MemoryProjection:
        """Project the memory of one worker process for another plan.

        Args:
            plan: the plan, which may have another strategy or other chunks than the job's.
            extremes: its largest chunks.
            place: where the workers run.
            needs: memory of the network.
            io_depth: chunks per thread that are read ahead, and written behind.
        """
        config = self.config
        by_section = isinstance(self.settings.normalize, Sections)
        shapes = ChunkShapes(
            input=extremes.input,
            input_blocks_bytes=self._input_blocks_bytes(extremes),
            resampling_bytes=self._resampling_bytes(extremes.input),
            core=extremes.core,
            patch_input=grown_shape(plan.lattice.patch_shape, plan.crop_margin),
            block_depth=plan.block_shape[0],
            is_filled=plan.reaches_outside or by_section,
            exchanged=(
                None
                if plan.exchange is None
                else Exchanged(extremes.private, extremes.touched, extremes.shared)
            ),
        )
        sizes = ValueSizes(
            input_channels=self.input.channels,
            input_itemsize=FLOAT_BYTES if by_section else self.input.dtype.itemsize,
            output_channels=config.model.output_channels,
            operator_bytes=operator_bytes(config.postprocess, config.model.output_channels),
            written_channels=config.output_channels,
            output_dtype=np.dtype(config.output.dtype),
            is_read_back=config.output.encoding in LOSSY,
        )
        process = ProcessSettings(
            threads=place.threads_per_process,
            look_ahead=io_depth,
            trailing_writes=io_depth,
            batch_size=needs.batch_size,
            working_set_bytes=needs.working_set_bytes,
            keeps_working_set=needs.keeps_working_set,
            device_is_host=self.settings.device == "cpu",
            mask_piece_bytes=sum(mask.piece_bytes for mask in self.masks.values()),
            mask_bytes=sum(
                mask.volume.bounds.size * mask.volume.dtype.itemsize for mask in self.masks.values()
            ),
            weights_bytes=kept_bytes(config.inference.patch_shape, config.inference.window),
        )
        return MemoryProjection(shapes, sizes, process)

    def _input_blocks_bytes(self, extremes: Extremes[Any]) -> Any:
        resampling = self.input.resampling
        z, y, x = (
            extremes.input_blocks
            if resampling is None
            else resampling.source_blocks(extremes.input, self.input.read_shape)
        )
        return self.input.channels * z * y * x * self.input.values_dtype.itemsize

    def _resampling_bytes(self, shape: Any) -> Any:
        """Bytes beside a cutout of a shape while it is resampled, axis by axis."""
        resampling = self.input.resampling
        if resampling is None:
            return 0
        z, y, x = resampling.source_shape(shape)
        stored = z * y * x
        read = shape[0] * shape[1] * shape[2]
        stored_bytes = self.input.values_dtype.itemsize
        if self.input.limits:
            stored_bytes += FLOAT_BYTES
        made = FLOAT_BYTES * (2 * maximum(stored, read) - read)
        return self.input.channels * (stored * stored_bytes + made)


def plan_job(
    config: JobConfig,
    place: Place = THIS_PROCESS,
    workers: int = 1,
    earlier: ResolvedJob | None = None,
) -> PlannedJob:
    """Open a job's input, derive its geometry, and check all of it; nothing is written.

    Args:
        config: the job file.
        place: where the workers run.
        workers: how many run at a time, as far as known: ``chunk_shape: auto`` depends on it.
        earlier: the job as its first launch resolved it, if there was one.

    Raises:
        UserError: something in it is wrong.
    """
    if not place.is_this_machine and earlier is None:
        check_no_auto(config.inference)
    config = decide.decide_levels_of_input(config, earlier)
    volume = _open_checked_input(config)
    check_position(volume, earlier)
    masks = open_masks(config, volume)
    _check_output_is_apart(config, volume, masks)
    normalize = decide.decide_normalization(config, volume.stored, earlier)
    check_sections(normalize, volume)
    check_halos(config.postprocess, volume)
    make_normalization(normalize, volume.values_dtype)
    _check_fill_values(config, volume, masks)
    check_voxel_size(config, volume)
    roi = BoundingBox(config.roi.start, config.roi.stop) if config.roi else volume.bounds
    if not volume.bounds.contains(roi):
        raise AlignmentError(
            f"roi {roi} is not inside the input {volume.url}, which is {volume.bounds} (z, y, x; "
            f"stop exclusive{_of_voxels(volume)}). The part inside is "
            f"{roi.intersection(volume.bounds)}."
        )
    output, exists = _find_output(config, volume, roi)
    settings = decide.decide_settings(config, place, normalize, earlier)
    operators = local_operators(config.postprocess, config.storage)
    hashes = operator_sha256(operators)
    build_functions(operators)
    job = PlannedJob(config, settings, volume, masks, roi, output, exists, hashes)
    if earlier is None:
        job = _with_cheapest_plan(job, place, workers)
    check_output_scale(config, job.plan)
    check_alignment(job.plan.chunks, output.write_shape, output.bounds, volume.bounds)
    has_background = config.roi is None and volume.whole == output.bounds
    is_filled = has_background or _is_filled(output, roi)
    if config.output.pyramid is not None and not is_filled:
        raise ConfigError(
            f"output.pyramid: the output {output.url} exists with {output.bounds}, and this job "
            f"fills {roi} only. A pyramid is of the whole volume: remove the key, and give the "
            "command beam-inference pyramid once all of it is there."
        )
    return job


def best_plan_for(
    job: PlannedJob,
    strategy: Strategy,
    place: Place,
    memory_bytes: int,
    workers: int,
    needs: NetworkNeeds | None = None,
) -> InferencePlan | None:
    """Find the best chunk shape by a strategy.

    Args:
        job: the job.
        strategy: the strategy.
        place: where the workers run.
        memory_bytes: memory of each worker process for its chunks.
        workers: how many run at a time.
        needs: memory of the network; by default what the job file tells.

    Returns:
        The plan with the best chunk shape, or None if not one block fits.
    """
    plan = job.plan_in(strategy)
    on_device = device_memory(job.settings.device) if place.is_this_machine else None
    network = needs or job.default_needs

    def fits(extremes: Extremes[Any]) -> bool | NDArray[np.bool_]:
        return job.memory_for(plan, extremes, place, network).fits(memory_bytes, on_device)

    return with_best_chunk_shape(plan, fits, workers)


def _open_checked_input(config: JobConfig) -> InputVolume:
    volume = open_input(config)
    if volume.channels != config.model.input_channels:
        selection = "" if config.input.channel is None else " selected by input.channel"
        raise VolumeError(
            f"the input {volume.url} has {volume.channels} channels{selection}, the job says "
            f"model.input_channels: {config.model.input_channels}. Select with input.channel, or "
            "change the model."
        )
    return volume


def _check_output_is_apart(config: JobConfig, volume: Volume, masks: Mapping[str, Mask]) -> None:
    """Refuse an output that would overwrite the input or a mask."""
    place = place_of_url(config.output.path, config.storage)
    volumes = {"the input": volume} | {f"{key}, a mask": masks[key].volume for key in masks}
    for name, each in volumes.items():
        if is_within(each.place, place):
            raise ConfigError(
                f"output.path {config.output.path} is {name}: choose another place, so as not to "
                "overwrite it"
            )


def _check_fill_values(config: JobConfig, volume: Volume, masks: Mapping[str, Mask]) -> None:
    if config.input.fill == "constant" and config.input.network_fill is None:
        check_fill_value("input.fill_value", config.input.fill_value, volume.dtype)
    for key, mask in masks.items():
        dtype = volume.dtype if key == "input.mask" else np.dtype(config.output.dtype)
        check_fill_value(f"{key}.fill_value", mask.fill_value, dtype)


def _of_voxels(volume: InputVolume) -> str:
    """Which voxels the bounds of an input are counted in, if they are not the stored ones."""
    if volume.resampling is None:
        return ""
    return f"; in voxels of {list(volume.voxel_size_nm or ())} nm, by input.resample"


def _find_output(
    config: JobConfig, volume: InputVolume, roi: BoundingBox
) -> tuple[OutputSpec, bool]:
    """Describe the output; the second value says whether it is there already."""
    output = config.output
    bounds = roi
    if volume.whole is not None and volume.resampling is None and config.roi is None:
        bounds = volume.whole
    if output.bounds is not None:
        bounds = BoundingBox(output.bounds.start, output.bounds.stop)
        if not get_format(output.format).has_offset and any(bounds.start):
            raise ConfigError(
                f"output.bounds start at {list(bounds.start)}, but a {output.format} array has no "
                "offset: write start: [0, 0, 0]"
            )
    voxel_size = voxel_size_nm(config, volume)
    if voxel_size is None:
        logger.warning(
            "the input does not say its voxel size, nor does model.voxel_size_nm: the output will "
            "say 1 nm"
        )
        voxel_size = (1.0, 1.0, 1.0)
    spec = replace(describe_output(config, bounds, voxel_size), rest=volume.origin.rest)
    existing = open_output(spec)
    if existing is None:
        if output.bounds is None:
            padding = f"write output.bounds: {{start: [0, 0, 0], stop: {list(bounds.stop)}}}"
            default_bounds(output.format, bounds, padding)
        check_output(spec)
        return spec, False
    if output.bounds is not None and existing.bounds != bounds:
        raise VolumeError(
            f"the output {output.path} exists with bounds {existing.bounds}, output.bounds say "
            f"{bounds}. Remove output.bounds, or choose another output.path."
        )
    return replace(spec, bounds=existing.bounds), True


def _is_filled(output: OutputSpec, roi: BoundingBox) -> bool:
    """Whether an output has nothing but the ROI, or what formats pad it with to start at 0.

    Earlier versions padded groups of arrays; they are continued.
    """
    is_group = get_format(output.format).group is not None
    return output.bounds == roi or (is_group and output.bounds == pad_to_zero(roi))


def _with_cheapest_plan(job: PlannedJob, place: Place, workers: int) -> PlannedJob:
    """Choose strategy and chunk shape of a first launch, where the job file leaves the choice."""
    if not job.leaves_strategy:
        return _with_best_chunk_shape(job, place, workers)
    exchange, recompute = (
        _with_best_chunk_shape(job.with_strategy(strategy), place, workers)
        for strategy in _EXACT_STRATEGIES
    )
    seconds = nominal_seconds(job.plan, job.settings.device_kind)
    channels = job.config.model.output_channels
    best = cheaper_strategy(exchange.plan, recompute.plan, channels, seconds)
    return exchange if best == "exchange" else recompute


def _with_best_chunk_shape(job: PlannedJob, place: Place, workers: int) -> PlannedJob:
    """Choose the chunk shape, if it is open.

    Raises:
        ConfigError: not one block fits the memory that a chunk may take.
    """
    if job.config.inference.chunk_shape != "auto":
        return job
    plan = best_plan_for(job, job.settings.strategy, place, AUTO_MEMORY_BYTES, workers)
    if plan is None:
        raise ConfigError(
            f"inference.chunk_shape: auto: not one block fits the {AUTO_MEMORY_BYTES / 2**30:g} "
            "GiB that it leaves to a worker process. Make output.block_shape (or shard_shape) "
            "smaller, or write a chunk_shape."
        )
    return replace(job, settings=replace(job.settings, chunk_shape=plan.chunks.chunk_shape))


def levels_request(config: JobConfig) -> LevelsRequest | None:
    """The request of a job to a levels file; None if its normalisation names none."""
    normalize = config.model.normalize
    if isinstance(normalize, (Contrast, Standard, tuple)) and levels_files(normalize):
        return normalize
    return None
