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

from beam_inference.arrays import AnyArray
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
_SAME_DIRECTION = 1e-3
"""By how much cosines of one direction may differ, as they are rounded."""
_MOST_FRAMES = 10**5
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_NAMES_IN_MESSAGE = 10


@dataclass(frozen=True, slots=True)
class _Slice:
    """What a file says of one of its slices.

    Attributes:
        path: path of the file.
        frame: number of the slice in the file.
        series: the identifier of its series, its number and its description.
        kind: what all slices of a series share: samples, rows, columns, dtype, and what the
            values mean.
        spacing: between rows and between columns, in millimetres; None where it is not stated.
        thickness: of a slice, in millimetres; None where it is not stated.
        directions: of rows' and columns' neighbours in space, (2, 3); None where not stated.
        position: of the first voxel in space, in millimetres; None where it is not stated.
        number: of the instance in its series.
        scaling: the slope and the intercept that make the values of the stored ones.
    """

    path: str
    frame: int
    series: tuple[str, str, str]
    kind: tuple[int, int, int, str, str]
    spacing: tuple[float, float] | None
    thickness: float | None
    directions: tuple[tuple[float, ...], tuple[float, ...]] | None
    position: tuple[float, ...] | None
    number: int
    scaling: tuple[float, float]


@dataclass(frozen=True, slots=True)
class DicomSeries:
    """A series of slices.

    Attributes:
        frames: path of the file of each slice, and its number in the file, in the order of z.
        files_hash: hash of the files' names, sizes and times.
        stored_dtype: name of the dtype of the stored values.
        scalings: slope and intercept of each slice; empty where values are those stored.
        info: its extent, dtype, and so on.
    """

    frames: tuple[tuple[str, int], ...]
    files_hash: str
    stored_dtype: str
    scalings: tuple[tuple[float, float], ...]
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """A hash of names, sizes and times of the files."""
        return {"dicom": str(self._folder), "files": self.files_hash}

    @property
    def _folder(self) -> Path:
        return Path(self.frames[0][0]).parent

    def open(self) -> Read:
        """Look whether the files are those that were there at the launch."""
        if _hash_of_files(self.frames) != self.files_hash:
            raise WorkerFault(f"the files of {self._folder} are not those of the launch")

        def read(box: BoundingBox) -> Voxels:
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)
            depth, y, x = box.slices_in(self.info.bounds)
            for k, z in enumerate(range(depth.start, depth.stop)):
                path, frame = self.frames[z]
                try:
                    plane = self._decode(path, frame)[:, y, x]
                except Exception as error:  # pydicom raises whatever a value runs into
                    reason = " ".join(str(error).split())
                    raise PermanentReadError(f"cannot read {path}: {reason}") from error
                if self.scalings:
                    slope, intercept = self.scalings[z]
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
        plane: Voxels = np.moveaxis(array, -1, 0) if self.info.channels > 1 else array[np.newaxis]
        expected = (self.info.channels, *self.info.bounds.shape[1:])
        if plane.shape != expected:
            raise ValueError(f"it has the shape {plane.shape}, expected {expected}")
        return plane


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
    headers = [each for path in _paths(pattern) for each in _read_header(path)]
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


def _read_header(path: str) -> list[_Slice]:
    """The slices of a file; none where it holds no picture, but a report or the like."""
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    with header_errors(f"{path} cannot be read as DICOM"):
        syntax = pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", "")
        if syntax == _DEFLATED:
            raise VolumeError(
                f"{path} is compressed as a whole, which is not unpacked here. Save it with "
                "another transfer syntax, such as with dcmconv +te of DCMTK."
            )
        header = pydicom.dcmread(path, stop_before_pixels=True)
        return _describe(path, header) if "Rows" in header else []


def _describe(path: str, header: Any) -> list[_Slice]:
    count = int(header.get("NumberOfFrames", 1) or 1)
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    if not 1 <= count <= _MOST_FRAMES or (groups and len(groups) != count):
        raise VolumeError(
            f"{path} states {count} frames, and describes {len(groups)}: it is damaged. Copy it "
            "again."
        )
    if header.get("ModalityLUTSequence"):
        raise VolumeError(
            f"{path} gives its values by a table (Modality LUT), which is not applied here. Save "
            "it with its values, such as with dcmconv of DCMTK or with dcm2niix."
        )
    bits = int(header.BitsAllocated)
    sign = "i" if header.get("PixelRepresentation", 0) else "u"
    dtype = np.dtype(f"{sign}{bits // 8}") if bits % 8 == 0 else np.dtype(np.uint8)
    series = (
        str(header.get("SeriesInstanceUID", "")),
        str(header.get("SeriesNumber", "") or ""),
        str(header.get("SeriesDescription", "")),
    )
    kind = (
        int(header.get("SamplesPerPixel", 1)),
        int(header.Rows),
        int(header.Columns),
        number_dtype(dtype, path),
        str(header.get("PhotometricInterpretation", "")),
    )
    return [_describe_frame(path, header, frame, count, series, kind) for frame in range(count)]


def _describe_frame(
    path: str,
    header: Any,
    frame: int,
    count: int,
    series: tuple[str, str, str],
    kind: tuple[int, int, int, str, str],
) -> _Slice:
    """One of the ``count`` slices of a file: what is said of all holds where it says no more."""
    shared = _item(header, "SharedFunctionalGroupsSequence", 0)
    own = _item(header, "PerFrameFunctionalGroupsSequence", frame)

    def numbers(group: str, key: str, length: int) -> tuple[float, ...] | None:
        groups = (_item(own, group, 0), _item(shared, group, 0), header)
        return _numbers(path, groups, key, length)

    spacing = numbers("PixelMeasuresSequence", "PixelSpacing", 2)
    gap = numbers("PixelMeasuresSequence", "SpacingBetweenSlices", 1) or numbers(
        "PixelMeasuresSequence", "SliceThickness", 1
    )
    along = numbers("PlaneOrientationSequence", "ImageOrientationPatient", 6)
    thickness = None if gap is None else abs(gap[0])
    directions = None if along is None else (along[:3], along[3:])
    position = numbers("PlanePositionSequence", "ImagePositionPatient", 3)
    if count > 1 and position is not None and not _has_position(own):
        position = _step_along(header, position, directions, frame, count, thickness)
    (slope,) = numbers("PixelValueTransformationSequence", "RescaleSlope", 1) or (1.0,)
    (intercept,) = numbers("PixelValueTransformationSequence", "RescaleIntercept", 1) or (0.0,)
    if slope == 0 or max(abs(slope), abs(intercept)) > _LARGEST_SCALE:
        raise VolumeError(
            f"{path} states the slope {slope:g} and the intercept {intercept:g} of its values, "
            "which are no scale: it is damaged. Copy or save it again."
        )
    return _Slice(
        path=path,
        frame=frame,
        series=series,
        kind=kind,
        spacing=None if spacing is None else (spacing[0], spacing[1]),
        thickness=thickness,
        directions=directions,
        position=position,
        number=int(header.get("InstanceNumber", 0) or 0),
        scaling=(slope, intercept),
    )


def _has_position(group: Any) -> bool:
    return "ImagePositionPatient" in (_item(group, "PlanePositionSequence", 0) or ())


def _step_along(
    header: Any,
    position: tuple[float, ...],
    directions: tuple[tuple[float, ...], tuple[float, ...]] | None,
    frame: int,
    count: int,
    gap: float | None,
) -> tuple[float, ...] | None:
    """The position of a frame in a file that states that of the first alone; None if unknown.

    Volumes of dose list where the others are, in GridFrameOffsetVector.
    """
    offsets: Sequence[Any] = header.get("GridFrameOffsetVector") or ()
    if len(offsets) == count:
        distance = float(offsets[frame]) - float(offsets[0])
    elif gap is not None:
        distance = frame * gap
    else:
        return None
    if directions is None:
        return None
    normal = np.cross(directions[0], directions[1])
    return tuple(float(a + distance * b) for a, b in zip(position, normal, strict=True))


def _item(header: Any, key: str, number: int) -> Any:
    """An item of a sequence; None where there is none."""
    sequence = None if header is None else header.get(key)
    return sequence[number] if sequence else None


def _numbers(path: str, groups: Sequence[Any], key: str, count: int) -> tuple[float, ...] | None:
    """Numbers of the first of several groups that states them; None where none does.

    Raises:
        VolumeError: they are not finite.
    """
    for place in groups:
        value = None if place is None else place.get(key)
        if value is not None and value != "":
            numbers = tuple(float(each) for each in (value if count > 1 else [value]))
            if not np.isfinite(numbers).all():
                raise VolumeError(f"{path} states the {key} {numbers}: it is damaged")
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
            "columns, dtype, meaning of values). Move the odd ones elsewhere."
        )
    _check_spacings(pattern, slices)
    ordered = _in_order(pattern, slices)
    notes = _value_notes(first.kind[4])
    shape = (len(ordered), first.kind[1], first.kind[2])
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
    frames = tuple((each.path, each.frame) for each in ordered)
    source = DicomSeries(
        frames=frames,
        files_hash=_hash_of_files(frames),
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


def _check_spacings(pattern: str, slices: Sequence[_Slice]) -> None:
    """Refuse slices whose voxels are not of one size.

    Raises:
        VolumeError: they are not.
    """
    first = slices[0]
    for each in slices:
        if (each.spacing is None) != (first.spacing is None) or (
            each.spacing is not None
            and first.spacing is not None
            and not np.allclose(each.spacing, first.spacing, rtol=_SAME_SPACING, atol=0)
        ):
            raise VolumeError(
                f"the slices of {pattern} differ in the spacing of their voxels: "
                f"{_name(first)} has {first.spacing} mm, {_name(each)} {each.spacing}. Move the "
                "odd ones elsewhere."
            )


def _value_notes(meaning: str) -> tuple[str, ...]:
    """What a person should know of values that are not the larger the brighter."""
    if meaning == "PALETTE COLOR":
        return ("its table of colours is not kept, its values are",)
    if meaning == "MONOCHROME1":
        return ("its values mean the brighter the smaller they are, and are kept so",)
    return ()


def _name(each: _Slice) -> str:
    name = Path(each.path).name
    return f"frame {each.frame} of {name}" if each.frame else name


def _in_order(pattern: str, slices: Sequence[_Slice]) -> list[_Slice]:
    """Slices in the order of z: by their positions in space, or where none has one, by numbers.

    Raises:
        VolumeError: they do not make a volume: two are at one place, some are missing, turned
            or shifted, or do not state their position.
    """
    located = [each for each in slices if each.directions is not None and each.position is not None]
    if not located:
        by_number = sorted(slices, key=lambda each: (each.number, each.frame))
        for one, other in pairwise(by_number):
            if (one.number, one.frame) == (other.number, other.frame):
                raise _at_one_place(pattern, one, other)
        return by_number
    if len(located) < len(slices):
        odd = next(each for each in slices if each not in located)
        raise VolumeError(
            f"{len(slices) - len(located)} of the {len(slices)} slices of {pattern} do not state "
            f"their position in space, the first is {_name(odd)}. Move them elsewhere."
        )
    heights = _heights(pattern, located)
    places = sorted(range(len(located)), key=lambda k: heights[k])
    ordered = [located[k] for k in places]
    _check_distances(pattern, ordered, np.array([heights[k] for k in places]))
    return ordered


def _at_one_place(pattern: str, one: _Slice, other: _Slice) -> VolumeError:
    return VolumeError(
        f"two slices of {pattern} are at one place: {_name(one)} and {_name(other)}. Move those "
        "of other times or echoes elsewhere."
    )


def _heights(pattern: str, slices: Sequence[_Slice]) -> list[float]:
    """Positions of slices along their normal, in millimetres.

    Raises:
        VolumeError: they are turned against one another, or shifted by half a voxel or more.
    """
    first = slices[0]
    directions = np.array([each.directions for each in slices])
    turned = np.abs(directions - directions[0]).max(axis=(1, 2)) > _SAME_DIRECTION
    if turned.any():
        raise VolumeError(
            f"the slices of {pattern} are turned against one another, such as {_name(first)} and "
            f"{_name(slices[int(turned.argmax())])}. Move those of other views elsewhere."
        )
    normal = np.cross(*directions[0])
    away = np.array([each.position for each in slices]) - np.array(first.position)
    heights = away @ normal
    shifts = np.abs((away - heights[:, np.newaxis] * normal) @ directions[0].T)
    spacing = first.spacing if first.spacing and min(first.spacing) > 0 else (1.0, 1.0)
    # Directions are along x, then along y; spacings are between rows, which is along y, first.
    shifted = (shifts > np.array(spacing[::-1]) / 2).any(axis=1)
    if shifted.any():
        raise VolumeError(
            f"the slices of {pattern} do not lie above one another: "
            f"{_name(slices[int(shifted.argmax())])} is shifted against {_name(first)} by "
            f"{shifts[shifted.argmax()].max():g} mm, as with a tilted gantry. Make a volume of "
            "them with a program that moves them, such as dcm2niix."
        )
    return [float(each) for each in heights]


def _check_distances(pattern: str, slices: Sequence[_Slice], heights: AnyArray) -> None:
    """Refuse slices at one place, and gaps: what is behind them would move up.

    Raises:
        VolumeError: there are some.
    """
    steps = np.diff(heights)
    if not len(steps):
        return
    if steps.min() == 0:
        k = int(steps.argmin())
        raise _at_one_place(pattern, slices[k], slices[k + 1])
    usual = float(np.median(steps))
    odd = np.flatnonzero(np.abs(steps - usual) > _SAME_SPACING * usual)
    if odd.size:
        k = int(odd[np.abs(steps[odd] - usual).argmax()])
        raise VolumeError(
            f"slices of {pattern} are missing, or not at equal distances: {_name(slices[k + 1])} "
            f"is {steps[k]:g} mm behind {_name(slices[k])}, the median is {usual:g} mm. Copy the "
            "missing ones, or name those on one side of the gap by a glob, or in a folder."
        )


def _placement(slices: Sequence[_Slice]) -> Placement:
    first = slices[0]
    depth = _depth(slices)
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


def _depth(slices: Sequence[_Slice]) -> float | None:
    """Distance of neighbouring slices, in millimetres; None where it is not known."""
    first = slices[0]
    if len(slices) == 1 or first.directions is None or first.position is None:
        return first.thickness
    normal = np.cross(first.directions[0], first.directions[1])
    away = np.array([each.position for each in slices]) - np.array(first.position)
    return float(np.median(np.diff(away @ normal)))


def _hash_of_files(frames: Sequence[tuple[str, int]]) -> str:
    lines = []
    for path in dict.fromkeys(path for path, _ in frames):
        status = Path(path).stat()
        lines.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
