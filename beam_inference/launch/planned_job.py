"""A job before its network is loaded: its input opened, its geometry derived, its output compared.

Nothing is written, and no network is loaded: this is all that ``plan`` needs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.definite import Settings
from beam_inference.config.devices import DefiniteDevice
from beam_inference.config.formats import OutputSpec, get_format
from beam_inference.config.job import OUTPUT, JobConfig
from beam_inference.config.normalize import (
    Contrast,
    LevelsRequest,
    Standard,
    depends_on_place,
    levels_files,
)
from beam_inference.config.operators import operator_bytes
from beam_inference.engines.choice import keeps_memory
from beam_inference.engines.devices import device_memory
from beam_inference.environment import format_bytes
from beam_inference.errors import AlignmentError, ConfigError, UserError, VolumeError
from beam_inference.geometry.alignment import check_alignment
from beam_inference.geometry.blending import kept_bytes
from beam_inference.geometry.bounding_box import BoundingBox, grown_shape
from beam_inference.geometry.chunk_shape import AUTO_MEMORY_BYTES, with_best_chunk_shape
from beam_inference.geometry.fill import check_fill_value
from beam_inference.geometry.origin import Origin, pad_to_zero
from beam_inference.geometry.plan import InferencePlan, Strategy
from beam_inference.geometry.plan_totals import Extremes
from beam_inference.geometry.resampling import Resampling
from beam_inference.geometry.zyx import add, ceil_div
from beam_inference.job.chunk_records import check_count
from beam_inference.job.enlargement import check_may_be_enlarged
from beam_inference.job.geometry import lattice_box, plan_geometry
from beam_inference.job.operator_files import local_operators, operator_sha256
from beam_inference.job.parts import (
    OutputVoxels,
    describe_output,
    describe_preview,
    make_normalization,
    open_input,
    output_voxels,
    with_object,
)
from beam_inference.job.place import THIS_PROCESS, Place
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.launch import decide
from beam_inference.launch.checks import (
    check_halos,
    check_nonzero,
    check_object,
    check_output_scale,
    check_position,
    check_sections,
    check_unit,
    check_voxel_size,
    open_masks,
)
from beam_inference.launch.memory import (
    FLOAT_BYTES,
    ChunkShapes,
    Exchanged,
    MemoryProjection,
    OutputSizes,
    ProcessSettings,
    ValueSizes,
)
from beam_inference.launch.strategy import cheaper_strategy, nominal_seconds
from beam_inference.operators.postprocess import build_functions
from beam_inference.volumes.input_volume import InputVolume
from beam_inference.volumes.kvstores import is_within, place_of_url
from beam_inference.volumes.mask import Mask
from beam_inference.volumes.opening import tell_rest_of_voxels
from beam_inference.volumes.outputs import (
    LOSSY,
    BlockLayout,
    check_output,
    default_bounds,
    find_output,
)
from beam_inference.worker.pace import LARGEST_DEPTH

logger = logging.getLogger(__name__)

PREVIEW_BYTES = 32
"""Of a value of a preview: its sum and its mean in float64, then in float32, and in its dtype."""

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


@dataclass(frozen=True, slots=True)
class PlannedOutput:
    """An output before the launch.

    Attributes:
        spec: its description; it is there or is to be made.
        exists: whether it is there.
    """

    spec: OutputSpec
    exists: bool


@dataclass(frozen=True)
class PlannedJob:
    """A job whose input is open and whose geometry is decided; its network was not loaded.

    Attributes:
        config: the job file, as the user wrote it, but for a box that a levels file holds.
        settings: the choices that it leaves open and that need no network.
        input: the input, open.
        masks: the masks of input and output, open, by their keys.
        roi: the box to produce, in the output's voxels.
        output: description of the output, which is there or is to be made.
        output_exists: whether it is there.
        operator_sha256: hashes of the files that operators need.
        further_outputs: the other outputs, by their keys in the job file.
        to_output: how the outputs' voxels are made of the network's; None where they are the same.
        previews: the previews of outputs, by their keys in the job file.
    """

    config: JobConfig
    settings: Settings
    input: InputVolume
    masks: Mapping[str, Mask]
    roi: BoundingBox
    output: OutputSpec
    output_exists: bool
    operator_sha256: Mapping[str, str]
    further_outputs: Mapping[str, PlannedOutput] = field(default_factory=dict)
    to_output: Resampling | None = None
    previews: Mapping[str, PlannedOutput] = field(default_factory=dict)

    @property
    def outputs(self) -> dict[str, PlannedOutput]:
        """All outputs, by their keys in the job file."""
        return {OUTPUT: PlannedOutput(self.output, self.output_exists), **self.further_outputs}

    @property
    def volumes(self) -> dict[str, PlannedOutput]:
        """All volumes that chunks are written to, by their keys in the job file."""
        return {**self.outputs, **self.previews}

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

    def with_device(self, device: DefiniteDevice) -> PlannedJob:
        """This job on another device."""
        return replace(self, settings=replace(self.settings, device=device))

    def plan_in(self, strategy: Strategy) -> InferencePlan:
        """Plan the job's geometry as it would be by another strategy."""
        plan = plan_geometry(
            self.config,
            volume=self.input.bounds,
            roi=self.roi,
            chunk_shape=self.settings.chunk_shape,
            strategy=strategy,
            input_block_shape=self.input.read_shape,
            resampling=self.input.resampling,
            output=self.output.bounds,
            to_output=self.to_output,
        )
        check_count(plan.chunks.count, "the job")
        return plan

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
        # on the host, by section or inside an object
        is_normalized = depends_on_place(self.settings.normalize)
        shapes = ChunkShapes(
            input=extremes.input,
            input_blocks_bytes=self._input_blocks_bytes(extremes),
            resampling_bytes=self.input.joining_bytes(extremes.input),
            core=extremes.core,
            patch_input=grown_shape(plan.lattice.patch_shape, plan.crop_margin),
            block_depth=plan.block_shape[0],
            is_filled=plan.reaches_outside or is_normalized,
            resampled=None if plan.to_output is None else extremes.resampled,
            exchanged=(
                None
                if plan.exchange is None
                else Exchanged(extremes.private, extremes.touched, extremes.shared)
            ),
        )
        main, *further = map(_output_sizes, config.by_output.values())
        sizes = ValueSizes(
            input_channels=self.input.all_channels,
            input_itemsize=FLOAT_BYTES if is_normalized else self.input.cutout_dtype.itemsize,
            output_channels=config.model.output_channels,
            operator_bytes=main.operator_bytes,
            written_channels=main.written_channels,
            output_dtype=main.dtype,
            is_read_back=main.is_read_back,
            is_split=bool(further) or main.network_channels != config.model.output_channels,
            further=further,
            preview_bytes=sum(map(_preview_bytes, config.by_output.values())),
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
            members=config.inference.members,
            cached_cutouts=config.job.cached_cutouts,
        )
        return MemoryProjection(shapes, sizes, process)

    def _input_blocks_bytes(self, extremes: Extremes[Any]) -> Any:
        further = (each.volume.block_bytes(extremes.input) for each in self.input.further)
        return self._first_blocks_bytes(extremes) + sum(further)

    def _first_blocks_bytes(self, extremes: Extremes[Any]) -> Any:
        resampling = self.input.resampling
        z, y, x = (
            extremes.input_blocks
            if resampling is None
            else resampling.source_blocks(extremes.input, self.input.read_shape)
        )
        return self.input.channels * z * y * x * self.input.values_dtype.itemsize


def _output_sizes(config: JobConfig) -> OutputSizes:
    """Sizes of the values of a job's output, as if it were the only one."""
    channels = config.output_model.output_channels
    return OutputSizes(
        network_channels=channels,
        operator_bytes=operator_bytes(config.postprocess, channels),
        written_channels=config.output_channels,
        dtype=np.dtype(config.output.dtype),
        is_read_back=config.output.encoding in LOSSY,
    )


def _preview_bytes(config: JobConfig) -> int:
    """Bytes that the preview of an output takes while it is made, for each voxel of the output."""
    preview = config.output.preview
    if preview is None:
        return 0
    return ceil_div(PREVIEW_BYTES * config.output_channels, math.prod(preview.scale))


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
    config = decide.decide_levels_of_input(config, earlier)
    volume = _open_checked_input(config)
    check_position(volume, earlier)
    voxels = output_voxels(config, volume)
    masks = open_masks(config, volume, voxels)
    _check_output_is_apart(config, volume, masks)
    normalize = decide.decide_normalization(
        config, [each.stored for each in volume.volumes], earlier
    )
    volume = with_object(volume, normalize, config.storage)
    check_sections(normalize, volume)
    check_object(config, normalize, volume, place)
    check_nonzero(normalize, volume)
    for single in config.by_output.values():
        check_halos(single.postprocess, voxels.bounds)
    make_normalization(normalize, volume.values_dtype)
    check_unit(normalize, volume)
    _check_fill_values(config, volume, masks)
    check_voxel_size(config, volume)
    roi = _find_roi(config, volume, voxels, earlier)
    held = lattice_box(config, voxels.bounds) or roi
    outputs = _find_outputs(config, volume, voxels, held, earlier)
    _tell_rest(config, volume, voxels)
    specs = {key: each.spec for key, each in outputs.items()}
    layouts = {key: BlockLayout(spec.encoding, spec.shard_shape) for key, spec in specs.items()}
    config = decide.with_layouts(config, layouts)
    main, *others = outputs.items()
    settings = decide.decide_settings(
        config, place, normalize, earlier, decide.job_of_engine(config, earlier)
    )
    hashes = _check_operators(config)
    job = PlannedJob(
        config,
        settings,
        volume,
        masks,
        roi,
        main[1].spec,
        main[1].exists,
        hashes,
        dict(others),
        voxels.resampling,
        _find_previews(config, outputs),
    )
    if earlier is None:
        _warn_of_masks_elsewhere(job)
        job = _with_cheapest_plan(job, place, workers)
    check_output_scale(config, job.plan)
    has_background = config.roi is None and volume.whole == job.output.bounds
    for key, planned in job.outputs.items():
        spec = planned.spec
        check_alignment(job.plan.chunks, spec.write_shape, spec.bounds, voxels.bounds)
        is_filled = has_background or _is_filled(spec, roi)
        if config.by_output[key].output.pyramid is not None and not is_filled:
            raise ConfigError(
                f"{key}.pyramid: the output {spec.url} exists with {spec.bounds}, and this job "
                f"fills {roi} only. A pyramid is of the whole volume: remove the key, and give the "
                "command beam-inference pyramid once all of it is there."
            )
    return job


def _find_roi(
    config: JobConfig, volume: InputVolume, voxels: OutputVoxels, earlier: ResolvedJob | None
) -> BoundingBox:
    """The box to produce, checked."""
    roi = voxels.bounds if config.roi is None else config.roi.box
    if not voxels.bounds.contains(roi):
        raise AlignmentError(
            f"roi {roi} is not inside the input {volume.url}, which is {voxels.bounds} (z, y, x; "
            f"stop exclusive{_of_voxels(volume, voxels)}). "
            f"{roi.describe_part_inside(voxels.bounds)}"
        )
    if earlier is not None and config.input.box is None:
        check_may_be_enlarged(earlier, roi)
    has_domain = config.roi is not None and config.roi.domain is not None
    if has_domain and voxels.resampling is not None:
        raise ConfigError(
            "roi.domain is for outputs with the voxels of the network, and this one has others: "
            "remove it, or the key of the output that gives it these"
        )
    return roi


def _check_operators(config: JobConfig) -> dict[str, str]:
    """Build the operators of every output once; the hashes of their files.

    Raises:
        ModelContractError: a file is absent, or a function cannot be imported.
    """
    hashes: dict[str, str] = {}
    for key, single in config.by_output.items():
        operators = local_operators(single.postprocess, config.storage, output=key)
        hashes |= operator_sha256(operators, key)
        build_functions(operators)
    return hashes


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
    if volume.all_channels != config.model.input_channels:
        selection = "" if config.input.channel is None else " selected by input.channel"
        others = [f"{each.volume.url} {each.volume.channels}" for each in volume.further]
        together = f", {', '.join(others)}; together {volume.all_channels}" if others else ""
        raise VolumeError(
            f"the input {volume.url} has {volume.channels} channels{selection}{together}, the job "
            "says "
            f"model.input_channels: {config.model.input_channels}. Select with input.channel, or "
            "change the model."
        )
    return volume


def _check_output_is_apart(
    config: JobConfig, volume: InputVolume, masks: Mapping[str, Mask]
) -> None:
    """Refuse an output that would overwrite the input, a mask, or another output."""
    further = {f"inputs.{number}.path": each.volume for number, each in enumerate(volume.further)}
    volumes = (
        {"the input": volume} | further | {f"{key}, a mask": masks[key].volume for key in masks}
    )
    taken = {name: each.place for name, each in volumes.items()}
    paths = {key: single.output.path for key, single in config.by_output.items()}
    for key, source in config.previews.items():
        paths[key] = config.by_output[source].output.preview_path or ""
    for key, path in paths.items():
        place = place_of_url(path, config.storage)
        for name, other in taken.items():
            if is_within(other, place) or (name in paths and is_within(place, other)):
                raise ConfigError(
                    f"{key}.path {path} is {name}: choose another place, so as not to overwrite it"
                )
        taken[key] = place


def _check_fill_values(config: JobConfig, volume: InputVolume, masks: Mapping[str, Mask]) -> None:
    if config.input.fill == "constant" and config.input.network_fill is None:
        check_fill_value("input.fill_value", config.input.fill_value, volume.dtype)
    for number, each in enumerate(volume.further):
        if each.fill == "constant":
            check_fill_value(f"inputs.{number}.fill_value", each.fill_value, each.volume.dtype)
    for key, mask in masks.items():
        dtypes = [np.dtype(single.output.dtype) for single in config.by_output.values()]
        read = [each.dtype for each in volume.volumes]
        for dtype in read if key == "input.mask" else dtypes:
            check_fill_value(f"{key}.fill_value", mask.fill_value, dtype)


def _warn_of_masks_elsewhere(job: PlannedJob) -> None:
    """Warn where a mask lies beside all that it masks: nothing is kept there, or everything."""
    masked = {"input.mask": ("the input", job.input.bounds), "mask": ("the ROI", job.roi)}
    for key, mask in job.masks.items():
        name, box = masked[key]
        if not mask.reaches(box):
            corner = BoundingBox(box.start, add(box.start, (1, 1, 1)))
            logger.warning(
                "%s %s, which is %s in voxels of its own, lies wholly beside %s, %s: so %s. Check "
                "its voxel size and where it begins",
                key,
                mask.volume.url,
                mask.volume.bounds,
                name,
                box,
                "everything is kept" if mask.keeps_any(corner) else "nothing is kept",
            )


def _tell_rest(config: JobConfig, volume: InputVolume, voxels: OutputVoxels) -> None:
    """Warn where outputs begin between voxels of their own; of the input's that is told before."""
    keeps = all(get_format(each.output.format).group for each in config.by_output.values())
    size = voxels.voxel_size_nm
    if size is not None and size != volume.voxel_size_nm and not keeps:
        tell_rest_of_voxels("the output", size, Origin(voxels.bounds.start, voxels.rest))


def warn_if_inputs_unfinished(config: JobConfig) -> None:
    """Warn where an input, or a mask, is still being made."""
    for section in (config.input, *config.inputs, config.input.mask, config.mask):
        if section is not None and section.path is not None:
            warn_if_unfinished(section.path, config.storage)


def _of_voxels(volume: InputVolume, voxels: OutputVoxels) -> str:
    """Which voxels the bounds of an ROI are counted in, if they may not be the stored ones."""
    if volume.resampling is None and voxels.resampling is None:
        return ""
    return f"; in voxels of {list(voxels.voxel_size_nm or ())} nm, the output's"


def _find_outputs(
    config: JobConfig,
    volume: InputVolume,
    voxels: OutputVoxels,
    roi: BoundingBox,
    earlier: ResolvedJob | None,
) -> dict[str, PlannedOutput]:
    """Describe the outputs, by their keys; all have the bounds of the first."""
    before = {} if earlier is None else earlier.config.by_output
    found: dict[str, PlannedOutput] = {}
    for key, single in config.by_output.items():
        bounds = found[OUTPUT].spec.bounds if found else None
        try:
            found[key] = _find_output(single, volume, voxels, roi, bounds, before.get(key))
        except UserError as error:
            if key == OUTPUT:
                raise
            raise type(error)(f"{key}: {error}") from None
    return found


def _find_output(
    config: JobConfig,
    volume: InputVolume,
    voxels: OutputVoxels,
    roi: BoundingBox,
    given: BoundingBox | None,
    earlier: JobConfig | None,
) -> PlannedOutput:
    """Describe an output.

    Args:
        config: the job file, as if it wrote this output alone.
        volume: the input.
        voxels: those of the output.
        roi: the box to produce.
        given: the output's bounds, if they are decided already.
        earlier: the same of an earlier launch, if there was one.
    """
    output = config.output
    bounds = roi
    is_as_stored = voxels.bounds == volume.stored.bounds
    if volume.whole is not None and is_as_stored and config.roi is None:
        bounds = volume.whole
    if given is not None:
        bounds = given
    elif output.bounds is not None:
        bounds = BoundingBox(output.bounds.start, output.bounds.stop)
        if not get_format(output.format).has_offset and any(bounds.start):
            raise ConfigError(
                f"output.bounds start at {list(bounds.start)}, but a {output.format} array has no "
                "offset: write start: [0, 0, 0]"
            )
    voxel_size = voxels.voxel_size_nm
    if voxel_size is None and given is None:
        logger.warning(
            "the input does not say its voxel size, nor does model.voxel_size_nm: the output will "
            "say 1 nm"
        )
    size = voxel_size or (1.0, 1.0, 1.0)
    written = roi if config.input.box is None else bounds  # of a box whole shards are written
    layout = decide.decide_layout(config, bounds, written, earlier)
    config = decide.with_layouts(config, {OUTPUT: layout})
    spec = replace(describe_output(config, bounds, size), rest=voxels.rest)
    existing = find_output(spec)
    if existing is None:
        if output.bounds is None:
            padding = f"write output.bounds: {{start: [0, 0, 0], stop: {list(bounds.stop)}}}"
            default_bounds(output.format, bounds, padding)
        check_output(spec)
        return PlannedOutput(spec, exists=False)
    if given is not None and existing.bounds != bounds:
        raise VolumeError(
            f"the volume {output.path} exists with bounds {existing.bounds}, and the job's output "
            f"has {bounds}: all its volumes have the same. Choose another path."
        )
    if output.bounds is not None and existing.bounds != bounds:
        raise VolumeError(
            f"the output {output.path} exists with bounds {existing.bounds}, output.bounds say "
            f"{bounds}. Remove output.bounds, or choose another output.path."
        )
    return PlannedOutput(replace(spec, bounds=existing.bounds), exists=True)


def _find_previews(
    config: JobConfig, outputs: Mapping[str, PlannedOutput]
) -> dict[str, PlannedOutput]:
    """Describe the previews of outputs, by their keys.

    Raises:
        UserError: one does not fit its output, or is there as another volume.
    """
    found = {}
    for key, output in config.previews.items():
        spec = describe_preview(config.by_output[output], outputs[output].spec)
        existing = find_output(spec)
        if existing is not None and existing.bounds != spec.bounds:
            raise VolumeError(
                f"{key}: the volume {spec.url} exists with bounds {existing.bounds}, and the "
                f"preview has {spec.bounds}. Choose another {key}.path."
            )
        if existing is None:
            check_output(spec)
        found[key] = PlannedOutput(spec, exists=existing is not None)
    return found


def _is_filled(output: OutputSpec, roi: BoundingBox) -> bool:
    """Whether an output has nothing but the ROI, or what formats pad it with to start at 0.

    Earlier versions padded groups of arrays; they are continued.
    """
    is_group = get_format(output.format).group is not None
    return output.bounds == roi or (is_group and output.bounds == pad_to_zero(roi))


def _with_cheapest_plan(job: PlannedJob, place: Place, workers: int) -> PlannedJob:
    """Choose strategy and chunk shape of a first launch, where the job file leaves the choice.

    Raises:
        ConfigError: by no strategy does one block fit the memory that a chunk may take.
    """
    jobs = [job]
    if job.leaves_strategy:
        jobs = [job.with_strategy(strategy) for strategy in _EXACT_STRATEGIES]
    found = (_with_best_chunk_shape(each, place, workers) for each in jobs)
    fitting = [each for each in found if each is not None]
    if not fitting:
        raise ConfigError(
            "inference.chunk_shape: auto: not one block fits the "
            f"{format_bytes(AUTO_MEMORY_BYTES)} that it leaves to a worker process. Make "
            "output.block_shape (or shard_shape) smaller, or write a chunk_shape."
        )
    if len(fitting) == 1:
        return fitting[0]
    exchange, recompute = fitting
    seconds = nominal_seconds(job.plan, job.settings.device_kind)
    channels = job.config.model.output_channels
    best = cheaper_strategy(exchange.plan, recompute.plan, channels, seconds)
    return exchange if best == "exchange" else recompute


def _with_best_chunk_shape(job: PlannedJob, place: Place, workers: int) -> PlannedJob | None:
    """Choose the chunk shape, if it is open; None if not one block fits."""
    if job.config.inference.chunk_shape != "auto":
        return job
    plan = best_plan_for(job, job.settings.strategy, place, AUTO_MEMORY_BYTES, workers)
    if plan is None:
        return None
    return replace(job, settings=replace(job.settings, chunk_shape=plan.chunks.chunk_shape))


def levels_request(config: JobConfig) -> LevelsRequest | None:
    """The request of a job to a levels file; None if its normalisation names none."""
    normalize = config.model.normalize
    if isinstance(normalize, (Contrast, Standard, tuple)) and levels_files(normalize):
        return normalize
    return None
