"""What a job comes to: its input opened, its geometry derived, its output compared, every default made definite.

Nothing is written, and no network is loaded: this is all that ``plan`` needs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.fields import INTEGER_DTYPES
from beam_inference.config.job import JobConfig
from beam_inference.config.normalize import Contrast, Sections, Standard
from beam_inference.config.operators import operator_bytes
from beam_inference.engines.choice import runs_on_cpu_only
from beam_inference.engines.devices import device_memory, resolved_device
from beam_inference.engines.loading import CPU_ENGINES
from beam_inference.environment import usable_cores
from beam_inference.errors import AlignmentError, ConfigError, VolumeError
from beam_inference.geometry.alignment import check_alignment
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.chunk_shape import with_best_chunk_shape
from beam_inference.geometry.plan import InferencePlan, SeamMode
from beam_inference.geometry.plan_totals import Extremes
from beam_inference.job.parts import normalization, open_input, voxel_size_nm
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.job.resolved_job import NUMERICS, ResolvedJob
from beam_inference.launch.checks import (
    check_fill_value,
    check_no_auto,
    check_sections,
    check_voxel_size,
    masks_of,
)
from beam_inference.launch.memory import (
    FLOAT_BYTES,
    ChunkShapes,
    Exchanged,
    MemoryProjection,
    ProcessSettings,
    ValueSizes,
)
from beam_inference.operators.levels import decided
from beam_inference.operators.postprocess import build_functions
from beam_inference.volumes.kvstores import is_within, place_of_url
from beam_inference.volumes.mask import Mask
from beam_inference.volumes.outputs import (
    LOSSY,
    OutputSpec,
    check_output,
    default_bounds,
    open_output,
)
from beam_inference.volumes.volume import Volume
from beam_inference.worker.chunk_run import LOOK_AHEAD, TRAILING_WRITES

logger = logging.getLogger(__name__)


AUTO_MEMORY_BYTES = 2 * 2**30
"""What ``chunk_shape: auto`` lets the chunks of a worker process take, by projection."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a job comes to once its input is known, before its network is.

    Attributes:
        job: resolved but for the network: no hash, no working set.
        output: what the output is, or is to be.
        output_exists: whether it is there already.
        input: the input, opened.
        masks: of input and output, opened.
    """

    job: ResolvedJob
    output: OutputSpec
    output_exists: bool
    input: Volume
    masks: Sequence[Mask]

    def memory(self, place: Place, *, alone: bool = False) -> MemoryProjection:
        """Projected memory of one worker process; of chunks that are done ``alone``, though others exchange sums."""
        added_up = alone and self.job.plan.exchange is not None
        plan = self.job.plan_in("recompute") if added_up else self.job.plan
        return self.memory_for(plan, plan.totals.extremes, place, added_up=added_up)

    def memory_for(
        self, plan: InferencePlan, extremes: Extremes[Any], place: Place, *, added_up: bool = False
    ) -> MemoryProjection:
        """The same for a plan with other seams or chunks, by the extremes of these."""
        job = self.job
        config = self.job.config
        by_section = isinstance(config.model.normalize, Sections)
        shapes = ChunkShapes(
            input=extremes.input,
            input_blocks_bytes=job.input_bytes(extremes.input_blocks),
            core=extremes.core,
            patch_input=grown_shape(plan.lattice.patch_shape, plan.crop_margin),
            block_depth=plan.block_shape[0],
            is_filled=plan.reaches_outside or by_section,
            exchanged=(
                None
                if plan.exchange is None
                else Exchanged(extremes.private, extremes.touched, extremes.shared)
            ),
            is_added_up=added_up,
        )
        sizes = ValueSizes(
            input_channels=job.input_channels,
            input_itemsize=FLOAT_BYTES if by_section else np.dtype(job.input_dtype).itemsize,
            output_channels=config.model.output_channels,
            operator_bytes=operator_bytes(config.postprocess, config.model.output_channels),
            written_channels=config.output_channels,
            output_dtype=np.dtype(config.output.dtype),
            is_read_back=config.output.encoding in LOSSY,
        )
        process = ProcessSettings(
            threads=place.threads_per_process,
            look_ahead=LOOK_AHEAD,
            trailing_writes=TRAILING_WRITES,
            batch_size=config.inference.patches_per_call,
            working_set_bytes=job.working_set_bytes,
            keeps_working_set=config.inference.engine in CPU_ENGINES,
            device_is_host=config.inference.device != "cuda",
            mask_piece_bytes=sum(mask.piece_bytes for mask in self.masks),
            mask_bytes=sum(
                mask.volume.bounds.size * mask.volume.dtype.itemsize for mask in self.masks
            ),
        )
        return MemoryProjection(shapes, sizes, process)


def survey(config: JobConfig, place: Place = THIS_PROCESS, workers: int = 1) -> Survey:
    """Open the job's input, derive its geometry, and check all of it against its output; nothing is written.

    ``workers`` are those at a time, as far as known: ``chunk_shape: auto`` depends on them.

    Raises:
        UserError: any of it is wrong.
    """
    if not place.is_this_machine:
        check_no_auto(config.inference)
    volume = open_input(config)
    if volume.channels != config.model.input_channels:
        raise VolumeError(
            f"the input {volume.url} has {volume.channels} channels{_selected(config)}, the job "
            f"says model.input_channels: {config.model.input_channels}. Select with "
            "input.channel, or change the model."
        )
    masks = masks_of(config, volume)
    there = place_of_url(config.output.path, config.storage)
    for what, each in (
        ("the input", volume),
        *((f"{key}, a mask", mask.volume) for key, mask in masks.items()),
    ):
        if is_within(each.place, there):
            raise ConfigError(
                f"output.path {config.output.path} is {what}: choose another place, so as not to "
                "overwrite it"
            )
    asked = (
        config.model.normalize if isinstance(config.model.normalize, (Contrast, Standard)) else None
    )
    if asked is not None:
        normalize = decided(asked, volume, config.storage)
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"normalize": normalize})}
        )
    check_sections(config.model.normalize, volume)
    normalization(config, volume.dtype)
    if config.input.fill == "constant":
        check_fill_value("input.fill_value", config.input.fill_value, volume.dtype)
    for key, mask in masks.items():
        dtype = volume.dtype if key == "input.mask" else np.dtype(config.output.dtype)
        check_fill_value(f"{key}.fill_value", mask.fill_value, dtype)
    check_voxel_size(config, volume)
    roi = BoundingBox(config.roi.start, config.roi.stop) if config.roi else volume.bounds
    if not volume.bounds.contains(roi):
        raise AlignmentError(
            f"roi {roi} is not inside the input {volume.url}, which is {volume.bounds} (z, y, x; "
            f"stop exclusive). The part inside is {roi.intersection(volume.bounds)}."
        )
    output, exists = _output(config, volume, roi)
    job = ResolvedJob(
        config=definite(config, place),
        asked_normalize=asked,
        input_bounds=volume.bounds,
        input_channels=volume.channels,
        input_dtype=volume.dtype.name,
        input_block_shape=volume.read_shape,
        roi=roi,
        output_bounds=output.bounds,
        voxel_size_nm=output.voxel_size_nm,
        model_sha256="",
        engine={},
        working_set_bytes=0,
        versions={},
        numerics=NUMERICS,
    )
    build_functions(config.postprocess)
    found = Survey(job, output, exists, volume, tuple(masks.values()))
    if config.inference.chunk_shape == "auto":
        found = _with_chunk_shape(found, place, workers)
    check_alignment(found.job.plan.chunks, output.write_shape, output.bounds, volume.bounds)
    if config.output.pyramid is not None and output.bounds != default_bounds(output.format, roi):
        raise ConfigError(
            f"output.pyramid: the output {output.url} is there with {output.bounds}, of which this "
            f"job fills {roi}. A pyramid is of the whole volume: remove the key, and give the "
            "command beam-inference pyramid once all of it is there."
        )
    return found


def suggested(
    found: Survey, seams: SeamMode, place: Place, memory_bytes: int, workers: int
) -> InferencePlan | None:
    """The plan with the best chunk shape in a seam mode, for workers of so much memory; None if none fits."""
    plan = found.job.plan_in(seams)
    on_device = (
        device_memory()
        if found.job.config.inference.device == "cuda" and place.is_this_machine
        else None
    )

    def fits(extremes: Extremes[Any]) -> bool | NDArray[np.bool_]:
        return found.memory_for(plan, extremes, place).fits(memory_bytes, on_device)

    return with_best_chunk_shape(plan, fits, workers)


def _with_chunk_shape(found: Survey, place: Place, workers: int) -> Survey:
    """What ``chunk_shape: auto`` means."""
    inference = found.job.config.inference
    plan = suggested(found, inference.seams, place, AUTO_MEMORY_BYTES, workers)
    if plan is None:
        raise ConfigError(
            f"inference.chunk_shape: auto: not one block fits the {AUTO_MEMORY_BYTES / 2**30:g} "
            "GiB that it leaves to a worker process. Make output.block_shape (or shard_shape) "
            "smaller, or write a chunk_shape."
        )
    chosen = inference.model_copy(update={"chunk_shape": plan.chunks.chunk_shape})
    known = {"config": found.job.config.model_copy(update={"inference": chosen}).model_dump()}
    return replace(found, job=ResolvedJob.model_validate(found.job.model_dump() | known))


def definite(config: JobConfig, place: Place) -> JobConfig:
    """The job with its defaults made definite: device, threads, chunk crop margin, value range."""
    inference = config.inference
    output = config.output
    if inference.device == "auto":
        cpu_only = inference.engine in CPU_ENGINES or runs_on_cpu_only(config.model)
        inference = inference.model_copy(
            update={"device": "cpu" if cpu_only else resolved_device("auto")}
        )
        if inference.device == "cpu" and inference.precision == "tf32":
            raise ConfigError(
                "inference.precision: tf32 exists only on CUDA devices, and this machine has none"
            )
    if inference.threads is None:
        threads = max(1, usable_cores() // place.processes_per_host) if place.is_this_machine else 1
        inference = inference.model_copy(update={"threads": threads})
    if inference.seams == "crop" and inference.chunk_crop_margin is None:
        inference = inference.model_copy(update={"chunk_crop_margin": inference.patch_overlap})
    if output.dtype in INTEGER_DTYPES and output.value_range is None and not config.gives_labels:
        # sigmoid or softmax: the config saw to it
        output = output.model_copy(update={"value_range": (0.0, 1.0)})
    return config.model_copy(update={"inference": inference, "output": output})


def _selected(config: JobConfig) -> str:
    return "" if config.input.channel is None else " selected by input.channel"


def _output(config: JobConfig, volume: Volume, roi: BoundingBox) -> tuple[OutputSpec, bool]:
    """What the output is to be, and whether it is there already."""
    output = config.output
    bounds = default_bounds(output.format, roi)
    if output.bounds is not None:
        bounds = BoundingBox(output.bounds.start, output.bounds.stop)
        if output.format != "precomputed" and any(bounds.start):
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
    spec = OutputSpec(
        url=output.path,
        format=output.format,
        dtype=output.dtype,
        channels=config.output_channels,
        labels=config.gives_labels,
        bounds=bounds,
        block_shape=output.block_shape,
        voxel_size_nm=voxel_size,
        storage=config.storage,
        encoding=output.encoding,
        shard_shape=output.shard_shape,
    )
    existing = open_output(spec)
    if existing is None:
        check_output(spec)
        return spec, False
    if output.bounds is not None and existing.bounds != bounds:
        raise VolumeError(
            f"the output {output.path} exists with bounds {existing.bounds}, output.bounds say "
            f"{bounds}. Remove output.bounds, or choose another output.path."
        )
    return replace(spec, bounds=existing.bounds), True
