"""A source at another voxel size, such as predictions on the grid of what they are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import TypeAdapter, ValidationError

from beam_inference.arrays import AnyDtype
from beam_inference.config.fields import LABEL_DTYPES, Json
from beam_inference.config.operators import (
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
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.fill import fill_outside, source_box
from beam_inference.geometry.resampling import Grid, Resampling, coarse_axis, make_resampling
from beam_inference.geometry.zyx import VoxelSizeNm
from beam_inference.operators.postprocess import apply_functions, build_functions
from beam_inference.operators.quantize import quantize

_OPERATORS: TypeAdapter[tuple[Operator, ...]] = TypeAdapter(tuple[InstalledOperator, ...])
_FLOAT_BYTES = 4
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

    def open(self) -> Read:
        """Open the source."""
        read = self.source.open()
        bounds = self.source.info.bounds
        functions = build_functions(self.operators)
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
            return quantize(apply_functions(functions, values), dtype, value_range)

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
        target = _grid(other, wanted.like)
        whole = _with_voxel_size(target, grid.voxel_size_nm, wanted.like)
        _check_inside(info, path, whole, wanted.like)
    elif wanted.how.voxel_size_nm is not None:
        target = _with_voxel_size(grid, wanted.how.voxel_size_nm, path)
    else:
        raise ConfigError("give --voxel_size Z,Y,X, or --like VOLUME")
    size = wanted.how.voxel_size_nm or target.voxel_size_nm
    coarse = coarse_axis(grid.voxel_size_nm, size, wanted.how.separate_z)
    resampling = make_resampling(whole, target, wanted.how.order, coarse)
    is_part = info.bounds != whole.bounds
    result = SourceInfo(
        bounds=resampling.target_box(info.bounds) if is_part else target.bounds,
        channels=_channels_after(operators, info.channels),
        dtype=_result_dtype(info, operators, resampling, path),
        voxel_size_nm=target.voxel_size_nm,
        grain=FREE,
        notes=info.notes,
        rest=target.rest,
    )
    return ResampledSource(source, resampling, operators, result)


def _with_voxel_size(grid: Grid, voxel_size_nm: VoxelSizeNm, path: str) -> Grid:
    try:
        return grid.with_voxel_size(voxel_size_nm)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_inside(info: SourceInfo, path: str, whole: Grid, like: str) -> None:
    if not whole.bounds.contains(info.bounds):
        raise ConfigError(
            f"{path} is {info.bounds} (z, y, x) in voxels of {list(info.voxel_size_nm or ())} nm, "
            f"and {like} at that voxel size is {whole.bounds}: they do not cover the same space. "
            "Name with --like the volume that was resampled."
        )


def parse_operators(text: str) -> tuple[Operator, ...]:
    """Operators as ``postprocess`` of a job file lists them.

    Raises:
        ConfigError: they are no such list, or need what only a job has.
    """
    try:
        operators = _OPERATORS.validate_python(parse_yaml(text) or ())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--postprocess {place}: {first['msg']}") from None
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
