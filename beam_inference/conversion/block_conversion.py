"""Conversion into a volume of blocks: a Beam job of one stage, continued where it was killed."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from dataclasses import asdict, dataclass, replace

import numpy as np

from beam_inference.beam.flags import beam_options, place_of
from beam_inference.beam.stage_runner import check_place, run_stages
from beam_inference.config.fields import Json
from beam_inference.config.formats import (
    OutputSpec,
    get_format,
    installed_formats,
    names_of,
    offset_formats,
    sharded_formats,
)
from beam_inference.config.storage import check_writable
from beam_inference.conversion.blocks import CopyBlocks, default_block_shape
from beam_inference.conversion.find_source import StoredVolume
from beam_inference.conversion.options import (
    NO_VOXEL_SIZE,
    ConversionOptions,
    ConversionResult,
)
from beam_inference.conversion.protocol import Source
from beam_inference.conversion.resampled import ResampledSource
from beam_inference.environment import format_bytes
from beam_inference.errors import ConfigError, StateError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.origin import NO_REST, pad_to_zero
from beam_inference.job.ownership import refuse_owned
from beam_inference.job.provenance import record_command
from beam_inference.job.replacement import Replacement, plan_replacement
from beam_inference.job.stage_job import StageJob
from beam_inference.job.stage_records import StageRecords, begun_names, stage_job
from beam_inference.job.stage_witnesses import check_witnesses
from beam_inference.pyramid.pyramid import begun_folders
from beam_inference.volumes.kvstores import is_within, place_of_url, url_of
from beam_inference.volumes.outputs import (
    check_output,
    create_output,
    default_bounds,
    open_output,
)
from beam_inference.volumes.remote_names import folder_of_files, names_files

_OF_RESAMPLING = ("grids", "orders", "postprocess")
"""Members of the identity of a resampled source that say how it is resampled."""


@dataclass(frozen=True)
class BlockConversion:
    """A conversion into a volume of blocks, checked and ready to run.

    Attributes:
        source_path: path or URL of the source as the user gave it.
        target: path or URL of the target as the user gave it.
        task: the stage that copies chunks.
        replacement: what is removed at the target first; None to go on with what is there.
        scale: number of the source's scale.
        flags: Beam's flags.
    """

    source_path: str
    target: str
    task: CopyBlocks
    replacement: Replacement | None
    scale: int
    flags: tuple[str, ...]

    @property
    def source(self) -> Source:
        """The volume to read."""
        return self.task.source

    @property
    def spec(self) -> OutputSpec:
        """The volume to write."""
        return self.task.target

    @property
    def description(self) -> Json:
        """Everything that determines the bytes that are written, as JSON values."""
        target = asdict(self.spec)
        del target["storage"], target["url"]  # how it is reached does not matter
        if not any(self.spec.rest):  # conversions that began before there was one go on
            del target["rest"]
        if self.spec.channel_axis == "auto":
            del target["channel_axis"]
        return {
            "source": self.source.identity,
            "target": target,
            "start": self.task.box.start,
            "chunk": self.task.shapes.chunk,
        }

    @property
    def how(self) -> Json:
        """What the target's metadata tell of the conversion, without the source's place."""
        identity = self.source.identity
        resampled = {key: identity[key] for key in _OF_RESAMPLING if key in identity}
        scale = {"scale": self.scale} if self.scale else {}
        return {"start": list(self.task.box.start), **scale, **resampled}

    def job(self) -> StageJob:
        """The stage, and what is recorded of it."""
        spec = self.spec
        return stage_job("convert", self.description, spec.url, spec.storage, [self.task])

    def run(self) -> ConversionResult:
        """Copy the chunks that are missing.

        Raises:
            StateError: the target holds something else, which may not be replaced.
        """
        spec = self.spec
        if self.replacement is not None:
            self.replacement.remove()
        exists = open_output(spec) is not None
        job = self.job()
        records = StageRecords(job)
        if not records.has_begun():
            if exists:
                raise StateError(
                    f"{self.target} holds a volume that this conversion did not begin: choose "
                    "another place, or pass --overwrite to replace it"
                )
            refuse_owned(spec.url, spec.storage)
        records.begin()
        if exists:
            check_witnesses(job, [self.task], self.target)
        else:
            create_output(spec)
        command = "resample" if isinstance(self.source, ResampledSource) else "convert"
        record_command(command, job, spec, self.source_path, self.how)
        outcome = run_stages(job, self.flags, self.task.box.size / self.task.count)
        return ConversionResult(self.target, spec.format, self.task.box, outcome)


def plan_block_conversion(
    source: Source,
    source_path: str,
    target: str,
    box: BoundingBox,
    format: str,
    options: ConversionOptions,
) -> BlockConversion:
    """Check a conversion into a volume of blocks; nothing is written.

    Args:
        source: the volume to read.
        source_path: its path or URL as the user gave it.
        target: path or URL of the volume to write.
        box: the voxels' box in the target, ZYX.
        format: format of the target.
        options: what else the user chose.

    Raises:
        UserError: it cannot be done.
    """
    if options.drop:
        raise ConfigError(
            f"--drop {','.join(options.drop)}: format {format} can hold "
            "everything, so nothing need be dropped"
        )
    voxel_size_nm = options.voxel_size_nm or source.info.voxel_size_nm
    if voxel_size_nm is None:
        raise ConfigError(NO_VOXEL_SIZE)
    check_writable(target)
    url = url_of(target)
    source_url = source.url if isinstance(source, StoredVolume) else url_of(source_path)
    check_place(options.flags, [source_url, url])
    _check_apart(source, source_path, target, options)
    spec = OutputSpec(
        url=url,
        format=format,
        dtype=source.info.dtype,
        channels=source.info.channels,
        bounds=_target_bounds(format, box, pad=options.pad),
        block_shape=options.block_shape or default_block_shape(box.shape, voxel_size_nm),
        voxel_size_nm=voxel_size_nm,
        storage=options.storage,
        encoding=options.encoding or "raw",
        shard_shape=options.shard_shape,
        labels=options.labels,
        rest=source.info.rest if options.offset is None else NO_REST,
    )
    _check_spec(spec, source_path, options)
    task = CopyBlocks(source, spec, box, options.window_bytes)
    _check_scratch_space(task, options.flags)
    replacement = None
    if options.overwrite:
        begun = stage_job("convert", {}, url, options.storage, [])
        further = [*begun_names(begun, spec), *begun_folders(url, options.storage)]
        replacement = plan_replacement(url, options.storage, further)
    return BlockConversion(
        source_path=source_path,
        target=target,
        task=task,
        replacement=replacement,
        scale=options.scale,
        flags=options.flags,
    )


def _check_apart(source: Source, source_path: str, target: str, options: ConversionOptions) -> None:
    """Refuse a target that is the source, or would take it with it. Raises ConfigError."""
    place = place_of_url(url_of(target), options.storage)
    if isinstance(source, StoredVolume):
        source_place = source.place
    else:
        folder = folder_of_files(source_path) if names_files(source_path) else source_path
        source_place = place_of_url(url_of(folder), options.storage)
    if source_place == place:
        raise ConfigError(f"{target} is the source and would be overwritten: choose another place")
    if options.overwrite and is_within(source_place, place):
        raise ConfigError(
            f"{target} holds the source {source_path}, and --overwrite would remove it: choose "
            "another place"
        )


def _target_bounds(format: str, box: BoundingBox, *, pad: bool) -> BoundingBox:
    """The extent of the target, which holds a box.

    Raises:
        ConfigError: its format cannot hold that box alone, and padding was not asked for; or it
            can, and padding was.
    """
    if not pad:
        try:
            return default_bounds(format, box, "pass --pad")
        except ConfigError as error:
            raise ConfigError(f"{error} To move them instead: --offset=0,0,0") from None
    if get_format(format).has_offset:
        raise ConfigError(
            f"--pad: {format} volumes start at any voxel, so nothing need be padded. --pad is for "
            "formats that start at 0"
        )
    padded = pad_to_zero(box)
    if padded is None:
        raise ConfigError(
            f"--pad: these voxels start at {list(box.start)} (z, y, x), before 0, where {format} "
            f"volumes start. Write one of {offset_formats()}, or move them with --offset=0,0,0"
        )
    return padded


def _check_spec(spec: OutputSpec, source_path: str, options: ConversionOptions) -> None:
    """Refuse a volume that its format cannot hold, or that differs from an existing one."""
    format = get_format(spec.format)
    if options.encoding is not None and not format.encodings:
        takers = names_of(other for other in installed_formats() if other.encodings)
        raise ConfigError(f"--encoding {options.encoding} is for --format {takers}")
    if spec.encoding != "raw" and spec.channels > 1:
        raise ConfigError(
            f"--encoding {spec.encoding} is for one channel (readers disagree about the order of "
            f"more), and {source_path} has {spec.channels}"
        )
    if spec.labels and np.dtype(spec.dtype).kind == "f":
        raise ConfigError(
            f"--labels: {source_path} holds {spec.dtype}, and names of objects are integers"
        )
    if spec.shard_shape is not None and not format.has_shards:
        raise ConfigError(f"--shard_shape: {spec.format} has no shards; {sharded_formats()} have")
    if any(s % b for s, b in zip(spec.write_shape, spec.block_shape, strict=True)):
        raise ConfigError(
            f"--shard_shape {zyx.as_flag(spec.write_shape)} must be a multiple of --block_shape "
            f"{zyx.as_flag(spec.block_shape)}"
        )
    check_output(spec)
    # TensorStore refuses some volumes only when they are created: create one in memory.
    place = f"memory://{uuid.uuid4().hex}"
    try:
        create_output(replace(spec, url=f"{place}/"))
    except VolumeError as error:
        raise VolumeError(str(error).replace(place, spec.url.rstrip("/"))) from None


def _check_scratch_space(task: CopyBlocks, flags: tuple[str, ...]) -> None:
    """Refuse slabs that do not fit on the disk, if it is this machine that copies."""
    if not place_of(beam_options(flags)).is_this_machine:
        return
    scratch = task.shapes.scratch_bytes(task.source.info)
    folder = tempfile.gettempdir()
    if scratch > shutil.disk_usage(folder).free:
        raise ConfigError(
            f"a slab of {task.target.block_shape[0]} slices takes {format_bytes(scratch)}, more "
            f"than {folder} has left. Set TMPDIR to a folder with more space, or choose a "
            "--block_shape that is flatter."
        )
