"""NRRD: a text header before, or beside, a raw or compressed array; axes fastest first in the file."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.file_spec import FileSpec, xyz
from beam_inference.conversion.protocol import FREE, SourceInfo, library, number_dtype, placed
from beam_inference.conversion.raw_array import RawLayout, RawSource, check_length
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.volumes.opening import length_nm

_PACKINGS = {"raw": None, "gzip": "gzip", "gz": "gzip", "bzip2": "bzip2", "bz2": "bzip2"}
_POSITIONS = ("domain", "space", "???", "none")
_TYPES = {"float32": "float", "float64": "double"}


def nrrd_source(path: str) -> RawSource:
    """A ``.nrrd`` file, or a ``.nhdr`` header with its file of data beside it.

    Raises:
        VolumeError: it cannot be read as a volume of numbers.
        ConfigError: pynrrd is not installed.
    """
    nrrd = library("nrrd", "NRRD")
    with Path(path).open("rb") as file:
        try:
            header = nrrd.read_header(file)
            dtype = nrrd.reader._determine_datatype(header)
            sizes = [int(n) for n in header["sizes"]]
            encoding = str(header["encoding"]).lower()
        except (nrrd.NRRDError, ValueError, KeyError, StopIteration) as error:
            raise VolumeError(f"{path} is no NRRD file: {error}") from None
        start = file.tell()
    number_dtype(dtype, path)
    if encoding not in _PACKINGS:
        raise VolumeError(
            f"{path} has the encoding {encoding}; expected raw, gzip or bzip2. Save it as one of "
            "these."
        )
    skip = int(header.get("byte skip", header.get("byteskip", 0)))
    if int(header.get("line skip", header.get("lineskip", 0))) or (skip and _PACKINGS[encoding]):
        raise VolumeError(f"{path} skips lines, or bytes of compressed data: save it without")
    beside = header.get("data file", header.get("datafile"))
    if beside is not None:
        file_of_data = Path(path).parent / str(beside)
        if not file_of_data.is_file():
            raise VolumeError(
                f"{path} names the data file {beside}, which is not one file beside it"
            )
        path = str(file_of_data)
        start = 0
    if skip == -1:
        start = Path(path).stat().st_size - math.prod(sizes) * dtype.itemsize
    elif skip:
        start += skip
    return _source(path, header, dtype, sizes, _PACKINGS[encoding], start)


def _source(
    path: str,
    header: dict[str, Any],
    dtype: np.dtype[Any],
    sizes: list[int],
    packing: str | None,
    start: int,
) -> RawSource:
    axes = _axes(path, header, sizes)
    layout = RawLayout(dtype.str, tuple(sizes[::-1]), axes, 0 if packing else start)
    if packing is None:
        check_length(path, layout)
    positions = [axis for axis, letter in enumerate(axes[::-1]) if letter != "C"]
    extent = dict(zip(axes, layout.shape, strict=True))
    size, offset, notes = _geometry(header, positions)
    shape = (extent.get("Z", 1), extent["Y"], extent["X"])
    stop = (offset[0] + shape[0], offset[1] + shape[1], offset[2] + shape[2])
    info = SourceInfo(
        BoundingBox(offset, stop), extent.get("C", 1), number_dtype(dtype, path), size, FREE, notes
    )
    return RawSource(path, layout, info, packing, start if packing else 0)


def _axes(path: str, header: dict[str, Any], sizes: list[int]) -> str:
    """The letters of the axes, slowest first."""
    kinds = header.get("kinds") or ["domain"] * len(sizes)
    other = [axis for axis, kind in enumerate(kinds) if str(kind).lower() not in _POSITIONS]
    if len(sizes) == 4 and not other:
        other = [3]
    if len(sizes) - len(other) not in (2, 3) or len(other) > 1:
        raise VolumeError(
            f"{path} has the axes {', '.join(map(str, kinds))} of {sizes} (fastest first); "
            "expected x, y, z and at most one of channels"
        )
    letters = list("XYZ")
    for axis in other:
        letters.insert(axis, "C")
    return "".join(letters[: len(sizes)][::-1])


def _geometry(
    header: dict[str, Any], positions: list[int]
) -> tuple[VoxelSizeNm | None, Zyx, tuple[str, ...]]:
    """Voxel size, offset, and what is not kept."""
    rows, units = _steps(header, positions)
    spacings = np.linalg.norm(rows, axis=1)
    if not (np.isfinite(spacings).all() and (spacings > 0).all()):
        return None, (0, 0, 0), ()
    factors = [length_nm(str(unit)) for unit in units]
    if None in factors:
        told = " × ".join(f"{each:g}" for each in spacings[::-1])
        return (
            None,
            (0, 0, 0),
            (f"its header says {told} (z, y, x), in no unit of length that is known here",),
        )
    x, y, z = (
        float(f"{a * b:.12g}") for a, b in zip(spacings, factors, strict=True) if b is not None
    )
    return (z, y, x), *placed(rows, spacings, header.get("space origin"))


def _steps(header: dict[str, Any], positions: list[int]) -> tuple[NDArray[Any], list[Any]]:
    """Steps along x, y, z in space, and the units of its axes; zeros where they are not known."""
    if len(positions) == 3 and header.get("space directions") is not None:
        directions = [header["space directions"][axis] for axis in positions]
        if all(direction is not None and len(direction) == 3 for direction in directions):
            return np.array(directions, float), list(header.get("space units") or [""] * 3)
    elif len(positions) == 3 and "spacings" in header:
        units = header.get("units") or [""] * len(header["sizes"])
        return np.diag([float(header["spacings"][axis]) for axis in positions]), [
            units[axis] for axis in positions
        ]
    return np.zeros((3, 3)), []


def create_nrrd(path: str, spec: FileSpec) -> RawLayout:
    """A new file's header, as http://teem.sourceforge.net/nrrd/format.html has it; the array follows."""
    sizes = [*spec.bounds.shape[::-1], *([spec.channels] if spec.channels > 1 else [])]
    many = spec.channels > 1
    lines = [
        "NRRD0005",
        f"type: {_TYPES.get(spec.dtype, spec.dtype)}",
        f"dimension: {len(sizes)}",
        f"sizes: {' '.join(map(str, sizes))}",
        "endian: little",
        "encoding: raw",
        f"kinds: domain domain domain{' list' if many else ''}",
    ]
    if spec.voxel_size_nm is not None:
        size = xyz(spec.voxel_size_nm)
        rows = [
            f"({','.join(f'{s:.17g}' if a == b else '0' for b in range(3))})"
            for a, s in enumerate(size)
        ]
        origin = ",".join(
            f"{a * s:.17g}" for a, s in zip(xyz(spec.bounds.start), size, strict=True)
        )
        lines += [
            "space dimension: 3",
            'space units: "nm" "nm" "nm"',
            f"space directions: {' '.join(rows)}{' none' if many else ''}",
            f"space origin: ({origin})",
        ]
    header = re.sub(r"\.0\b", "", "\n".join(lines)) + "\n\n"
    Path(path).write_bytes(header.encode())
    return spec.layout(len(header))
