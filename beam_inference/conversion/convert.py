"""Conversion of volumes from one format into another.

Volumes of blocks are written by a Beam job, chunk by chunk, which continues where it was killed;
single files by this process alone. Everything is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from beam_inference.config.fields import meant_hint
from beam_inference.config.formats import installed_formats
from beam_inference.config.storage import Storage, check_url
from beam_inference.conversion.block_conversion import BlockConversion, plan_block_conversion
from beam_inference.conversion.copying import WINDOW_BYTES
from beam_inference.conversion.file_conversion import FileConversion, plan_file_conversion
from beam_inference.conversion.find_source import StoredVolume, find_source, split_dataset
from beam_inference.conversion.named_files import path_errors
from beam_inference.conversion.options import ConversionOptions, ConversionResult
from beam_inference.conversion.resampled import resample_source
from beam_inference.conversion.targets import FILE_FORMATS, format_of
from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.job.unfinished import warn_if_unfinished
from beam_inference.volumes.kvstores import LOCAL, is_within, place_of_url, url_of

ConversionPlan: TypeAlias = BlockConversion | FileConversion

_DROPPABLE = {"offset", "voxel-size"}


def convert(
    source: str,
    target: str,
    *,
    format: str | None = None,
    dataset: str | None = None,
    scale: int = 0,
    block_shape: Zyx | None = None,
    shard_shape: Zyx | None = None,
    encoding: str | None = None,
    labels: bool = False,
    voxel_size_nm: VoxelSizeNm | None = None,
    offset: Zyx | None = None,
    drop: Sequence[str] = (),
    pad: bool = False,
    overwrite: bool = False,
    storage: Storage = LOCAL,
    flags: Sequence[str] = (),
    window_bytes: int = WINDOW_BYTES,
) -> ConversionResult:
    """Convert a volume. Called again, it continues a conversion that was interrupted.

    Args:
        source: path, glob of slices, or URL; a dataset may stand behind it as ``file.h5:name``.
        target: path or URL; a single file if its name ends with ".tif", ".h5" and so on.
        format: format of the target; None: by its name, else precomputed.
        dataset: name of the dataset in a source with several.
        scale: number of the scale in a source with several; 0 is the finest.
        block_shape: ZYX, for volumes of blocks; None: by voxel size and depth.
        shard_shape: ZYX, a multiple of ``block_shape``, for formats that have shards.
        encoding: encoding of precomputed blocks; None: raw.
        labels: whether values are names of objects.
        voxel_size_nm: ZYX, instead of what the source states.
        offset: coordinates of the first voxel, ZYX, instead of what the source states.
        drop: what of the source may be lost: "offset", "voxel-size".
        pad: whether a target without offset begins at voxel 0, with zeros before the source.
        overwrite: whether to replace an existing target.
        storage: how object stores are reached.
        flags: Beam's flags, for volumes of blocks.
        window_bytes: bytes of the source that a thread holds at a time.

    Returns:
        The target, and how far it is: chunks may have failed.

    Raises:
        UserError: the volume cannot be converted so; nothing was written.
    """
    options = ConversionOptions(
        format=format,
        dataset=dataset,
        scale=scale,
        block_shape=block_shape,
        shard_shape=shard_shape,
        encoding=encoding,
        labels=labels,
        voxel_size_nm=voxel_size_nm,
        offset=offset,
        drop=tuple(drop),
        pad=pad,
        overwrite=overwrite,
        storage=storage,
        flags=tuple(flags),
        window_bytes=window_bytes,
    )
    return plan_conversion(source, target, options).run()


def plan_conversion(source: str, target: str, options: ConversionOptions) -> ConversionPlan:
    """Find the source and check the conversion; nothing is written before the plan is run.

    Args:
        source: path, glob of slices, or URL; a dataset may stand behind it as ``file.h5:name``.
        target: path or URL.
        options: what else the user chose.

    Raises:
        UserError: the volume cannot be converted so.
    """
    like = None if options.resampling is None else options.resampling.like
    for url in (source, target, *([] if like is None else [like])):
        check_url(url)
    if not set(options.drop) <= _DROPPABLE:
        raise ConfigError(f"--drop {','.join(options.drop)}: expected offset, voxel-size, or both")
    if like is not None:
        _check_stays(like, target, options.storage)
    volume = find_source(source, options.dataset, options.scale, options.storage)
    if isinstance(volume, StoredVolume):
        volume = replace(volume, making=warn_if_unfinished(volume.url, options.storage))
    gives_labels = False
    if options.resampling is not None:
        volume = resample_source(volume, source, options.resampling, options.storage)
        gives_labels = volume.gives_labels
        share = volume.info.itemsize / volume.bytes_per_voxel
        options = replace(options, window_bytes=max(1, int(options.window_bytes * share)))
    box = volume.info.bounds
    if not box.size:
        raise ConfigError(f"{source} has no voxels")
    if options.offset is not None:
        box = BoundingBox(options.offset, zyx.add(options.offset, box.shape))
    with path_errors(target):
        format = options.format or _default_format(target)
        if format in FILE_FORMATS:
            return plan_file_conversion(volume, source, target, box, format, options)
        block_formats = [block_format.name for block_format in installed_formats()]
        if format in block_formats:
            options = replace(options, labels=options.labels or gives_labels)
            return plan_block_conversion(volume, source, target, box, format, options)
    known = [*block_formats, *FILE_FORMATS]
    raise ConfigError(
        f"--format {format}: expected one of {', '.join(known)}{meant_hint(format, known)}"
    )


def is_single_file(target: str, format: str | None) -> bool:
    """Whether a conversion writes a single file, or a folder of slices, not a volume of blocks."""
    return (format or _default_format(target)) in FILE_FORMATS


def _check_stays(like: str, target: str, storage: Storage) -> None:
    """Refuse a target that is what ``--like`` names, or holds it. Raises ConfigError."""
    like_place, place = (place_of_url(url_of(path), storage) for path in (like, target))
    if is_within(like_place, place):
        raise ConfigError(
            f"{target} is, or holds, the volume that --like names, which is to stay: choose "
            "another place"
        )


def _default_format(target: str) -> str:
    """The format that the target's name stands for."""
    path, _ = split_dataset(target)
    file_format = format_of(path)
    if file_format is not None:
        return file_format
    suffix = Path(path).suffix
    matching = [format.name for format in installed_formats() if suffix in format.suffixes]
    return matching[-1] if matching else "precomputed"
