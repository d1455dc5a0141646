"""The commands on volumes: ``convert``, ``resample``, ``pyramid`` and ``levels``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import ValidationError

from beam_inference.cli.argument_types import natural, number, offset, positive, shape, voxel_size
from beam_inference.cli.command import (
    PipelineOptions,
    Subparsers,
    add_command,
    add_json,
    add_logging,
    set_action,
)
from beam_inference.cli.terminal import print_to_stderr
from beam_inference.config.fields import Json, describe_fault
from beam_inference.errors import COMPLETE, ConfigError
from beam_inference.foreign_text import clean_text
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx

if TYPE_CHECKING:
    from beam_inference.config.volumes import Mask
    from beam_inference.conversion.convert import ConversionPlan
    from beam_inference.conversion.copying import ChunkShapes
    from beam_inference.conversion.options import ConversionOptions, ConversionResult
    from beam_inference.conversion.protocol import SourceInfo
    from beam_inference.launch.count_levels import LevelsPlan
    from beam_inference.pyramid.pyramid import Pyramid


def add(subparsers: Subparsers) -> None:
    """Add the commands."""
    _add_convert(subparsers)
    _add_resample(subparsers)
    _add_levels(subparsers)
    _add_pyramid(subparsers)


@dataclass(frozen=True)
class ConvertOptions(PipelineOptions):
    """Options of ``convert``."""

    source: str
    target: str
    format: str | None
    dataset: str | None
    scale: int
    block_shape: Zyx | None
    shard_shape: Zyx | None
    encoding: str | None
    labels: bool
    voxel_size: VoxelSizeNm | None
    offset: Zyx | None
    drop: list[str]
    pad: bool
    overwrite: bool
    json: bool


def _add_source_and_target(parser: argparse.ArgumentParser) -> None:
    """Add what all commands take that write a volume made of another."""
    parser.add_argument(
        "source",
        metavar="IN",
        help="a file, a folder or a quoted glob of slices, or a volume; a path or URL",
    )
    parser.add_argument(
        "target",
        metavar="OUT",
        help="a path or URL; a single file if its name ends with .tif, .h5, …",
    )
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="format of OUT (default: by its name, else precomputed)",
    )
    parser.add_argument(
        "--scale",
        type=natural,
        default=0,
        metavar="N",
        help="scale of IN, if it has several (default: 0)",
    )
    parser.add_argument(
        "--block_shape",
        "--block-shape",
        type=shape,
        metavar="Z,Y,X",
        help="shape of blocks (default: about 64³)",
    )
    parser.add_argument(
        "--shard_shape",
        "--shard-shape",
        type=shape,
        metavar="Z,Y,X",
        help="shape of shards: files of many blocks",
    )
    parser.add_argument(
        "--encoding", metavar="NAME", help="encoding of precomputed blocks: raw, png, jpeg, …"
    )
    parser.add_argument(
        "--drop",
        action="append",
        default=[],
        metavar="WHAT",
        help="what OUT may lose: offset, voxel-size, or both with a comma; repeated ones add up",
    )
    parser.add_argument(
        "--pad",
        action="store_true",
        help="put zeros before IN, where OUT can only begin at voxel 0",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the volume that is at OUT, and do every chunk again",
    )
    add_json(parser)


def _add_convert(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "convert",
        "convert a volume from one format into another",
        "'slices/*.png' em --voxel-size 40,4,4",
        "gs://bucket/em em.h5:raw --scale 2",
        "gs://bucket/em.nii gs://bucket/em",
        description=(
            "Convert a volume: stacks of slices, TIFF, HDF5, NIfTI, NRRD, MRC, npy, precomputed, "
            "zarr, N5; from CZI, LIF, ND2, IMS, DICOM and whole slides, too. Volumes of blocks are "
            "written by a Beam job, whose flags may follow. Given "
            "again, the command continues a conversion that was interrupted."
        ),
    )
    _add_source_and_target(parser)
    parser.add_argument("--dataset", metavar="NAME", help="volume in IN, if it holds several")
    parser.add_argument(
        "--labels",
        action="store_true",
        help="the values are object ids: a precomputed OUT is marked as a segmentation",
    )
    parser.add_argument(
        "--voxel-size",
        "--voxel_size",
        type=voxel_size,
        metavar="Z,Y,X",
        help="voxel size in nm, instead of what IN says",
    )
    parser.add_argument(
        "--offset",
        type=offset,
        metavar="Z,Y,X",
        help="position of the first voxel; write --offset=-1,0,0",
    )
    add_logging(parser)
    set_action(parser, ConvertOptions, convert, takes_beam_flags=True)


def convert(options: ConvertOptions) -> int:
    """Convert a volume from one format into another."""
    return _run_conversion(options, conversion_plan)


def conversion_plan(options: ConvertOptions) -> ConversionPlan:
    """Open the volume, and check its conversion; nothing is written."""
    from beam_inference.conversion.convert import plan_conversion

    conversion = replace(
        _shared_options(options),
        dataset=options.dataset,
        labels=options.labels,
        voxel_size_nm=options.voxel_size,
        offset=options.offset,
    )
    return plan_conversion(options.source, options.target, conversion)


@dataclass(frozen=True)
class ResampleOptions(PipelineOptions):
    """Options of ``resample``."""

    source: str
    target: str
    voxel_size: VoxelSizeNm | None
    like: str | None
    like_scale: int
    order: Literal[0, 1, 3]
    separate_z: str
    postprocess: str
    format: str | None
    scale: int
    block_shape: Zyx | None
    shard_shape: Zyx | None
    encoding: str | None
    drop: list[str]
    pad: bool
    overwrite: bool
    json: bool


def _add_resample(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "resample",
        "make a volume of another voxel size",
        "logits labels --like em --postprocess '[{operator: argmax}]'",
        "em em_8nm --voxel_size 8,8,8 --order 3",
        description=(
            "Make a volume of another voxel size, such as predictions on the grid of the volume "
            "that they were made of. Volumes of blocks are written by a Beam job, whose flags may "
            "follow. Given again, the command continues what was interrupted."
        ),
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--voxel_size",
        "--voxel-size",
        type=voxel_size,
        metavar="Z,Y,X",
        help="voxel size of OUT in nm",
    )
    size.add_argument(
        "--like", metavar="VOLUME", help="the volume whose voxels OUT is to have, such as the input"
    )
    parser.add_argument(
        "--like_scale",
        "--like-scale",
        type=natural,
        default=0,
        metavar="N",
        help="scale of that volume (default: 0)",
    )
    parser.add_argument(
        "--order",
        type=int,
        choices=(0, 1, 3),
        default=1,
        help="0: nearest voxel. 1: linear. 3: cubic spline (default: 1)",
    )
    parser.add_argument(
        "--separate_z",
        "--separate-z",
        choices=("false", "true", "auto"),
        default="false",
        help="whether the axis of the longest voxels takes the nearest ones (default: false)",
    )
    parser.add_argument(
        "--postprocess",
        default="[]",
        metavar="LIST",
        help="operators that follow, as in a job file: '[{operator: argmax}]'",
    )
    _add_source_and_target(parser)
    add_logging(parser)
    set_action(parser, ResampleOptions, resample, takes_beam_flags=True)


def resample(options: ResampleOptions) -> int:
    """Make a volume of another voxel size."""
    return _run_conversion(options, resampling_plan)


def resampling_plan(options: ResampleOptions) -> ConversionPlan:
    """Open the volume, and check its resampling; nothing is written."""
    from beam_inference.config.volumes import Resample
    from beam_inference.conversion.convert import plan_conversion
    from beam_inference.conversion.options import ResamplingOptions

    how = Resample(
        voxel_size_nm=options.voxel_size,
        order=options.order,
        separate_z="auto" if options.separate_z == "auto" else options.separate_z == "true",
    )
    resampling = ResamplingOptions(
        how=how,
        like=options.like,
        like_scale=options.like_scale,
        postprocess=options.postprocess,
    )
    conversion = replace(_shared_options(options), resampling=resampling)
    return plan_conversion(options.source, options.target, conversion)


AnyConversion = TypeVar("AnyConversion", ConvertOptions, ResampleOptions)


def _shared_options(options: ConvertOptions | ResampleOptions) -> ConversionOptions:
    """What both commands say about the volume that is read and the one that is made."""
    from beam_inference.conversion.options import ConversionOptions
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment

    return ConversionOptions(
        format=options.format,
        scale=options.scale,
        block_shape=options.block_shape,
        shard_shape=options.shard_shape,
        encoding=options.encoding,
        drop=tuple(word for words in options.drop for word in words.split(",") if word),
        pad=options.pad,
        overwrite=options.overwrite,
        storage=storage_of_environment(LOCAL),
        flags=tuple(options.beam_flags),
    )


def _run_conversion(
    options: AnyConversion, make_plan: Callable[[AnyConversion], ConversionPlan]
) -> int:
    """Check a conversion, print what it does, and do it."""
    from beam_inference.cli.status_text import as_json

    with print_to_stderr() if options.json else nullcontext():
        plan = make_plan(options)
        _print_conversion(plan)
        sys.stdout.flush()
        result = plan.run()
    if options.json:
        print(as_json(_conversion_values(result)))
    elif result.outcome is None:
        print(f"complete: {result.target}")
    else:
        print(result.outcome.summary(result.target, options.command_text))
    return result.exit_code


def _conversion_values(result: ConversionResult) -> Json:
    """The outcome of a conversion as JSON values."""
    from beam_inference.cli.status_text import stage_values

    return {
        **stage_values(result.outcome),
        "output": result.target,
        "format": result.format,
        "bounds": asdict(result.bounds),
    }


def _print_conversion(plan: ConversionPlan) -> None:
    """Print what will be converted into what; notes on the source go to stderr."""
    from beam_inference.conversion.file_conversion import FileConversion
    from beam_inference.conversion.resampled import ResampledSource

    source = plan.source
    info = source.source.info if isinstance(source, ResampledSource) else source.info
    size = "not stated" if info.voxel_size_nm is None else f"{_sizes_text(info.voxel_size_nm)} nm"
    print(
        f"source: {_sizes_text(info.bounds.shape)} voxels (z, y, x) from {info.bounds.start}, "
        f"{info.channels} channel{'' if info.channels == 1 else 's'} of {info.dtype}; voxel "
        f"size {size}; {info.nbytes / 2**20:.1f} MiB"
    )
    if isinstance(source, ResampledSource):
        made = source.info
        channels = "channel" if made.channels == 1 else "channels"
        orders = ", ".join(map(str, source.resampling.orders))
        print(
            f"resampled: {_sizes_text(made.bounds.shape)} voxels from {made.bounds.start}, "
            f"{made.channels} {channels} of {made.dtype}; voxel size "
            f"{_sizes_text(made.voxel_size_nm or ())} nm; splines of the orders {orders} (z, y, x)"
        )
    for note in info.notes:
        print(f"note: {clean_text(note)}", file=sys.stderr)
    if isinstance(plan, FileConversion):
        print(f"target: {plan.path}, {plan.format}")
        _print_memory(plan.shapes, source.info)
        return
    spec = plan.spec
    print(
        f"target: {plan.target}, {spec.format}, blocks of {_sizes_text(spec.block_shape)}, voxels "
        f"{spec.bounds}"
    )
    print(f"chunks: {plan.task.count} of {_sizes_text(plan.task.shapes.chunk)}")
    _print_memory(plan.task.shapes, source.info)


def _print_memory(shapes: ChunkShapes, info: SourceInfo) -> None:
    """Print what copying holds in memory and on the disk, beside what reading and writing take."""
    scratch = shapes.scratch_bytes(info)
    disk = f", {scratch / 2**20:,.1f} MiB in {tempfile.gettempdir()}" if scratch else ""
    print(f"each thread holds {shapes.held_bytes(info) / 2**20:,.1f} MiB of voxels in memory{disk}")


def _sizes_text(values: Sequence[float]) -> str:
    return " × ".join(f"{value:.9g}" for value in values)


@dataclass(frozen=True)
class LevelsOptions(PipelineOptions):
    """Options of ``levels``."""

    volume: Sequence[str]
    to: str
    scale: int
    channel: list[int] | None
    object: bool
    mask: str | None
    mask_scale: int | None
    mask_above: float | None
    mask_below: float | None
    mask_equals: list[float] | None
    mask_inverse: bool
    overwrite: bool
    json: bool

    def mask_section(self) -> Mask | None:
        """The mask, as a job file has it.

        Raises:
            ConfigError: what is said of it does not fit together, or of none.
        """
        from beam_inference.config.volumes import Mask  # slow, and --help needs none

        keys = ("scale", "above", "below", "equals", "inverse")
        given = {key: getattr(self, f"mask_{key}") for key in keys}
        # by identity: 0 equals False, and is a value that a mask is above or below
        given = {
            key: value for key, value in given.items() if value is not None and value is not False
        }
        if self.mask is None:
            if given:
                raise ConfigError(f"--mask-{next(iter(given))} is of a mask: give --mask, too")
            return None
        try:
            return Mask(path=self.mask, **given)
        except ValidationError as error:
            raise ConfigError(f"--mask: {describe_fault(error)}") from None


def _add_levels(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "levels",
        "count a volume's values, for normalizing by them",
        "gs://bucket/em --to levels.json",
        description=(
            "Count a volume's values, overall and in each section along z, and write quantiles, "
            "mean and standard deviation to a file. A job normalizes by it with model.normalize: "
            "{levels: FILE}. Any flag of Apache Beam may follow."
        ),
    )
    parser.add_argument(
        "volume",
        nargs="+",
        metavar="VOLUME",
        help="a path or URL; of several of the same voxels the channels are counted together",
    )
    parser.add_argument(
        "--to", required=True, metavar="FILE.JSON", help="the file to write, a path or URL"
    )
    parser.add_argument(
        "--scale", type=int, default=0, metavar="N", help="scale of the volume (default: 0)"
    )
    parser.add_argument(
        "--channel", type=int, action="append", metavar="C", help="only this channel; repeatable"
    )
    parser.add_argument(
        "--object",
        action="store_true",
        help="also count the inside of the object alone, for of: object",
    )
    parser.add_argument(
        "--mask",
        metavar="MASK",
        help=(
            "count only where this volume, of one channel and any voxel size, is not zero, or as "
            "the following flags say; a section of which nothing is kept has the levels of the "
            "whole"
        ),
    )
    parser.add_argument(
        "--mask-scale",
        "--mask_scale",
        type=natural,
        metavar="N",
        help="scale of the mask (default: 0)",
    )
    parser.add_argument(
        "--mask-above",
        "--mask_above",
        type=number,
        metavar="V",
        help="where the mask is larger than this",
    )
    parser.add_argument(
        "--mask-below",
        "--mask_below",
        type=number,
        metavar="V",
        help="where the mask is smaller than this",
    )
    parser.add_argument(
        "--mask-equals",
        "--mask_equals",
        type=number,
        action="append",
        metavar="V",
        help="where the mask has this value; repeatable",
    )
    parser.add_argument(
        "--mask-inverse", "--mask_inverse", action="store_true", help="everywhere else, instead"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="count again, after the volume was changed"
    )
    add_json(parser)
    add_logging(parser)
    set_action(parser, LevelsOptions, levels, takes_beam_flags=True)


def levels(options: LevelsOptions) -> int:
    """Count a volume's values, and write the levels that jobs normalize by."""
    from beam_inference.cli.status_text import as_json, stage_values
    from beam_inference.launch.count_levels import count_levels
    from beam_inference.volumes.kvstores import url_of

    volume, *beside = options.volume
    if beside and options.channel is not None:
        raise ConfigError("--channel is of one volume: count the channels of all, or one by one")
    with print_to_stderr() if options.json else nullcontext():
        outcome = count_levels(
            volume,
            options.to,
            scale=options.scale,
            channel=options.channel,
            flags=options.beam_flags,
            overwrite=options.overwrite,
            beside=beside,
            finds_object=options.object,
            mask=options.mask_section(),
        )
    target = url_of(options.to)
    if options.json:
        print(as_json({**stage_values(outcome), "output": target}))
    else:
        print(outcome.summary(target, options.command_to_continue))
    return outcome.exit_code


def levels_plan(options: LevelsOptions) -> LevelsPlan:
    """Open the volumes whose values are counted; nothing is written."""
    from beam_inference.launch.count_levels import plan_levels
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment

    volume, *beside = options.volume
    return plan_levels(
        volume,
        options.to,
        scale=options.scale,
        channel=options.channel,
        storage=storage_of_environment(LOCAL),
        beside=beside,
        finds_object=options.object,
        mask=options.mask_section(),
    )


@dataclass(frozen=True)
class PyramidOptions(PipelineOptions):
    """Options of ``pyramid``; ``levels`` is the number of coarser scales."""

    volume: str
    method: Literal["mean", "mode"] | None
    factor: Zyx | None
    levels: int | None
    scale: int
    dry_run: bool
    json: bool
    overwrite: bool


def _add_pyramid(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "pyramid",
        "make coarser scales of a volume",
        "gs://bucket/em --dry-run",
        "segmentation --method=mode --factor=1x2x2 --levels=3",
        description=(
            "Make coarser scales of a volume, or those that are missing. Any flag of Apache Beam "
            "may follow."
        ),
    )
    parser.add_argument(
        "volume", metavar="VOLUME", help="a precomputed volume or OME-Zarr group, a path or URL"
    )
    parser.add_argument(
        "--method",
        choices=("mean", "mode"),
        help=(
            "mean for images and maps, mode for labels (default: mode if the volume says it is a "
            "segmentation)"
        ),
    )
    parser.add_argument(
        "--factor",
        type=shape,
        metavar="ZxYxX",
        help="from each scale to the next (default: such as 1x2x2 until isotropic, then 2x2x2)",
    )
    parser.add_argument(
        "--num-scales",
        "--num_scales",
        "--levels",
        dest="levels",
        type=positive,
        metavar="N",
        help="number of coarser scales (default: until one block holds the volume)",
    )
    parser.add_argument(
        "--scale",
        type=natural,
        default=0,
        metavar="N",
        help="scale that they are made from (default: 0, the finest)",
    )
    parser.add_argument(
        "--dry-run",
        "--dry_run",
        action="store_true",
        help="show what would be made; write nothing",
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove existing coarser scales first"
    )
    add_logging(parser)
    set_action(parser, PyramidOptions, pyramid, takes_beam_flags=True)


def pyramid(options: PyramidOptions) -> int:
    """Make coarser scales of a volume."""
    from beam_inference.beam.stage_runner import check_place
    from beam_inference.cli.plan_text import print_pyramid
    from beam_inference.config.storage import check_writable
    from beam_inference.pyramid.pyramid import run_pyramid
    from beam_inference.volumes.kvstores import url_of

    if options.json and not options.dry_run:
        raise ConfigError("--json shows what would be made: give it with --dry-run")
    url = url_of(options.volume)
    check_place(options.beam_flags, [url])
    check_writable(url)  # coarser scales are written beside their volume
    plan = pyramid_plan(options)
    print_pyramid(plan, as_json=options.json)
    if options.dry_run:
        return COMPLETE
    sys.stdout.flush()
    outcome = run_pyramid(plan, options.beam_flags, overwrite=options.overwrite).outcome
    print(outcome.summary(f"{url}, with {len(plan.scales)} more scales", options.command_text))
    return outcome.exit_code


def pyramid_plan(options: PyramidOptions) -> Pyramid:
    """Open the volume, and plan its coarser scales; nothing is written."""
    from beam_inference.pyramid.multiscale import multiscale_volume
    from beam_inference.pyramid.pyramid import plan_pyramid
    from beam_inference.volumes.kvstores import LOCAL, storage_of_environment, url_of

    volume = multiscale_volume(url_of(options.volume), storage_of_environment(LOCAL), options.scale)
    return plan_pyramid(volume, options.method, options.factor, options.levels)
