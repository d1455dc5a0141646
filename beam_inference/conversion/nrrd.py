"""NRRD files: a text header before or beside an array, raw or compressed, fastest axis first."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.conversion.file_spec import FileSpec, xyz
from beam_inference.conversion.named_files import file_beside
from beam_inference.conversion.protocol import (
    FREE,
    Placement,
    SourceInfo,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    placement_in_space,
    stated_voxel_size,
)
from beam_inference.conversion.raw_array import (
    RawLayout,
    RawSource,
    check_length,
    check_packed_length,
    read_start,
)
from beam_inference.conversion.stored_files import StoredFile, count_bytes
from beam_inference.errors import VolumeError
from beam_inference.volumes.axes import length_nm

_PACKINGS = {"raw": None, "gzip": "gzip", "gz": "gzip", "bzip2": "bzip2", "bz2": "bzip2"}
_POSITIONS = ("domain", "space", "???", "none")
Header = Json
_TYPES = {"float32": "float", "float64": "double"}
_LONGEST_HEADER = 2**20
"""Bytes in which a header must end: without one, a whole file would be read as a single line, and
some ten megabytes of short lines take pynrrd half a minute."""


_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_LIST_OF_FILES = re.compile(rb"(?im)^data ?file: *(LIST\b|.*%[0-9]*d)")
_FIELD_AS_PAIR = re.compile(
    rb"(?im)^((?:data|axis|byte|line|space|old)? ?"
    rb"(?:file|mins|maxs|skip|spacings|kinds|sizes|type|encoding|endian|dimension|directions|origin"
    rb"|units|thicknesses|centers))\s*:="
)
"""A field of the format where a pair of key and value is: pynrrd puts both into one mapping."""

_UNKNOWN = ("none", "???")


def nrrd_source(path: StoredFile) -> RawSource:
    """A ``.nrrd`` file, or a ``.nhdr`` header with its data file beside it.

    Raises:
        VolumeError: it cannot be read as a volume of numbers.
        ConfigError: pynrrd is not installed.
    """
    import_library("nrrd", "NRRD")
    with header_errors(f"{path} is not an NRRD file"):
        return _read(path)


def _read(path: StoredFile) -> RawSource:
    nrrd = import_library("nrrd", "NRRD")
    file = io.BytesIO(read_start(path, None, _LONGEST_HEADER))
    if _LIST_OF_FILES.search(_BLANK_LINE.split(file.getvalue(), 1)[0]):
        raise VolumeError(
            f"{path} has its array in several files (data file: LIST, or a pattern): save it as "
            "one file, or convert the files as a stack of slices"
        )
    header = nrrd.read_header(file)
    pair = _FIELD_AS_PAIR.search(file.getvalue()[: file.tell()])
    if pair is not None:
        raise VolumeError(
            f"{path} states {pair[1].decode()} as a key of its own (:=), which programs take for "
            "the field of that name, or not. Save it again, with another key."
        )
    dtype = nrrd.reader._determine_datatype(header)
    sizes = [int(n) for n in header["sizes"]]
    if header.get("dimension") != len(sizes):
        raise VolumeError(
            f"{path} states {len(sizes)} sizes, and {header.get('dimension', 'no')} as its "
            "dimension: its header is damaged. Copy or save it again."
        )
    check_shape(str(path), sizes)
    encoding = str(header["encoding"]).lower()
    dtype_name = number_dtype(dtype, str(path))
    if encoding not in _PACKINGS:
        raise VolumeError(
            f"{path} has the encoding {encoding}; expected raw, gzip or bzip2. Save it as one of "
            "these."
        )
    packing = _PACKINGS[encoding]
    axes = _axes(path, header, sizes)
    data = _data_place(path, header, file.tell(), math.prod(sizes) * dtype.itemsize, packing)
    layout = RawLayout(dtype.str, tuple(sizes[::-1]), axes, 0 if packing else data.start)
    if packing is None:
        check_length(data.file, layout)
    else:
        check_packed_length(data.file, packing, data.start, layout)
    extent = dict(zip(axes, layout.shape, strict=True))
    placement = _placement(header, axes)
    notes = placement.notes
    if placement.voxel_size_nm is None and _is_elsewhere(header.get("space origin")):
        notes += ("its space origin is not read, without voxel sizes in a known unit",)
    if _is_elsewhere(_either(header, "axis mins", "axismins")):
        notes += ("its axis mins are not read: the offset is 0",)
    info = SourceInfo(
        placement.bounds((extent.get("Z", 1), extent["Y"], extent["X"])),
        extent.get("C", 1),
        dtype_name,
        placement.voxel_size_nm,
        FREE,
        notes,
    )
    return RawSource(data.file, layout, info, packing, data.start if packing else 0)


def _is_elsewhere(position: Any) -> bool:
    """Whether a position is stated that is not 0."""
    return position is not None and bool(np.nan_to_num(np.asarray(position, float)).any())


def _either(header: Header, name: str, other_name: str) -> Any:
    """A field that has two names, or None."""
    return header.get(name, header.get(other_name))


@dataclass(frozen=True, slots=True)
class _DataPlace:
    """The file that holds the array, and where in it the array or its compressed bytes begin."""

    file: StoredFile
    start: int


def _data_place(
    path: StoredFile, header: Header, header_stop: int, nbytes: int, packing: str | None
) -> _DataPlace:
    """Find the array: after the header, or in a data file beside it, maybe after skipped bytes."""
    skip = int(_either(header, "byte skip", "byteskip") or 0)
    skips_lines = bool(int(_either(header, "line skip", "lineskip") or 0))
    if skips_lines or (skip and packing):
        raise VolumeError(f"{path} skips lines, or bytes of compressed data: save it without")
    name = _either(header, "data file", "datafile")
    start = header_stop
    if name is not None:
        path = file_beside(path, str(name))
        start = 0
    if skip == -1:  # the array is at the end of the file
        skip = count_bytes(path) - nbytes - start
    if skip < 0:
        raise VolumeError(
            f"the array of {path} would begin before its file, or within its header: it was cut "
            "off, or its byte skip is wrong. Copy it again."
        )
    return _DataPlace(path, start + skip)


def _axes(path: StoredFile, header: Header, sizes: list[int]) -> str:
    """The letters of the axes, slowest first."""
    kinds = header.get("kinds") or ["domain"] * len(sizes)
    if len(kinds) != len(sizes):
        raise VolumeError(
            f"{path} states {len(sizes)} sizes, and {len(kinds)} kinds of axes: its header is "
            "damaged. Copy or save it again."
        )
    other = [axis for axis, kind in enumerate(kinds) if str(kind).lower() not in _POSITIONS]
    lost = _axes_without_position(header)
    if other and lost and other != lost:
        raise VolumeError(
            f"{path} has the axes {', '.join(map(str, kinds))}, and states no direction in space "
            f"for number {lost[0]}, counted from 0: which one is that of channels? Mend its header."
        )
    if len(sizes) == 4 and not other:
        unknown = [axis for axis, kind in enumerate(kinds) if str(kind).lower() in _UNKNOWN]
        other = lost or (unknown if len(unknown) == 1 else [3])
    if len(sizes) - len(other) not in (2, 3) or len(other) > 1:
        raise VolumeError(
            f"{path} has the axes {', '.join(map(str, kinds))} of {sizes} (fastest first); "
            "expected x, y, z and at most one of channels"
        )
    letters = list("XYZ")
    for axis in other:
        letters.insert(axis, "C")
    return "".join(letters[: len(sizes)][::-1])


def _axes_without_position(header: Header) -> list[int]:
    """The axes, fastest first, of which the header says that they lead nowhere in space."""
    directions = header.get("space directions")
    if directions is None:
        directions = header.get("spacings")
    if directions is None:
        return []
    return [axis for axis, each in enumerate(directions) if each is None or np.isnan(each).any()]


def _placement(header: Header, axes: str) -> Placement:
    steps = _steps(header, [axis for axis, letter in enumerate(axes[::-1]) if letter != "C"])
    if steps is None:
        return Placement(None)
    spacings = np.linalg.norm(steps.vectors, axis=1)
    if not (np.isfinite(spacings).all() and (spacings > 0).all()):
        return Placement(None)
    units = [length_nm(unit) for unit in steps.units]
    if None in units:
        stated = " × ".join(f"{n:g}" for n in spacings[::-1])
        note = f"its header says {stated} (z, y, x), in no unit of length that is known here"
        return Placement(None, notes=(note,))
    units_nm = np.array(units, float)
    vectors_nm = steps.vectors * units_nm  # the components of each step are in the units of space
    sizes = [float(f"{length:.12g}") for length in np.linalg.norm(vectors_nm, axis=1)]
    size = stated_voxel_size(sizes[::-1])
    if size is None:
        return Placement(None)
    origin = header.get("space origin")
    origin_nm = None if origin is None else np.asarray(origin, float) * units_nm
    return placement_in_space(size, vectors_nm, np.array(sizes), origin_nm)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps from voxel to voxel along x, y, z: vectors in space, (3, 3), and units of its axes.

    Vectors are rows; units are those of the components, in the columns.
    """

    vectors: AnyArray
    units: list[str]


def _steps(header: Header, positions: list[int]) -> _Steps | None:
    """The steps along the axes ``positions``, counted fastest first; None if not stated."""
    if len(positions) != 3:
        return None
    if header.get("space directions") is not None:
        directions = [header["space directions"][axis] for axis in positions]
        if any(direction is None or len(direction) != 3 for direction in directions):
            return None
        space_units = header.get("space units") or [""] * 3
        return _Steps(np.array(directions, float), [str(unit) for unit in space_units])
    if "spacings" in header:
        spacings = [float(header["spacings"][axis]) for axis in positions]
        units = header.get("units") or [""] * len(header["sizes"])
        return _Steps(np.diag(spacings), [str(units[axis]) for axis in positions])
    return None


def create_nrrd(path: str, spec: FileSpec) -> RawLayout:
    """Write a new file's header; the array is to follow at the offset of the layout returned.

    The header is that of http://teem.sourceforge.net/nrrd/format.html.
    """
    has_channels = spec.channels > 1
    sizes = list(spec.bounds.shape[::-1])
    if has_channels:
        sizes.append(spec.channels)
    lines = [
        "NRRD0005",
        f"type: {_TYPES.get(spec.dtype, spec.dtype)}",
        f"dimension: {len(sizes)}",
        f"sizes: {' '.join(map(str, sizes))}",
        "endian: little",
        "encoding: raw",
        f"kinds: domain domain domain{' list' if has_channels else ''}",
    ]
    if spec.voxel_size_nm is not None:
        voxel_size = xyz(spec.voxel_size_nm)
        directions = []
        for axis, size in enumerate(voxel_size):
            step = ["0", "0", "0"]
            step[axis] = f"{size:.17g}"
            directions.append(f"({','.join(step)})")
        if has_channels:
            directions.append("none")
        origin = ",".join(
            f"{n * size:.17g}" for n, size in zip(xyz(spec.bounds.start), voxel_size, strict=True)
        )
        lines += [
            "space dimension: 3",
            'space units: "nm" "nm" "nm"',
            f"space directions: {' '.join(directions)}",
            f"space origin: ({origin})",
        ]
    header = re.sub(r"\.0\b", "", "\n".join(lines)) + "\n\n"
    Path(path).write_bytes(header.encode())
    return spec.layout(len(header))
