"""DICOM series: a folder or glob of files of one slice each, or one file of many frames."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.conversion.protocol import (
    INSTRUMENTS,
    Placement,
    Read,
    SourceInfo,
    Voxels,
    check_shape,
    header_errors,
    import_library,
    number_dtype,
    placement_in_space,
)
from beam_inference.errors import PermanentReadError, VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.block_memory import check_block_memory

_DEFLATED = "1.2.840.10008.1.2.1.99"
_MM_NM = 1e6
_SAME_SPACING = 0.01
"""Part of a spacing by which others may differ from it, as positions are rounded."""
_NAMES_IN_MESSAGE = 10


@dataclass(frozen=True, slots=True)
class _Slice:
    """What the header of a file says of its slices.

    Attributes:
        path: path of the file.
        series: the identifier of its series, its number and its description.
        kind: what all files of a series share: samples, rows, columns and dtype.
        frames: number of its slices.
        spacing: between rows and between columns, in millimetres; None where it is not stated.
        thickness: of a slice, in millimetres; None where it is not stated.
        directions: of rows' and columns' neighbours in space, (2, 3); None where not stated.
        position: of the first voxel in space, in millimetres; None where it is not stated.
        number: of the instance in its series.
        scaling: the slope and the intercept that make the values of the stored ones.
    """

    path: str
    series: tuple[str, str, str]
    kind: tuple[int, int, int, str]
    frames: int
    spacing: tuple[float, float] | None
    thickness: float | None
    directions: tuple[tuple[float, ...], tuple[float, ...]] | None
    position: tuple[float, ...] | None
    number: int
    scaling: tuple[float, float]

    @property
    def height(self) -> float | None:
        """The position along the normal of the slices, in millimetres."""
        if self.directions is None or self.position is None:
            return None
        normal = np.cross(self.directions[0], self.directions[1])
        return float(np.dot(normal, self.position))


@dataclass(frozen=True, slots=True)
class DicomSeries:
    """A series of slices.

    Attributes:
        paths: paths of the files, in the order of z.
        files_hash: hash of the files' names, sizes and times.
        frames: number of slices in the one file; 1 where each slice is a file.
        stored_dtype: name of the dtype of the stored values.
        scalings: slope and intercept of each file; empty where values are those stored.
        info: its extent, dtype, and so on.
    """

    paths: tuple[str, ...]
    files_hash: str
    frames: int
    stored_dtype: str
    scalings: tuple[tuple[float, float], ...]
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """A hash of names, sizes and times of the files."""
        return {"dicom": str(Path(self.paths[0]).parent), "files": self.files_hash}

    def open(self) -> Read:
        """Look whether the files are those that were there at the launch."""
        if _hash_of_files(self.paths) != self.files_hash:
            raise WorkerFault(
                f"the files of {Path(self.paths[0]).parent} are not those of the launch"
            )

        def read(box: BoundingBox) -> Voxels:
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)
            depth, y, x = box.slices_in(self.info.bounds)
            for k, z in enumerate(range(depth.start, depth.stop)):
                number, frame = (0, z) if self.frames > 1 else (z, 0)
                path = self.paths[number]
                try:
                    plane = self._decode(path, frame)[:, y, x]
                except Exception as error:  # pydicom raises whatever a value runs into
                    reason = " ".join(str(error).split())
                    raise PermanentReadError(f"cannot read {path}: {reason}") from error
                if self.scalings:
                    slope, intercept = self.scalings[number]
                    plane = plane.astype(np.float32) * np.float32(slope) + np.float32(intercept)
                out[:, k] = plane
            return out

        return read

    def _decode(self, path: str, frame: int) -> Voxels:
        """Decode one frame of a file: (channels, y, x)."""
        pydicom = import_library("pydicom.pixels", "DICOM", INSTRUMENTS)
        array = pydicom.pixel_array(path, index=frame)
        if array.dtype.newbyteorder("=").name != self.stored_dtype:
            raise ValueError(f"it holds {array.dtype}, expected {self.stored_dtype}")
        return np.moveaxis(array, -1, 0) if self.info.channels > 1 else array[np.newaxis]


def dicom_series(pattern: str, name: str | None) -> DicomSeries:
    """A series of a folder, a glob or a file; the headers of all files are read.

    Args:
        pattern: path of a folder or a file, or a glob.
        name: identifier or number of the series; None if there is one alone.

    Raises:
        VolumeError: there is none, or its slices do not make a volume.
        ConfigError: pydicom is not installed.
    """
    import_library("pydicom", "DICOM", INSTRUMENTS)
    found = [_read_header(path) for path in _paths(pattern)]
    headers = [header for header in found if header is not None]
    if not headers:
        raise VolumeError(f"{pattern} holds DICOM files, but no pictures")
    return _make_series(pattern, _choose_series(pattern, headers, name))


def is_dicom_folder(folder: Path) -> bool:
    """Whether the files of a folder are DICOM's, by their names or the first one's content."""
    files = sorted(each for each in folder.iterdir() if each.is_file())
    if any(each.suffix.lower() == ".dcm" for each in files):
        return True
    plain = [each for each in files if each.suffix == "" or each.suffix[1:].isdecimal()]
    return bool(plain) and _is_dicom(plain[0])


def _is_dicom(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def _paths(pattern: str) -> list[str]:
    path = Path(pattern)
    if path.is_file():
        return [pattern]
    found = path.iterdir() if path.is_dir() else map(Path, glob.iglob(pattern))
    paths = sorted(
        str(each.absolute())
        for each in found
        if each.is_file() and each.name != "DICOMDIR" and _is_dicom(each)
    )
    if not paths:
        raise VolumeError(f"{pattern} holds no DICOM files")
    return paths


def _read_header(path: str) -> _Slice | None:
    """The header of a file; None where it holds no picture, but a report or the like."""
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    with header_errors(f"{path} cannot be read as DICOM"):
        syntax = pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", "")
        if syntax == _DEFLATED:
            raise VolumeError(
                f"{path} is compressed as a whole, which is not unpacked here. Save it with "
                "another transfer syntax, such as with dcmconv +te of DCMTK."
            )
        header = pydicom.dcmread(path, stop_before_pixels=True)
        return _describe(path, header) if "Rows" in header else None


def _describe(path: str, header: Any) -> _Slice:
    shared = _first_of(header, "SharedFunctionalGroupsSequence")
    frame = _first_of(header, "PerFrameFunctionalGroupsSequence")
    measures = _first_of(shared, "PixelMeasuresSequence") or _first_of(
        frame, "PixelMeasuresSequence"
    )
    plane = _first_of(shared, "PlaneOrientationSequence") or _first_of(
        frame, "PlaneOrientationSequence"
    )
    position = _first_of(frame, "PlanePositionSequence")
    scaling = _first_of(shared, "PixelValueTransformationSequence") or _first_of(
        frame, "PixelValueTransformationSequence"
    )
    spacing = _numbers(measures, header, "PixelSpacing", 2)
    gap = _numbers(measures, header, "SpacingBetweenSlices", 1) or _numbers(
        measures, header, "SliceThickness", 1
    )
    directions = _numbers(plane, header, "ImageOrientationPatient", 6)
    bits = int(header.BitsAllocated)
    sign = "i" if header.get("PixelRepresentation", 0) else "u"
    dtype = np.dtype(f"{sign}{bits // 8}") if bits % 8 == 0 else np.dtype(np.uint8)
    return _Slice(
        path=path,
        series=(
            str(header.get("SeriesInstanceUID", "")),
            str(header.get("SeriesNumber", "") or ""),
            str(header.get("SeriesDescription", "")),
        ),
        kind=(
            int(header.get("SamplesPerPixel", 1)),
            int(header.Rows),
            int(header.Columns),
            number_dtype(dtype, path),
        ),
        frames=int(header.get("NumberOfFrames", 1) or 1),
        spacing=None if spacing is None else (spacing[0], spacing[1]),
        thickness=None if gap is None else abs(gap[0]),
        directions=None if directions is None else (directions[:3], directions[3:]),
        position=_numbers(position, header, "ImagePositionPatient", 3),
        number=int(header.get("InstanceNumber", 0) or 0),
        scaling=(
            (_numbers(scaling, header, "RescaleSlope", 1) or (1.0,))[0],
            (_numbers(scaling, header, "RescaleIntercept", 1) or (0.0,))[0],
        ),
    )


def _first_of(header: Any, key: str) -> Any:
    """The first item of a sequence; None where there is none."""
    sequence = None if header is None else header.get(key)
    return sequence[0] if sequence else None


def _numbers(group: Any, header: Any, key: str, count: int) -> tuple[float, ...] | None:
    """Numbers of a functional group, or else of the header; None where they are not stated."""
    for place in (group, header):
        value = None if place is None else place.get(key)
        if value is not None and value != "":
            numbers = tuple(float(each) for each in (value if count > 1 else [value]))
            return numbers if len(numbers) == count else None
    return None


def _choose_series(pattern: str, headers: Sequence[_Slice], name: str | None) -> list[_Slice]:
    """The slices of a series.

    Raises:
        VolumeError: there is none of that name, or there are several and none was named.
    """
    groups: dict[tuple[str, str, str], list[_Slice]] = {}
    for header in headers:
        groups.setdefault(header.series, []).append(header)
    if name is not None:
        found = [series for series in groups if name in series[:2]]
    else:
        found = list(groups)
    if len(found) == 1:
        return groups[found[0]]
    listed = [
        f"{number or uid} ({description or 'without a description'}, {len(groups[key])} files)"
        for key in list(groups)[:_NAMES_IN_MESSAGE]
        for uid, number, description in [key]
    ]
    problem = "holds" if name is None else f"has not exactly one series {name}; it holds"
    raise VolumeError(
        f"{pattern} {problem} the series {', '.join(listed)}: name one with --dataset NUMBER, or "
        "with its SeriesInstanceUID"
    )


def _make_series(pattern: str, slices: Sequence[_Slice]) -> DicomSeries:
    first = slices[0]
    if len({each.kind for each in slices}) > 1:
        raise VolumeError(
            f"the slices of {pattern} differ in shape or dtype: "
            f"{', '.join(sorted(map(str, {each.kind for each in slices})))} (samples, rows, "
            "columns, dtype). Move the odd ones elsewhere."
        )
    if len(slices) > 1 and any(each.frames > 1 for each in slices):
        raise VolumeError(
            f"{pattern} holds several files of many frames each: give the path of one of them"
        )
    ordered = _in_order(pattern, slices)
    notes = _gap_notes(ordered)
    shape = (max(first.frames, len(ordered)), first.kind[1], first.kind[2])
    channels = first.kind[0]
    check_shape(pattern, (channels, *shape))
    scalings = tuple(each.scaling for each in ordered)
    is_scaled = any(scaling != (1.0, 0.0) for scaling in scalings)
    dtype = "float32" if is_scaled else first.kind[3]
    if is_scaled:
        notes = (*notes, "its header scales its values: they are read as float32")
    placement = _placement(ordered)
    grain: Zyx = (1, *shape[1:])
    info = SourceInfo(
        placement.bounds(shape),
        channels,
        dtype,
        placement.voxel_size_nm,
        grain,
        (*placement.notes, *notes),
    )
    check_block_memory(pattern, grain, info.itemsize)
    paths = tuple(each.path for each in ordered)
    source = DicomSeries(
        paths=paths,
        files_hash=_hash_of_files(paths),
        frames=first.frames,
        stored_dtype=first.kind[3],
        scalings=scalings if is_scaled else (),
        info=info,
    )
    start = info.bounds.start
    try:
        source.open()(BoundingBox(start, (start[0] + 1, start[1] + 1, start[2] + 1)))
    except PermanentReadError as error:
        raise VolumeError(
            f"{error}. If its compression is not known here: pip install pylibjpeg "
            "pylibjpeg-openjpeg pyjpegls, or save it uncompressed, such as with dcmdjpeg of DCMTK"
        ) from None
    return source


def _in_order(pattern: str, slices: Sequence[_Slice]) -> list[_Slice]:
    """Slices in the order of z: by their positions in space, or else by their numbers.

    Raises:
        VolumeError: two are at one place.
    """
    heights = [each.height for each in slices]
    if len({each.directions for each in slices}) == 1 and None not in heights:
        keys = [float(height or 0) for height in heights]
    else:
        keys = [float(each.number) for each in slices]
    ordered = sorted(zip(keys, slices, strict=True), key=lambda pair: pair[0])
    for (a, one), (b, other) in pairwise(ordered):
        if a == b:
            raise VolumeError(
                f"two slices of {pattern} are at one place: {Path(one.path).name} and "
                f"{Path(other.path).name}. Move those of other times or echoes elsewhere."
            )
    return [each for _, each in ordered]


def _steps(slices: Sequence[_Slice]) -> list[float]:
    """Distances between neighbouring slices, in millimetres; empty where they are not known."""
    heights = [each.height for each in slices]
    if None in heights:
        return []
    return [float(b or 0) - float(a or 0) for a, b in pairwise(heights)]


def _gap_notes(slices: Sequence[_Slice]) -> tuple[str, ...]:
    steps = _steps(slices)
    if not steps:
        return ()
    usual = float(np.median(steps))
    odd = [k for k, step in enumerate(steps) if abs(step - usual) > _SAME_SPACING * usual]
    if not odd:
        return ()
    return (
        f"{len(odd)} distances between slices differ from the usual {usual:g} mm, the first is "
        f"{steps[odd[0]]:g} mm behind {Path(slices[odd[0]].path).name}: slices are missing, and "
        "those behind them move up",
    )


def _placement(slices: Sequence[_Slice]) -> Placement:
    first = slices[0]
    steps = _steps(slices)
    depth = float(np.median(steps)) if steps else first.thickness
    if first.spacing is None or not depth:
        return Placement(None)
    # PixelSpacing is between rows first: along y, then along x.
    lengths = np.array([first.spacing[1], first.spacing[0], depth])
    if not (np.isfinite(lengths).all() and (lengths > 0).all()):
        return Placement(None)
    sizes = [float(f"{length * _MM_NM:.9g}") for length in lengths]
    voxel_size_nm = (sizes[2], sizes[1], sizes[0])
    if first.directions is None or first.position is None:
        return Placement(voxel_size_nm)
    along_x, along_y = map(np.array, first.directions)
    vectors = np.stack([along_x, along_y, np.cross(along_x, along_y)], axis=1) * lengths
    return placement_in_space(voxel_size_nm, vectors, lengths, np.array(first.position))


def _hash_of_files(paths: Sequence[str]) -> str:
    lines = []
    for path in paths:
        status = Path(path).stat()
        lines.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
