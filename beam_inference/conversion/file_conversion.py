"""Conversion into a single file, or a folder of PNG slices, by this process alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from beam_inference.beam.progress import Phase, Progress
from beam_inference.conversion.copying import ChunkShapes, choose_chunk_shapes, copy
from beam_inference.conversion.file_spec import FileSpec
from beam_inference.conversion.find_source import split_dataset
from beam_inference.conversion.hdf5 import DEFAULT_DATASET, dataset_names
from beam_inference.conversion.options import (
    NO_VOXEL_SIZE,
    ConversionOptions,
    ConversionResult,
)
from beam_inference.conversion.process_apart import run_apart
from beam_inference.conversion.protocol import Source, Voxels
from beam_inference.conversion.targets import FILE_FORMATS, check_file_can_hold, fill_file
from beam_inference.errors import ConfigError, PermanentReadError, StateError, VolumeError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.volumes.kvstores import local_folder

_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class FileConversion:
    """A conversion into a single file, checked and ready to run.

    Attributes:
        source: the volume to read.
        source_path: its path, for messages.
        path: absolute path of the target.
        format: a key of :data:`~beam_inference.conversion.targets.FILE_FORMATS`.
        spec: the volume that the file is to hold.
        dataset: name of the dataset in an HDF5 file; None for its default.
        window_bytes: bytes of the source that are held at a time.
        overwrite: whether a file may be replaced that is there.
    """

    source: Source
    source_path: str
    path: str
    format: str
    spec: FileSpec
    dataset: str | None
    window_bytes: int
    overwrite: bool

    @property
    def shapes(self) -> ChunkShapes:
        """The shapes of chunks and windows."""
        grain = FILE_FORMATS[self.format].grain
        return choose_chunk_shapes(self.source.info, grain, self.window_bytes)

    def run(self) -> ConversionResult:
        """Write the file; an existing one is replaced once the new one is complete."""
        info = self.source.info
        shapes = self.shapes
        chunks = ChunkGrid(self.spec.bounds, shapes.chunk)
        to_source = zyx.subtract(info.bounds.start, self.spec.bounds.start)
        read = self.source.open()
        done = 0

        def read_for_target(box: BoundingBox) -> Voxels:
            try:
                return read(box.translate(to_source))
            except OSError as error:  # or the target would be blamed
                raise PermanentReadError(f"cannot read {self.source_path}: {error}") from None

        with fill_file(self.path, self.format, self.spec, self.dataset) as target:
            _check_absent(Path(self.path), overwrite=self.overwrite)  # since it was planned
            total = chunks.count + target.steps
            voxels_per_step = self.spec.bounds.size / total
            with Progress(Phase("chunks", total, voxels_per_step, lambda: done)) as progress:
                for index in range(chunks.count):
                    box = chunks.core_box(index)
                    copy(read_for_target, target.put, box, shapes, info, self.window_bytes)
                    done += 1
                    progress.update()
                for _ in target.finish():
                    done += 1
                    progress.update()
        return ConversionResult(self.path, self.format, self.spec.bounds, outcome=None)


def plan_file_conversion(
    source: Source,
    source_path: str,
    target: str,
    box: BoundingBox,
    format: str,
    options: ConversionOptions,
) -> FileConversion:
    """Check a conversion into a single file; nothing is written.

    Args:
        source: the volume to read.
        source_path: its path as the user gave it.
        target: path of the file; a dataset may stand behind it as ``file.h5:name``.
        box: the voxels' box in the target, ZYX.
        format: a key of :data:`~beam_inference.conversion.targets.FILE_FORMATS`.
        options: what else the user chose.

    Raises:
        UserError: it cannot be done.
    """
    if options.flags:
        raise ConfigError(
            f"a single file is written by this process alone: {' '.join(options.flags)} would "
            "change nothing"
        )
    if options.pad:
        raise ConfigError(
            f"--pad: format {format} is never padded. Where it cannot state an offset, --drop "
            "offset accepts that"
        )
    path, dataset = split_dataset(target)
    if dataset is not None:
        _check_dataset_name(dataset, target)
    path = _local_path(path, format)
    if options.block_shape or options.shard_shape or options.encoding or options.labels:
        raise ConfigError(
            f"format {format} has no blocks: --block_shape and the like are for others"
        )
    info = source.info
    voxel_size_nm = options.voxel_size_nm or info.voxel_size_nm
    needs_voxel_size = FILE_FORMATS[format].has_voxel_size and "voxel-size" not in options.drop
    if voxel_size_nm is None and needs_voxel_size:
        raise ConfigError(NO_VOXEL_SIZE + ", or --drop voxel-size to write it without")
    spec = FileSpec(box, info.channels, info.dtype, voxel_size_nm)
    check_file_can_hold(path, format, spec, options.drop)
    _check_replaceable(Path(path), source, source_path, format, overwrite=options.overwrite)
    if format == "hdf5" and Path(path).exists():
        _check_no_other_datasets(path, dataset or DEFAULT_DATASET)
    return FileConversion(
        source, source_path, path, format, spec, dataset, options.window_bytes, options.overwrite
    )


def _check_dataset_name(name: str, target: str) -> None:
    """Refuse a name under which no dataset could be made, or found again. Raises ConfigError."""
    if {"", ".", ".."}.intersection(name.removeprefix("/").split("/")):
        raise ConfigError(
            f"{target}: {name} is no name of a dataset: write words with / between them, such as "
            "volumes/raw"
        )


def _local_path(path: str, format: str) -> str:
    local = local_folder(path)
    if local is None and "://" in path:
        raise ConfigError(
            f"{path}: format {format} is written to this machine's disks only; copy it from there"
        )
    return str(Path(local or path).absolute())


def _check_replaceable(
    target: Path, source: Source, source_path: str, format: str, *, overwrite: bool
) -> None:
    """Refuse a target that exists and may not be replaced.

    Raises:
        ConfigError: its folder does not exist, or it is the source, or a part of it.
        StateError: it may not be replaced.
    """
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no folder {target.parent}")
    if not target.exists():
        return
    for file in (split_dataset(source_path)[0], *source.files):
        if isinstance(file, str) and _holds_file(target, Path(file)):
            raise ConfigError(
                f"{target} would be overwritten, and {file} of the source with it: choose another "
                "place"
            )
    _check_absent(target, overwrite=overwrite)
    if target.is_dir():
        others = [
            entry.name
            for entry in sorted(target.iterdir())
            if entry.suffix != ".png" or not entry.is_file()
        ]
        if format != "png" or others:
            content = f" that holds {others[0]}" if others else ""
            raise StateError(f"{target} is a folder{content}: it is not replaced")


def _holds_file(target: Path, file: Path) -> bool:
    """Whether a file or folder is another one, or has it within."""
    if not file.exists():
        return False
    return target.samefile(file) or file.resolve().is_relative_to(target.resolve())


def _check_absent(target: Path, *, overwrite: bool) -> None:
    """Refuse a target that exists, unless it may be replaced. Raises StateError."""
    if target.exists() and not overwrite:
        raise StateError(f"{target} exists: choose another name, or pass --overwrite to replace it")


def _check_no_other_datasets(path: str, name: str) -> None:
    """Refuse to replace an HDF5 file that holds more than the dataset to be replaced.

    Raises:
        StateError: it does.
    """
    try:
        run_apart(path, dataset_names.__module__, dataset_names.__name__, path)
        others = sorted(set(dataset_names(path)) - {name.strip("/")})
    except VolumeError:
        return  # what cannot be read as HDF5 is replaced like any file
    if others:
        raise StateError(
            f"{path} holds {', '.join(others[:_NAMES_IN_MESSAGE])} beside {name}, and --overwrite "
            "would replace the whole file. Choose another file, or remove it yourself."
        )
