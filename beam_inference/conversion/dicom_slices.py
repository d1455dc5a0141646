"""What a DICOM file says of its slices, held against how much it holds."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from beam_inference.conversion.picture_headers import Extent, stated_extent
from beam_inference.conversion.protocol import (
    INSTRUMENTS,
    header_errors,
    import_library,
    number_dtype,
)
from beam_inference.conversion.stored_files import StoredFile, count_bytes, open_stream
from beam_inference.errors import VolumeError
from beam_inference.geometry.zyx import ceil_div

_DEFLATED = "1.2.840.10008.1.2.1.99"

_MOST_FRAMES = 10**5

_LARGEST_SCALE = float(np.finfo(np.float32).max)

_BEHIND_META = 0x00030000
"""The first tag behind those of the group that says how the others are written."""

_PICTURES = ("Image Storage", "Dose Storage", "Segmentation Storage", "Parametric Map")
"""Words in the names of the classes of files that hold pictures."""

_PIXEL_DATA = (0x7FE0, 0x0010)
"""Group and number of the element that holds the pixels, unless they are floats."""

_FLOAT_PIXEL_DATA = ((0x7FE0, 0x0008), (0x7FE0, 0x0009))

_VECTORS = (
    "AngularViewVector",
    "DetectorVector",
    "EnergyWindowVector",
    "PhaseVector",
    "RRIntervalVector",
    "RotationVector",
    "TimeSliceVector",
    "TimeSlotVector",
)
"""What frames of nuclear medicine differ in beside their place along z."""

_EXPLICIT_HEAD = 12
"""Bytes before its content, where they state its kind."""

_RUN_LENGTHS = "1.2.840.10008.1.2.5"
"""The transfer syntax whose frames are packed as runs of equal bytes."""

_MOST_OF_RUNS = 64
"""Bytes that a byte of run lengths unpacks to, at most."""

_PICTURE_BEGINS = (b"\xff\xd8", b"\xff\x4f")
"""Begins of JPEG and JPEG-LS, and of JPEG 2000."""


@dataclass(frozen=True, slots=True)
class DicomSlice:
    """What a file says of one of its slices.

    Attributes:
        file: the file.
        frame: number of the slice in the file.
        series: the identifier of its series, its number and its description.
        space: the identifier of the frame of reference that positions are in; empty if not stated.
        kind: what all slices of a series share: samples, rows, columns, dtype, and what the
            values mean.
        spacing: between rows and between columns, in millimetres; None where it is not stated.
        thickness: of a slice, in millimetres; None where it is not stated.
        directions: of rows' and columns' neighbours in space, (2, 3); None where not stated.
        position: of the first voxel in space, in millimetres; None where it is not stated.
        number: of the instance in its series.
        scaling: the slope and the intercept that make the values of the stored ones.
        is_packed: whether its pixels are, as JPEG or the like.
    """

    file: StoredFile
    frame: int
    series: tuple[str, str, str]
    space: str
    kind: tuple[int, int, int, str, str]
    spacing: tuple[float, float] | None
    thickness: float | None
    directions: tuple[tuple[float, ...], tuple[float, ...]] | None
    position: tuple[float, ...] | None
    number: int
    scaling: tuple[float, float]
    is_packed: bool


def read_slices(file: StoredFile) -> list[DicomSlice]:
    """The slices of a file; none where it holds no picture, but a report or the like."""
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    with header_errors(f"{file} cannot be read as DICOM"), open_stream(file) as stream:
        pydicom.filereader.read_preamble(stream, force=False)
        meta = pydicom.filereader.read_dataset(
            stream, False, True, stop_when=lambda tag, _, __: tag >= _BEHIND_META
        )
        if meta.get("TransferSyntaxUID", "") == _DEFLATED:
            raise VolumeError(
                f"{file} is compressed as a whole, which is not unpacked here. Save it with "
                "another transfer syntax, such as with dcmconv +te of DCMTK."
            )
        stream.seek(0)
        header = pydicom.dcmread(stream, stop_before_pixels=True)
        has_pixels = bool(stream.read(1))
        stream.seek(-int(has_pixels), io.SEEK_CUR)
        if "Rows" in header and not has_pixels:
            raise VolumeError(f"{file} ends before its pixels: it was cut off. Copy it again.")
        if "Rows" not in header:
            _check_no_picture(file, header)
            return []
        slices = _describe(file, header)
        if _is_packed(header):
            _check_packed_count(file, header, stream, len(slices))
        _check_pixel_bytes(file, header, _pixel_bytes(file, header, stream), len(slices))
        return slices


def _check_no_picture(file: StoredFile, header: Any) -> None:
    """Refuse a file without rows that states to be a picture, or does not get as far as to say.

    Raises:
        VolumeError: it ends within its header.
    """
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    kind = pydicom.uid.UID(header.get("SOPClassUID", ""))
    whole = str(header.file_meta.get("MediaStorageSOPClassUID", ""))
    is_cut = not kind or (kind != whole and whole.startswith(kind))
    if is_cut or any(word in kind.name for word in _PICTURES):
        raise VolumeError(
            f"{file} ends within its header: it was cut off, and a slice would be missing. Copy it "
            "again."
        )


def _is_packed(header: Any) -> bool:
    """Whether the pixels of a file are packed, as JPEG or the like."""
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    syntax = pydicom.uid.UID(header.file_meta.get("TransferSyntaxUID", ""))
    return bool(syntax.is_transfer_syntax and syntax.is_compressed)


def _check_packed_count(file: StoredFile, header: Any, stream: BinaryIO, frames: int) -> None:
    """Refuse a file that holds more packed frames than its header states.

    Raises:
        VolumeError: it does.
    """
    encapsulated = import_library("pydicom.encaps", "DICOM", INSTRUMENTS)
    place = stream.tell()
    stream.seek(_EXPLICIT_HEAD, io.SEEK_CUR)
    found = len(encapsulated.parse_basic_offsets(stream))
    extended = _extended_offsets(header)
    if not found and extended is not None:
        found = len(extended[0]) // 8
    if not found:
        _, items = encapsulated.parse_fragments(stream)
        found = sum(_begins_frame(stream, item, header) for item in items)
    stream.seek(place)
    if found > frames:
        raise VolumeError(
            f"{file} holds {found} frames, and its header states {frames}: it is damaged. Copy or "
            "save it again."
        )


def _begins_frame(stream: BinaryIO, item: int, header: Any) -> bool:
    """Whether an item of packed pixels begins a frame; others go on with the one before.

    Each frame of run lengths is one item.
    """
    stream.seek(item + 8)
    return header.file_meta.TransferSyntaxUID == _RUN_LENGTHS or stream.read(2) in _PICTURE_BEGINS


def check_packed_frame(file: BinaryIO, frame: int) -> None:
    """Refuse a frame that is a picture of another extent, before all of that is decoded.

    Args:
        file: the file, which is read from its begin, and left where it was.
        frame: number of the frame.

    Raises:
        ValueError: it is one.
    """
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    encapsulated = import_library("pydicom.encaps", "DICOM", INSTRUMENTS)
    place = file.tell()
    file.seek(0)
    header = pydicom.dcmread(file, stop_before_pixels=True)
    if not _is_packed(header):
        file.seek(place)
        return
    file.seek(_EXPLICIT_HEAD, io.SEEK_CUR)
    content = encapsulated.get_frame(
        file,
        frame,
        extended_offsets=_extended_offsets(header),
        number_of_frames=int(header.get("NumberOfFrames") or 1),
    )
    file.seek(place)
    stated = Extent(int(header.Rows), int(header.Columns))
    if header.file_meta.TransferSyntaxUID == _RUN_LENGTHS:
        values = stated.height * stated.width * int(header.get("SamplesPerPixel", 1))
        needed = values * int(header.BitsAllocated) // 8
        if needed > _MOST_OF_RUNS * len(content):
            raise ValueError(
                f"a frame of {needed:,} bytes cannot be unpacked from {len(content):,}"
            )
        return
    extent = stated_extent(content)
    if extent is not None and extent != stated:
        raise ValueError(
            f"a frame of {stated.height} × {stated.width} holds a picture of {extent.height} × "
            f"{extent.width}"
        )


def _extended_offsets(header: Any) -> tuple[bytes, bytes] | None:
    """Where frames begin, and how long they are, where a header states it."""
    if "ExtendedOffsetTable" not in header or "ExtendedOffsetTableLengths" not in header:
        return None
    return header.ExtendedOffsetTable, header.ExtendedOffsetTableLengths


def _pixel_bytes(file: StoredFile, header: Any, stream: BinaryIO) -> int | None:
    """Bytes of the pixels, which come next in a file; None where they are packed.

    Of a file that was cut off within them, those that are there.

    Raises:
        VolumeError: they are floats.
    """
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    syntax = pydicom.uid.UID(header.file_meta.get("TransferSyntaxUID", ""))
    if not syntax.is_transfer_syntax or _is_packed(header):
        return None
    is_implicit, is_little = header.original_encoding
    order = "<" if is_little else ">"
    head = stream.read(_EXPLICIT_HEAD)
    tag = struct.unpack(f"{order}HH", head[:4]) if len(head) == _EXPLICIT_HEAD else None
    if tag in _FLOAT_PIXEL_DATA:
        raise VolumeError(
            f"{file} holds floats (a parametric map), which are not read here. Save it as NIfTI, "
            "such as with dcmqi."
        )
    if tag != _PIXEL_DATA:
        return None
    behind_kind = 4 if is_implicit else 8
    length: int = struct.unpack_from(f"{order}I", head, behind_kind)[0]
    start = stream.tell() - _EXPLICIT_HEAD + behind_kind + 4
    return min(length, count_bytes(file) - start)


def _check_pixel_bytes(file: StoredFile, header: Any, found: int | None, frames: int) -> None:
    """Refuse a file that has other bytes of pixels than its header requires, such as a frame more.

    Frames that begin within a byte are refused, too: pydicom (3.0.2) does not read one of them.

    Raises:
        VolumeError: it has.
    """
    samples = int(header.get("SamplesPerPixel", 1))
    if found is None or (samples > 1 and "42" in str(header.get("PhotometricInterpretation", ""))):
        return  # in the latter, pixels share colours
    pixels_each = int(header.Rows) * int(header.Columns) * samples
    pixels = frames * pixels_each
    if frames > 1 and pixels_each * int(header.BitsAllocated) % 8:
        raise VolumeError(
            f"{file} has frames of {pixels_each} bits, which begin within bytes, and are not read "
            "here. Save it with a byte for each pixel."
        )
    expected = ceil_div(pixels * int(header.BitsAllocated), 8)
    if found not in (expected, expected + expected % 2):  # elements have even lengths
        raise VolumeError(
            f"{file} has {found:,} bytes of pixels, and its header requires {expected:,}: it is "
            "damaged, or states fewer frames than it has. Copy or save it again."
        )


def _describe(file: StoredFile, header: Any) -> list[DicomSlice]:
    count = int(header.get("NumberOfFrames", 1) or 1)
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    if not 1 <= count <= _MOST_FRAMES or (groups and len(groups) != count):
        raise VolumeError(
            f"{file} states {count} frames, and describes {len(groups)}: it is damaged. Copy it "
            "again."
        )
    _check_vectors(file, header, count)
    _check_segments(file, groups)
    if header.get("ModalityLUTSequence"):
        raise VolumeError(
            f"{file} gives its values by a table (Modality LUT), which is not applied here. Save "
            "it with its values, such as with dcmconv of DCMTK or with dcm2niix."
        )
    bits = int(header.BitsAllocated)
    stored_bits = int(header.get("BitsStored", bits))
    if int(header.get("HighBit", stored_bits - 1)) != stored_bits - 1:
        raise VolumeError(
            f"{file} keeps its {stored_bits} bits of a value below bit {int(header.HighBit) + 1} "
            f"of {bits}, which is not read here. Save it anew, such as with dcmconv of DCMTK or "
            "with dcm2niix."
        )
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
        number_dtype(dtype, str(file)),
        str(header.get("PhotometricInterpretation", "")),
    )
    return [_describe_frame(file, header, frame, count, series, kind) for frame in range(count)]


def _check_segments(file: StoredFile, groups: Sequence[Any]) -> None:
    """Refuse frames of several segments, by what is said of each frame. Raises VolumeError."""
    stated = [_item(each, "SegmentIdentificationSequence", 0) for each in groups]
    segments = {str(each.get("ReferencedSegmentNumber")) for each in stated if each}
    if len(segments) > 1:
        raise VolumeError(
            f"{file} holds {len(segments)} segments, each in frames of its own, which would become "
            "one mask. Save each of them as a file, or all as one volume of labels, such as with "
            "dcmqi."
        )


def _check_vectors(file: StoredFile, header: Any, count: int) -> None:
    """Refuse frames of several energies, times or the like, or slices in another order.

    Raises:
        VolumeError: the vectors of nuclear medicine say so.
    """
    for key in _VECTORS:
        values = header.get(key)
        if values is not None and len(set(np.atleast_1d(values).tolist())) > 1:
            raise VolumeError(
                f"{file} holds frames of several places along {key}: they are no volume. Save each "
                "of them as a file of its own."
            )
    numbers = header.get("SliceVector")
    if numbers is not None and np.atleast_1d(numbers).tolist() != list(range(1, count + 1)):
        raise VolumeError(
            f"{file} numbers its frames otherwise than in the order that they are stored in "
            "(SliceVector), which is not read here. Save it as NIfTI, such as with dcm2niix."
        )


def _describe_frame(
    file: StoredFile,
    header: Any,
    frame: int,
    count: int,
    series: tuple[str, str, str],
    kind: tuple[int, int, int, str, str],
) -> DicomSlice:
    """One of the ``count`` slices of a file: what is said of all holds where it says no more.

    Nuclear medicine says of its detector where the first frame is (PS3.3, C.8.4.11).
    """
    shared = _item(header, "SharedFunctionalGroupsSequence", 0)
    own = _item(header, "PerFrameFunctionalGroupsSequence", frame)
    detector = _item(header, "DetectorInformationSequence", 0)

    def numbers(group: str, key: str, length: int) -> tuple[float, ...] | None:
        groups = (_item(own, group, 0), _item(shared, group, 0), header, detector)
        return _numbers(file, groups, key, length)

    spacing = numbers("PixelMeasuresSequence", "PixelSpacing", 2)
    gap = numbers("PixelMeasuresSequence", "SpacingBetweenSlices", 1) or numbers(
        "PixelMeasuresSequence", "SliceThickness", 1
    )
    along = numbers("PlaneOrientationSequence", "ImageOrientationPatient", 6)
    thickness = None if gap is None else abs(gap[0])
    directions = None if along is None else (along[:3], along[3:])
    position = numbers("PlanePositionSequence", "ImagePositionPatient", 3)
    if count > 1 and position is not None and not _has_position(own):
        distance = None if gap is None else gap[0]
        position = _step_along(header, position, directions, frame, count, distance)
    (slope,) = numbers("PixelValueTransformationSequence", "RescaleSlope", 1) or (1.0,)
    (intercept,) = numbers("PixelValueTransformationSequence", "RescaleIntercept", 1) or (0.0,)
    dose = _numbers(file, (header,), "DoseGridScaling", 1)  # of volumes of dose, in place of these
    slope *= 1.0 if dose is None else dose[0]
    if slope == 0 or max(abs(slope), abs(intercept)) > _LARGEST_SCALE:
        raise VolumeError(
            f"{file} states the slope {slope:g} and the intercept {intercept:g} of its values, "
            "which are no scale: it is damaged. Copy or save it again."
        )
    return DicomSlice(
        file=file,
        frame=frame,
        series=series,
        space=str(header.get("FrameOfReferenceUID", "") or ""),
        kind=kind,
        spacing=None if spacing is None else (spacing[0], spacing[1]),
        thickness=thickness,
        directions=directions,
        position=position,
        number=int(header.get("InstanceNumber", 0) or 0),
        scaling=(slope, intercept),
        is_packed=_is_packed(header),
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

    Volumes of dose list where the others are, in GridFrameOffsetVector. A negative gap leads
    against the normal of the first frame (PS3.3, C.8.4.15).
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


def _numbers(
    file: StoredFile, groups: Sequence[Any], key: str, count: int
) -> tuple[float, ...] | None:
    """Numbers of the first of several groups that states them; None where none does.

    Raises:
        VolumeError: they are not finite.
    """
    for place in groups:
        value = None if place is None else place.get(key)
        if value is not None and value != "":
            numbers = tuple(float(each) for each in (value if count > 1 else [value]))
            if not np.isfinite(numbers).all():
                raise VolumeError(f"{file} states the {key} {numbers}: it is damaged")
            return numbers if len(numbers) == count else None
    return None
