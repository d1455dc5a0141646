"""Convert a volume from one format into another: what is asked for is checked whole, told, and done.

Into volumes of blocks as a Beam job, chunk by chunk, which goes on where it was killed; into single
files by this process alone.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.beam.flags import beam_options, place_of
from beam_inference.beam.progress import Phase, Progress
from beam_inference.beam.stage_runner import (
    StageRecords,
    check_place,
    run_stages,
    stage_job,
)
from beam_inference.config.fields import refuse_credentials
from beam_inference.config.formats import (
    OutputSpec,
    get_format,
    installed_formats,
    names_of,
    sharded_formats,
)
from beam_inference.config.storage import Storage
from beam_inference.conversion.blocks import CopyBlocks, default_block_shape
from beam_inference.conversion.copying import choose_chunk_shapes, copy, moved
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.find_source import StoredVolume, find_source, split_dataset
from beam_inference.conversion.protocol import Source, SourceInfo
from beam_inference.conversion.targets import (
    FILE_FORMATS,
    check_file_can_hold,
    fill_file,
    format_of,
    grain_of,
)
from beam_inference.errors import COMPLETE, ConfigError, StateError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.volumes.kvstores import local_folder, place_of_url, url_of
from beam_inference.volumes.outputs import check_output, create_output, default_bounds, open_output

_NO_VOXEL_SIZE = "the source does not state its voxel size: give --voxel-size Z,Y,X, in nm"


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for.

    Attributes:
        source, target: paths or URLs.
        format: of the target; None: as its name says, else precomputed.
        dataset: in a source with several.
        scale: of a source with several, 0 the finest.
        block_shape: ZYX, of a volume of blocks; None: by voxel size and depth.
        shard_shape: ZYX, a multiple of it, for formats that have shards.
        encoding: of precomputed blocks; None: raw.
        labels: whether values are names of objects.
        voxel_size_nm, offset: ZYX, instead of what the source says.
        drop: "offset", "voxel-size": what may be lost.
        overwrite: whether to replace what is there.
        storage: how object stores are reached.
    """

    source: str
    target: str
    format: str | None
    dataset: str | None
    scale: int
    block_shape: Zyx | None
    shard_shape: Zyx | None
    encoding: str | None
    labels: bool
    voxel_size_nm: VoxelSizeNm | None
    offset: Zyx | None
    drop: tuple[str, ...]
    overwrite: bool
    storage: Storage


def convert(request: Request, flags: Sequence[str], again: str) -> int:
    """Convert, and say what came of it; the exit code. ``flags`` are Beam's, ``again`` is the command that goes on.

    Raises:
        UserError: it cannot be done as asked; nothing is written then.
    """
    for url in (request.source, request.target):
        try:
            refuse_credentials(url)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if not set(request.drop) <= {"offset", "voxel-size"}:
        raise ConfigError(f"--drop {','.join(request.drop)}: expected offset, voxel-size, or both")
    source = find_source(request.source, request.dataset, request.scale, request.storage)
    info = source.info
    print(f"source: {_told(info)}")
    for note in info.notes:
        print(f"note: {note}", file=sys.stderr)
    if not info.bounds.size:
        raise ConfigError(f"{request.source} has no voxels")
    box = (
        info.bounds
        if request.offset is None
        else BoundingBox(request.offset, _stop(request.offset, info))
    )
    path, dataset = split_dataset(request.target)
    block_formats = {each.name: each for each in installed_formats()}
    by_suffix = {suffix: each.name for each in block_formats.values() for suffix in each.suffixes}
    format = request.format or format_of(path) or by_suffix.get(Path(path).suffix, "precomputed")
    if format not in (*block_formats, *FILE_FORMATS):
        raise ConfigError(
            f"--format {format}: expected one of {', '.join((*block_formats, *FILE_FORMATS))}"
        )
    if format in FILE_FORMATS:
        if flags:
            raise ConfigError(
                f"a single file is written by this process alone: {' '.join(flags)} would change "
                "nothing"
            )
        return _into_file(request, source, box, format, path, dataset)
    return _into_blocks(request, source, box, format, flags, again)


def _into_file(
    request: Request, source: Source, box: BoundingBox, format: str, path: str, dataset: str | None
) -> int:
    path = _local_target(path, format)
    if request.block_shape or request.shard_shape or request.encoding or request.labels:
        raise ConfigError(
            f"format {format} has no blocks: --block_shape and the like are for others"
        )
    size = request.voxel_size_nm or source.info.voxel_size_nm
    if size is None and FILE_FORMATS[format].voxel_size and "voxel-size" not in request.drop:
        raise ConfigError(_NO_VOXEL_SIZE + ", or --drop voxel-size to write it without")
    spec = FileSpec(box, source.info.channels, source.info.dtype, size)
    check_file_can_hold(path, format, spec, request.drop)
    _check_replaceable(request, path, format)
    print(f"target: {path}, {format}")
    shapes = choose_chunk_shapes(source.info, grain_of(format))
    chunks = ChunkGrid(box, shapes.chunk)
    back = _difference(source.info.bounds.start, box.start)
    read = source.open()
    done = 0
    with fill_file(path, format, spec, dataset) as target:
        total = chunks.count + target.steps
        with Progress(Phase("chunks", total, box.size / total, lambda: done)) as progress:
            for index in range(chunks.count):
                copy(
                    lambda part: read(moved(part, back)),
                    target.put,
                    chunks.core_box(index),
                    shapes,
                    source.info,
                )
                done += 1
                progress.update()
            for _ in target.finish():
                done += 1
                progress.update()
    print(f"complete: {path}")
    return COMPLETE


def _into_blocks(
    request: Request,
    source: Source,
    box: BoundingBox,
    format: str,
    flags: Sequence[str],
    again: str,
) -> int:
    info = source.info
    if request.drop:
        raise ConfigError(f"--drop {','.join(request.drop)}: format {format} holds all there is")
    size = request.voxel_size_nm or info.voxel_size_nm
    if size is None:
        raise ConfigError(_NO_VOXEL_SIZE)
    if re.match("https?://", request.target):
        raise ConfigError(
            f"{request.target}: http(s):// can only be read from; write to a local folder, gs:// "
            "or s3://"
        )
    url = url_of(request.target)
    check_place(
        flags, [source.url if isinstance(source, StoredVolume) else url_of(request.source), url]
    )
    if isinstance(source, StoredVolume) and source.place == place_of_url(url, request.storage):
        raise ConfigError(
            f"{request.target} is the source: choose another place, so as not to overwrite it"
        )
    spec = _output(request, info, box, format, url, size)
    task = CopyBlocks(source, spec, box)
    scratch = task.shapes.scratch_bytes(info)
    folder = tempfile.gettempdir()
    if place_of(beam_options(flags)).is_this_machine and scratch > shutil.disk_usage(folder).free:
        raise ConfigError(
            f"a slab of {spec.block_shape[0]} slices takes {scratch / 2**30:.1f} GiB, more than "
            f"{folder} has left. Set TMPDIR to a folder with more space, or choose a "
            "--block_shape that is flatter."
        )
    print(
        f"target: {request.target}, {format}, blocks of {_shape(spec.block_shape)}, voxels "
        f"{spec.bounds}"
    )
    print(f"chunks: {task.count} of {_shape(task.shapes.chunk)}")
    exists = open_output(spec) is not None
    description = {
        "source": source.identity,
        "target": _recorded(spec),
        "start": box.start,
        "chunk": task.shapes.chunk,
    }
    job = stage_job("convert", description, url, request.storage, [task])
    if exists and not request.overwrite and not StageRecords(job).has_begun():
        raise StateError(
            f"{request.target} holds a volume that this conversion did not begin: choose another "
            "place, or pass --overwrite to write over it"
        )
    StageRecords(job).begin(overwrite=request.overwrite)
    if not exists:
        create_output(spec)
    outcome = run_stages(job, flags, box.size / task.count)
    print(outcome.summary(request.target, again))
    return outcome.exit_code


def _output(
    request: Request, info: SourceInfo, box: BoundingBox, format: str, url: str, size: VoxelSizeNm
) -> OutputSpec:
    """The volume to be; what it cannot be is refused."""
    try:
        bounds = default_bounds(format, box)
    except ConfigError:
        raise ConfigError(
            f"{format} volumes start at 0, and these voxels at {box.start} (z, y, x). Move them "
            "with --offset 0,0,0, or write --format precomputed, which has an offset."
        ) from None
    spec = OutputSpec(
        url=url,
        format=format,
        dtype=info.dtype,
        channels=info.channels,
        bounds=bounds,
        block_shape=request.block_shape or default_block_shape(box.shape, size),
        voxel_size_nm=size,
        storage=request.storage,
        encoding=request.encoding or "raw",
        shard_shape=request.shard_shape,
        labels=request.labels,
    )
    if request.encoding is not None and not get_format(format).encodings:
        takers = names_of(each for each in installed_formats() if each.encodings)
        raise ConfigError(f"--encoding {request.encoding} is for --format {takers}")
    if spec.encoding != "raw" and info.channels > 1:
        raise ConfigError(
            f"--encoding {spec.encoding} is for one channel (readers disagree about the order of "
            f"more), and {request.source} has {info.channels}"
        )
    if spec.labels and np.dtype(info.dtype).kind == "f":
        raise ConfigError(
            f"--labels: {request.source} holds {info.dtype}, and names of objects are integers"
        )
    if spec.shard_shape is not None and not get_format(format).has_shards:
        raise ConfigError(f"--shard_shape: {format} has no shards; {sharded_formats()} have")
    if any(s % b for s, b in zip(spec.write_shape, spec.block_shape, strict=True)):
        raise ConfigError(
            f"--shard_shape {_shape(spec.write_shape)} must be a multiple of --block_shape "
            f"{_shape(spec.block_shape)}"
        )
    check_output(spec)
    # in vain: to hear of what cannot be created
    create_output(replace(spec, url=f"memory://{uuid.uuid4().hex}/"))
    return spec


def _recorded(spec: OutputSpec) -> dict[str, Any]:
    """What of a target determines its bytes: not how it is reached."""
    values = asdict(spec)
    del values["storage"], values["url"]
    return values


def _check_replaceable(request: Request, path: str, format: str) -> None:
    """Refuse a target that is there and may not be replaced."""
    target = Path(path)
    source = Path(split_dataset(request.source)[0])
    if not target.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {target.parent}")
    if not target.exists():
        return
    if source.exists() and target.samefile(source):
        raise ConfigError(f"{path} is the source: choose another place, so as not to overwrite it")
    if not request.overwrite:
        raise StateError(f"{path} exists: choose another name, or pass --overwrite to replace it")
    others = (
        [each.name for each in target.iterdir() if each.suffix != ".png"] if target.is_dir() else []
    )
    if target.is_dir() and (format != "png" or others):
        raise StateError(
            f"{path} is a folder{f' that holds {others[0]}' if others else ''}: it is not replaced"
        )


def _local_target(path: str, format: str) -> str:
    local = local_folder(path)
    if local is None and "://" in path:
        raise ConfigError(
            f"{path}: format {format} is written to this machine's disks only; copy it from there"
        )
    return str(Path(local or path).absolute())


def _told(info: SourceInfo) -> str:
    size = "not stated" if info.voxel_size_nm is None else f"{_shape(info.voxel_size_nm)} nm"
    return (
        f"{_shape(info.bounds.shape)} voxels (z, y, x) from {info.bounds.start}, "
        f"{info.channels} channel{'' if info.channels == 1 else 's'} of {info.dtype}; voxel "
        f"size {size}; {info.bounds.size * info.itemsize / 2**20:.1f} MiB"
    )


def _shape(values: Sequence[float]) -> str:
    return " × ".join(f"{each:.9g}" for each in values)


def _stop(offset: Zyx, info: SourceInfo) -> Zyx:
    z, y, x = info.bounds.shape
    return (offset[0] + z, offset[1] + y, offset[2] + x)


def _difference(a: Zyx, b: Zyx) -> Zyx:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])
