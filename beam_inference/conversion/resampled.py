"""A source at another voxel size, such as predictions on the grid of what they are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from pydantic import TypeAdapter, ValidationError

from beam_inference.arrays import AnyDtype
from beam_inference.config.fields import LABEL_DTYPES, Json, describe_fault
from beam_inference.config.operators import (
    ArrayPlace,
    InstalledOperator,
    Operator,
    channels_after,
    gives_labels,
    largest_label,
    operator_bytes,
    total_halo,
)
from beam_inference.config.storage import Storage
from beam_inference.config.yaml_text import parse_yaml
from beam_inference.conversion.find_source import find_source
from beam_inference.conversion.options import ResamplingOptions
from beam_inference.conversion.protocol import FREE, Read, Source, SourceInfo, Voxels
from beam_inference.conversion.stored_files import StoredFile
from beam_inference.errors import ConfigError
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import fill_outside, source_box
from beam_inference.geometry.origin import FARTHEST, Origin
from beam_inference.geometry.resampling import Grid, Resampling, coarse_axis, make_resampling
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.operators.quantize import quantize
from beam_inference.volumes.opening import tell_rest_of_voxels

_OPERATORS: TypeAdapter[tuple[Operator, ...]] = TypeAdapter(tuple[InstalledOperator, ...])
_FLOAT_BYTES = 4
_ROUNDING = 1e-6
"""Relative difference between voxel sizes that count as one."""
_BETWEEN = 0.01
"""Parts of a voxel beyond which a place lies between voxels: metadata are rounded."""
_NO_VOXEL_SIZE = (
    "{} does not state its voxel size, so it cannot be resampled. Copy it with its size first: "
    "beam-inference convert --voxel-size Z,Y,X"
)


@dataclass(frozen=True)
class ResampledSource:
    """A source that is resampled, and then goes through operators, box by box; a Source.

    Attributes:
        source: what is resampled.
        resampling: from the grid that the source lies on to the one that is read; the source may be
            a part of that grid, whose border voxels go on beyond it.
        operators: applied to the resampled values, in this order.
        info: of the result.
    """

    source: Source
    resampling: Resampling
    operators: tuple[Operator, ...]
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """The source's, and how it is resampled and finished."""
        return {
            "resampled": self.source.identity,
            "grids": [
                [list(box.start), list(box.stop)]
                for box in (self.resampling.source, self.resampling.target)
            ],
            "orders": list(self.resampling.orders),
            "postprocess": [operator.model_dump(mode="json") for operator in self.operators],
        }

    @property
    def gives_labels(self) -> bool:
        """Whether the operators make values that name something."""
        return gives_labels(self.operators)

    @property
    def bytes_per_voxel(self) -> int:
        """Bytes that are held for a voxel of the result while a large box is read."""
        info = self.source.info
        axes = self.resampling.axes
        voxels = max(1.0, math.prod(axis.length / axis.target_length for axis in axes))
        stored = info.itemsize * voxels
        steps = 2 * _FLOAT_BYTES * info.channels * voxels
        return math.ceil(stored + steps) + operator_bytes(self.operators, info.channels)

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return self.source.files

    def open(self) -> Read:
        """Open the source."""
        read = self.source.open()
        bounds = self.source.info.bounds
        functions = build_functions(self.operators)
        size = self.info.voxel_size_nm or (1.0, 1.0, 1.0)
        dtype = np.dtype(self.info.dtype)
        value_range = _whole_range(dtype, self.operators)

        def read_resampled(box: BoundingBox) -> Voxels:
            window = self.resampling.source_box(box)
            there = source_box(window, bounds, "edge")
            array = fill_outside(read(there), there, window, bounds, "edge", 0)
            values = self.resampling.resample(array, window, box)
            if values.dtype == dtype and not functions:
                return values
            values = np.ascontiguousarray(values, np.float32)
            values = apply_functions(functions, values, ArrayPlace(box, size))
            return quantize(values, dtype, value_range)

        return read_resampled


def _whole_range(dtype: AnyDtype, operators: Sequence[Operator]) -> tuple[float, float] | None:
    """The range of an integer dtype, so that values are rounded to it; None for labels."""
    if dtype.kind == "f" or operators:
        return None
    info = np.iinfo(dtype)
    return (float(info.min), float(info.max))


def resample_source(
    source: Source, path: str, wanted: ResamplingOptions, storage: Storage
) -> ResampledSource:
    """The source at another voxel size.

    Args:
        source: the source.
        path: its path or URL, for messages.
        wanted: how it is resampled, and what follows.
        storage: how object stores are reached.

    Raises:
        UserError: it cannot be resampled so.
    """
    operators = parse_operators(wanted.postprocess)
    info = source.info
    grid = _grid(info, path)
    whole = grid
    if wanted.like is not None:
        other = find_source(wanted.like, None, wanted.like_scale, storage).info
        whole, target = _same_space(grid, path, _grid(other, wanted.like), wanted.like)
    elif wanted.how.voxel_size_nm is not None:
        target = _with_voxel_size(grid, wanted.how.voxel_size_nm, path)
    else:
        raise ConfigError("give --voxel_size Z,Y,X, or --like VOLUME")
    size = wanted.how.voxel_size_nm or target.voxel_size_nm
    coarse = coarse_axis(grid.voxel_size_nm, size, wanted.how.separate_z)
    resampling = make_resampling(whole, target, wanted.how.order, coarse)
    tell_rest_of_voxels(path, target.voxel_size_nm, Origin(target.bounds.start, target.rest))
    is_part = info.bounds != whole.bounds
    result = SourceInfo(
        bounds=resampling.target_box(info.bounds) if is_part else target.bounds,
        channels=_channels_after(operators, info.channels),
        dtype=_result_dtype(info, operators, resampling, path),
        voxel_size_nm=target.voxel_size_nm,
        grain=FREE,
        notes=info.notes,
        rest=target.rest,
        made_of_bytes=_bytes_of_source(info, resampling),
    )
    return ResampledSource(source, resampling, operators, result)


def _bytes_of_source(info: SourceInfo, resampling: Resampling) -> int:
    """Bytes of the source, as it is read and in float32, for each voxel that is made of it."""
    factor = resampling.source.size / resampling.target.size
    return math.ceil(factor * (info.itemsize + 4 * info.channels))


def _with_voxel_size(grid: Grid, voxel_size_nm: VoxelSizeNm, path: str) -> Grid:
    try:
        return grid.with_voxel_size(voxel_size_nm)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _same_space(grid: Grid, path: str, other: Grid, like: str) -> tuple[Grid, Grid]:
    """Two grids over the same space: one that the source lies on, and one of another's voxels.

    Args:
        grid: of the source.
        path: of the source, for messages.
        other: of the volume whose voxels are made.
        like: its path.

    Returns:
        The source's own grid and the voxels of the other that it covers, if these are whole voxels;
        else the other at the source's voxel size, of which the source is a part, and all of it.
    """
    covered = _covering_box(grid, other)
    if covered is not None:
        return grid, replace(other, bounds=covered)
    whole = _with_voxel_size(other, grid.voxel_size_nm, like)
    is_same = np.allclose(whole.voxel_size_nm, grid.voxel_size_nm, rtol=_ROUNDING, atol=0)
    if not is_same or not whole.bounds.contains(grid.bounds):
        raise ConfigError(
            f"{path} is {grid.bounds} (z, y, x) in voxels of {list(grid.voxel_size_nm)} nm, and "
            f"{like} is {whole.bounds} in voxels of {list(whole.voxel_size_nm)} nm if it is "
            "resampled to that: they do not cover the same space. Name with --like the volume that "
            "was resampled. A job with input.box keeps its place only in OME-Zarr."
        )
    return whole, other


def _covering_box(grid: Grid, other: Grid) -> BoundingBox | None:
    """The voxels of another grid that a grid covers; None where it ends between voxels."""
    with np.errstate(all="ignore"):  # sizes of any file: what is out of reach is refused below
        ratio = np.divide(grid.voxel_size_nm, other.voxel_size_nm)
        places = (np.array([grid.bounds.start, grid.bounds.stop]) + grid.rest) * ratio - other.rest
        whole = np.rint(places)
        if not np.all(np.abs(places) <= FARTHEST) or np.abs(places - whole).max() > _BETWEEN:
            return None
    start, stop = (zyx.triple(map(int, corner)) for corner in whole)
    box = BoundingBox(start, stop)
    return box if box.size and other.bounds.contains(box) else None


def parse_operators(text: str) -> tuple[Operator, ...]:
    """Operators as ``postprocess`` of a job file lists them.

    Raises:
        ConfigError: they are no such list, or need what only a job has.
    """
    try:
        operators = _OPERATORS.validate_python(parse_yaml(text) or ())
    except ValidationError as error:
        raise ConfigError(f"--postprocess {describe_fault(error)}") from None
    for operator in operators:
        if any(total_halo([operator])) or operator.needed_files:
            raise ConfigError(
                f"--postprocess: {operator.display_name} looks at neighbours, or has a file of its "
                "own: only what goes voxel by voxel can follow. Write it into the job."
            )
    return operators


def _channels_after(operators: Sequence[Operator], channels: int) -> int:
    try:
        return channels_after(operators, channels)
    except ValueError as error:
        raise ConfigError(f"--postprocess: {error}") from None


def _grid(info: SourceInfo, path: str) -> Grid:
    if info.voxel_size_nm is None:
        raise ConfigError(_NO_VOXEL_SIZE.format(path))
    return Grid(info.bounds, info.voxel_size_nm, info.rest)


def _result_dtype(
    info: SourceInfo, operators: Sequence[Operator], resampling: Resampling, path: str
) -> str:
    """Name of the dtype of the result: the source's, or what the operators give."""
    if gives_labels(operators):
        largest = largest_label(operators, info.channels)
        return next(
            name for name in ("uint8", "uint16", *LABEL_DTYPES) if largest <= np.iinfo(name).max
        )
    if operators:
        return "float32"
    dtype = np.dtype(info.dtype)
    if not any(resampling.orders) or dtype.itemsize <= (_FLOAT_BYTES if dtype.kind == "f" else 2):
        return info.dtype
    raise ConfigError(
        f"{path} holds {info.dtype}, which names objects or has more digits than float32: only "
        "--order 0, the nearest voxel, keeps its values"
    )
