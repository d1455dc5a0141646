"""Parts of a job: its input, its output, and how values become the network's input."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.config.definite import DefiniteConfig, DefiniteNormalize
from beam_inference.config.formats import OutputSpec, get_format
from beam_inference.config.job import OUTPUT, JobConfig
from beam_inference.config.normalize import (
    Affine,
    Normalize,
    Sections,
    holes_of,
    object_steps,
)
from beam_inference.config.storage import Storage
from beam_inference.config.volumes import Bounds, LevelsBox, ResampleBack
from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import AXES, BoundingBox
from beam_inference.geometry.fill import source_sections
from beam_inference.geometry.resampling import Resampling
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.job.resolved_job import ResolvedJob, ResolvedMask
from beam_inference.operators.levels import by_section
from beam_inference.operators.normalize import AnyNormalization, Normalization, unit
from beam_inference.operators.normalize_steps import (
    StepwiseNormalization,
    normalize_by_place,
    split_steps,
)
from beam_inference.volumes.further_input import fit_to_input
from beam_inference.volumes.holes import open_holes
from beam_inference.volumes.input_volume import (
    FurtherVolume,
    InputVolume,
    as_input,
    output_grid,
    resampling_to_output,
)
from beam_inference.volumes.mask import Mask, open_mask
from beam_inference.volumes.object_volume import open_object
from beam_inference.volumes.opening import open_source
from beam_inference.volumes.volume import Volume

logger = logging.getLogger(__name__)


def open_input(config: JobConfig, cache_bytes: Sequence[int] = ()) -> InputVolume:
    """Open all volumes that a job reads, at the network's voxel size and behind their mask.

    Args:
        config: the job.
        cache_bytes: decoded blocks that are kept, of the input and of each further one; none
            where there are no such numbers.

    Errors are those of :func:`beam_inference.volumes.opening.open_source`,
    :func:`beam_inference.volumes.input_volume.as_input`,
    :func:`beam_inference.volumes.further_input.fit_to_input`,
    :func:`beam_inference.volumes.mask.open_mask` and :func:`with_object`.
    """
    of_first, *of_further = cache_bytes or [0] * (1 + len(config.inputs))
    volume = _open_first_input(config, of_first)
    for number, kept in enumerate(of_further):
        further = _open_further_input(config, number, volume, kept)
        volume = replace(volume, further=(*volume.further, further))
    return with_object(volume, config.model.normalize, config.storage)


def with_object(volume: InputVolume, normalize: Normalize, storage: Storage) -> InputVolume:
    """An input beside which the object is read that it shows, if a normalisation asks for that.

    Args:
        volume: the input.
        normalize: the normalisation; one that names levels files asks for nothing yet.
        storage: how the holes of the object are reached.

    Raises:
        ConfigError: the holes are absent, or of another volume.
    """
    if not object_steps(normalize):
        return volume
    named = holes_of(normalize)
    holes = None if named is None else open_holes(named.path, named.sha256, storage)
    return replace(volume, inside=open_object(volume, holes))


def _limits_of(config: JobConfig, before: int, channels: int) -> tuple[tuple[float, float], ...]:
    """The part of ``input.resample.clip`` for some channels, if that lists those of all volumes."""
    limits = () if config.input.resample is None else config.input.resample.limits
    is_of_all = bool(config.inputs) and len(limits) == config.model.input_channels
    return limits[before : before + channels] if is_of_all else ()


def _open_further_input(
    config: JobConfig, number: int, first: InputVolume, cache_bytes: int
) -> FurtherVolume:
    section = config.inputs[number]
    stored = open_source(section.source(config.storage), cache_bytes=cache_bytes)
    request = section.resample_beside(config.input)
    limits = _limits_of(config, first.all_channels, stored.channels)
    if section.resample is None and limits:
        request = request.model_copy(update={"clip": list(limits)})
    scale = config.model.finer_by
    volume = fit_to_input(stored, f"inputs.{number}", request, first, scale)
    fill, fill_value = section.fill_beside(config.input)
    return FurtherVolume(replace(volume, mask=first.mask), fill, fill_value)


def _open_first_input(config: JobConfig, cache_bytes: int = 0) -> InputVolume:
    section = config.input
    storage = config.storage
    stored = open_source(section.source(storage), cache_bytes=cache_bytes)
    whole = stored.bounds
    stored = _crop(stored, section.box)
    scale = config.model.finer_by
    request = section.resample
    limits = _limits_of(config, 0, stored.channels)
    if request is not None and limits:
        request = request.model_copy(update={"clip": list(limits)})
    wanted = config.resampled_voxel_size_nm
    volume = as_input(stored, request, wanted, scale, config.model.coarser_by)
    volume = volume if section.box is None else replace(volume, whole=whole)
    if section.mask is None:
        return volume
    size = voxel_size_nm(config, volume)
    mask = open_mask("input.mask", section.mask, size, volume.origin.rest, storage)
    return replace(volume, mask=mask)


def _crop(volume: Volume, box: Bounds | LevelsBox | None) -> Volume:
    if box is None:
        return volume
    assert isinstance(box, Bounds), "a launch puts the box of a levels file into its job"
    if not volume.bounds.contains(box.box):
        raise ConfigError(
            f"input.box {box.box} is not inside the input {volume.url}, which is {volume.bounds} "
            f"(z, y, x; stop exclusive). {box.box.describe_part_inside(volume.bounds)}"
        )
    return volume.crop(box.box)


def record_mask(mask: Mask) -> ResolvedMask:
    """What a job records of a mask."""
    volume = mask.volume
    return ResolvedMask(
        bounds=volume.bounds,
        per_voxel=mask.per_voxel,
        begins=mask.begins,
        dtype=volume.dtype.name,
    )


def open_input_under_output(job: ResolvedJob) -> Volume:
    """Open the input of a launched job in the voxels of its output, to be seen beside that.

    It is the first input, and lies where the job took it to lie; see :func:`open_input`. A mask of
    the input has no effect where its voxels are not the output's.
    """
    volume = _open_first_input(job.config).start_at(job.input_bounds.start)
    if job.to_output is None:
        return volume
    assert isinstance(volume, InputVolume), "such a volume is one at any place"
    source = volume.bounds if volume.resampling is None else volume.resampling.source
    bounds = job.to_output.target
    seen = Resampling(source, bounds, (1, 1, 1))
    return replace(volume, bounds=bounds, dtype=np.dtype(np.float32), resampling=seen, mask=None)


@dataclass(frozen=True, slots=True)
class OutputVoxels:
    """The voxels that a job's outputs have, as far as the input reaches.

    Attributes:
        bounds: the voxels.
        voxel_size_nm: their size, ZYX; None if neither input nor model says any.
        rest: how far the first lies beyond its whole coordinates, in voxels, ZYX.
        resampling: from the voxels that the network answers at; None where they are the same.
    """

    bounds: BoundingBox
    voxel_size_nm: VoxelSizeNm | None
    rest: tuple[float, float, float]
    resampling: Resampling | None


def output_voxels(config: JobConfig, volume: InputVolume) -> OutputVoxels:
    """Find the voxels that the outputs of a job have.

    Raises:
        ConfigError: see :func:`beam_inference.volumes.input_volume.output_grid`.
    """
    output = config.output
    coarser = config.model.coarser_by
    grid = output_grid(volume, output.voxel_size_nm, coarser)
    size: VoxelSizeNm | None = grid.voxel_size_nm
    if volume.voxel_size_nm is None:
        is_of_input = output.voxel_size_nm == "input"
        size = config.model.voxel_size_nm if is_of_input else voxel_size_nm(config, volume)
        if size is not None and output.voxel_size_nm == "network":
            size = (size[0] * coarser[0], size[1] * coarser[1], size[2] * coarser[2])
    of_network = output.voxel_size_nm == "network"
    how = ResampleBack(order=0) if of_network else output.how_resampled
    resampling = resampling_to_output(volume, grid, how)
    return OutputVoxels(grid.bounds, size, grid.rest, resampling)


def voxel_size_nm(config: JobConfig, volume: Volume) -> VoxelSizeNm | None:
    """Size of the voxels that a network answers at, ZYX; None if neither input nor model says any.

    They are the input's, as it is read; where it does not say, those of the network's output.
    """
    model = config.model
    if volume.voxel_size_nm is not None or model.voxel_size_nm is None:
        return volume.voxel_size_nm
    z, y, x = (size / n for size, n in zip(model.voxel_size_nm, model.finer_by, strict=True))
    return (z, y, x)


def cutout(config: DefiniteConfig, volume: InputVolume, box: BoundingBox) -> AnyArray:
    """Read the voxels that patches are cut out of.

    Args:
        config: the job.
        volume: its input.
        box: the voxels wanted, which may lie beyond the volume.

    Returns:
        Array (C, Z, Y, X): stored values, in the volume's dtype. With levels by section they are
        normalised already, in float32; and so they are by the steps up to the last one that has
        numbers of each section, or changes the inside of an object alone.

    Raises:
        TransientReadError, PermanentReadError: see
            :meth:`beam_inference.volumes.volume.Volume.read`.
    """
    fill = config.input.fill
    normalize = config.model.normalize
    # What the network is to see beyond the volume is put there once patches are normalised.
    value = config.input.fill_value if config.input.network_fill is None else 0.0
    array = volume.cutout(box, fill, value, config.job.timeouts.read)
    if isinstance(normalize, Sections):
        return by_section(array, source_sections(box, volume.bounds, fill), normalize)
    steps = split_steps(normalize)[0] if isinstance(normalize, tuple) else ()
    if not steps:
        return array
    inside = None
    if volume.inside is not None:
        inside = volume.inside.cutout(box, fill, 0.0, config.job.timeouts.read)[0]
    return normalize_by_place(array, inside, source_sections(box, volume.bounds, fill), steps)


def normalization(config: DefiniteConfig, dtype: AnyDtype) -> AnyNormalization:
    """The map from a :func:`cutout` to the network's input; see :func:`make_normalization`."""
    return make_normalization(config.model.normalize, dtype, is_undone=config.model.denormalize)


def make_normalization(
    normalize: DefiniteNormalize, dtype: AnyDtype, *, is_undone: bool = False
) -> AnyNormalization:
    """Make the function that turns a :func:`cutout` into the network's input.

    Args:
        normalize: ``model.normalize`` of the job.
        dtype: dtype of the volume.
        is_undone: whether it is undone on the network's values.

    Raises:
        ConfigError: ``normalize`` is "unit" and the volume has floats.
    """
    if isinstance(normalize, tuple):
        return StepwiseNormalization(split_steps(normalize)[1], is_undone)
    made = Normalization()
    if isinstance(normalize, Affine):
        made = Normalization(normalize.scale, normalize.offset, normalize.clip)
    elif normalize == "unit":
        made = unit(dtype)
    return made.undone() if is_undone else made


def output_spec(job: ResolvedJob, key: str = OUTPUT) -> OutputSpec:
    """Describe an output of a job, or the preview of one, by its key in the job file."""
    source = job.config.previews.get(key)
    if source is not None:
        return describe_preview(job.config.by_output[source], output_spec(job, source))
    return describe_output(job.config.by_output[key], job.output_bounds, job.voxel_size_nm)


def describe_preview(config: JobConfig, output: OutputSpec) -> OutputSpec:
    """Describe the preview of an output: a block of it is made of what is written there at once.

    Args:
        config: the job file, as if it wrote this output alone.
        output: the output.

    Raises:
        ConfigError: its cells would cut blocks of the output.
    """
    preview = config.output.preview
    path = config.output.preview_path
    assert preview is not None, "there is one"
    assert path is not None, "there is one"
    scale = preview.scale
    for axis, (n, factor) in enumerate(zip(output.write_shape, scale, strict=True)):
        if n % factor:
            fits = [k for k in range(1, n + 1) if n % k == 0]
            near = sorted(sorted(fits, key=lambda k: abs(k - factor))[:2])
            raise ConfigError(
                f"output.preview.scale {list(scale)} does not divide what is written at once of "
                f"the output, {list(output.write_shape)} voxels (z, y, x): on {AXES[axis]}, two "
                f"blocks would share a voxel of the preview. Nearest on {AXES[axis]}: "
                f"{' or '.join(map(str, near))}; or change output.block_shape."
            )
        if output.bounds.start[axis] % factor:
            raise ConfigError(
                f"output.preview.scale {list(scale)}: the output starts at "
                f"{list(output.bounds.start)} (z, y, x), which on {AXES[axis]} is no multiple of "
                f"{factor}, so that a voxel of the preview would begin before it. Write a scale "
                f"that divides {output.bounds.start[axis]}, or an output.bounds.start that "
                f"{factor} divides."
            )
    block_shape = zyx.triple(n // k for n, k in zip(output.write_shape, scale, strict=True))
    bounds = output.bounds.coarsen(scale)
    z, y, x = (size * n for size, n in zip(output.voxel_size_nm, scale, strict=True))
    rest_z, rest_y, rest_x = (part / n for part, n in zip(output.rest, scale, strict=True))
    shards = get_format(output.format).usual_shards(bounds.shape, block_shape)
    return replace(
        output,
        url=path,
        dtype=preview.dtype,
        bounds=bounds,
        block_shape=block_shape,
        voxel_size_nm=(z, y, x),
        encoding="raw",
        shard_shape=shards[0] if shards else None,
        labels=False,
        rest=(rest_z, rest_y, rest_x),
    )


def describe_output(
    config: JobConfig, bounds: BoundingBox, voxel_size_nm: VoxelSizeNm
) -> OutputSpec:
    """Describe the output that a job file asks for.

    Args:
        config: the job file, with encoding and shards decided.
        bounds: the output's bounding box.
        voxel_size_nm: its voxel size, ZYX.
    """
    output = config.output
    assert output.encoding != "auto", "a launch has decided it"
    assert output.shard_shape != "auto", "a launch has decided it"
    return OutputSpec(
        url=output.path,
        format=output.format,
        dtype=output.dtype,
        channels=config.output_channels,
        labels=config.gives_labels,
        bounds=bounds,
        block_shape=output.block_shape,
        voxel_size_nm=voxel_size_nm,
        storage=config.storage,
        encoding=output.encoding,
        shard_shape=output.shard_shape,
        channel_axis=output.channel_axis,
    )
