"""DICOM series: a folder or glob of files of one slice each, or one file of many frames.

In object stores and on web servers, a range of numbers or a list may name them.
"""

from __future__ import annotations

import glob
import io
import math
import struct
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.conversion.picture_headers import Extent, stated_extent
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
from beam_inference.conversion.raw_array import scale_values
from beam_inference.conversion.stored_files import (
    FILES_AT_A_TIME,
    StoredFile,
    count_bytes,
    find_files,
    hash_contents,
    is_url,
    open_stream,
    suffix_of,
)
from beam_inference.errors import (
    BeamInferenceError,
    PermanentReadError,
    VolumeError,
    WorkerFault,
)
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, ceil_div
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.remote_files import RemoteFile
from beam_inference.volumes.remote_names import is_range, list_remote_files, names_files

_DEFLATED = "1.2.840.10008.1.2.1.99"
_MM_NM = 1e6
_SAME_SPACING = 0.01
"""Part of a spacing by which others may differ from it, as positions are rounded."""
_SAME_DIRECTION = 1e-3
"""By how much cosines of one direction may differ, as they are rounded."""
_MOST_FRAMES = 10**5
_LARGEST_SCALE = float(np.finfo(np.float32).max)
_NAMES_IN_MESSAGE = 10
_HEADER_BYTES = 2**24
"""Bytes that a file of a slice may have beyond twice its voxels, in an object store."""
_BEHIND_META = 0x00030000
"""The first tag behind those of the group that says how the others are written."""
_PREAMBLE_BYTES = 132
_PICTURES = ("Image Storage", "Dose Storage", "Segmentation Storage", "Parametric Map")
"""Words in the names of the classes of files that hold pictures."""
_PIXEL_DATA = (0x7FE0, 0x0010)
"""Group and number of the element that holds the pixels, unless they are floats."""
_EXPLICIT_HEAD = 12
"""Bytes before its content, where they state its kind."""

_RUN_LENGTHS = "1.2.840.10008.1.2.5"
"""The transfer syntax whose frames are packed as runs of equal bytes."""

_MOST_OF_RUNS = 64
"""Bytes that a byte of run lengths unpacks to, at most."""

_PICTURE_BEGINS = (b"\xff\xd8", b"\xff\x4f")
"""Begins of JPEG and JPEG-LS, and of JPEG 2000."""


@dataclass(frozen=True, slots=True)
class _Slice:
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


@dataclass(frozen=True, slots=True)
class DicomSeries:
    """A series of slices.

    Attributes:
        frames: the file of each slice, and its number in the file, in the order of z.
        files_hash: hash of the files' names, sizes and times; in object stores, of their names
            and generations.
        stored_dtype: name of the dtype of the stored values.
        scalings: slope and intercept of each slice; empty where values are those stored.
        is_packed: whether the pixels of some are packed, as JPEG or the like.
        info: its extent, dtype, and so on.
    """

    frames: tuple[tuple[StoredFile, int], ...]
    files_hash: str
    stored_dtype: str
    scalings: tuple[tuple[float, float], ...]
    is_packed: bool
    info: SourceInfo

    @property
    def identity(self) -> Json:
        """The folder, and a hash of the files' names and contents, as far as these are known."""
        return {"dicom": self._folder, "files": self.files_hash}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return [file for file, _ in self.frames]

    @property
    def _folder(self) -> str:
        first = self.frames[0][0]
        if isinstance(first, RemoteFile):
            return first.url.rpartition("/")[0]
        return str(Path(first).parent)

    def open(self) -> Read:
        """Look whether the files are those that were there at the launch.

        Of those in object stores, that is seen when they are read.
        """
        if _hash_of_files(self.frames) != self.files_hash:
            raise WorkerFault(f"the files of {self._folder} are not those of the launch")
        counts = Counter(file for file, _ in self.frames)
        at_a_time = FILES_AT_A_TIME if isinstance(self.frames[0][0], RemoteFile) else 1

        def read(box: BoundingBox) -> Voxels:
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)
            depth, y, x = box.slices_in(self.info.bounds)

            def read_file(numbers: Sequence[int]) -> None:
                file = self.frames[numbers[0]][0]
                stream = self._open_file(file, counts[file])
                for z in numbers:
                    plane = self._decode(file, stream, self.frames[z][1])[:, y, x]
                    if self.scalings:
                        slope, intercept = self.scalings[z]
                        plane = scale_values(plane, slope, intercept)
                    out[:, z - depth.start] = plane

            planes = range(depth.start, depth.stop)
            tasks = [list(run) for _, run in groupby(planes, lambda z: self.frames[z][0])]
            with ThreadPoolExecutor(at_a_time) as executor:
                for _ in executor.map(read_file, tasks):
                    pass  # raises what was raised there
            return out

        return read

    def _open_file(self, file: StoredFile, frames: int) -> str | BinaryIO:
        """What pydicom takes: of an object store, a file of one slice is read whole, at once."""
        if not isinstance(file, RemoteFile):
            return file
        if frames > 1:
            return file.open()
        stored = np.dtype(self.stored_dtype).itemsize * self.info.channels
        most = 2 * stored * math.prod(self.info.bounds.shape[1:]) + _HEADER_BYTES
        return io.BytesIO(file.read_whole(most))

    def _decode(self, file: StoredFile, stream: str | BinaryIO, frame: int) -> Voxels:
        """Decode one frame of a file: (channels, y, x).

        Raises:
            PermanentReadError: it is damaged.
        """
        pydicom = import_library("pydicom.pixels", "DICOM", INSTRUMENTS)
        try:
            if self.is_packed:
                with open(stream, "rb") if isinstance(stream, str) else nullcontext(stream) as own:
                    _check_packed_frame(own, frame)
            array = pydicom.pixel_array(stream, index=frame)
            if array.dtype.newbyteorder("=").name != self.stored_dtype:
                raise ValueError(f"it holds {array.dtype}, expected {self.stored_dtype}")
            has_channels = self.info.channels > 1
            plane: Voxels = np.moveaxis(array, -1, 0) if has_channels else array[np.newaxis]
            expected = (self.info.channels, *self.info.bounds.shape[1:])
            if plane.shape != expected:
                raise ValueError(f"it has the shape {plane.shape}, expected {expected}")
        except BeamInferenceError:
            raise
        except Exception as error:  # pydicom raises whatever a value runs into
            reason = " ".join(str(error).split())
            raise PermanentReadError(f"cannot read {file}: {reason}") from error
        return plane


def dicom_series(pattern: str, name: str | None, storage: Storage = LOCAL) -> DicomSeries:
    """A series of a folder, a glob or a file; the headers of all files are read.

    Args:
        pattern: path of a folder or a file, or a glob; URL of a file, a glob, a range or a list.
        name: identifier or number of the series; None if there is one alone.
        storage: how object stores are reached.

    Raises:
        VolumeError: there is none, or its slices do not make a volume.
        ConfigError: pydicom is not installed.
    """
    import_library("pydicom", "DICOM", INSTRUMENTS)
    files = _remote_files(pattern, storage) if is_url(pattern) else _paths(pattern)
    at_a_time = FILES_AT_A_TIME if is_url(pattern) else 1
    with ThreadPoolExecutor(at_a_time) as executor:
        headers = [each for found in executor.map(_read_header, files) for each in found]
    if not headers:
        raise VolumeError(f"{pattern} holds DICOM files, but no pictures")
    return _make_series(pattern, _choose_series(pattern, headers, name))


def is_dicom_folder(folder: Path) -> bool:
    """Whether the files of a folder are DICOM's, by their names or the first one's content."""
    return holds_dicom(sorted(str(each) for each in folder.iterdir() if each.is_file()), LOCAL)


def holds_dicom(paths: Sequence[str], storage: Storage) -> bool:
    """Whether files are DICOM's, by their names or the content of the first without a suffix.

    Args:
        paths: paths of files, or URLs.
        storage: how object stores are reached.
    """
    suffixes = [Path(path).suffix.lower() for path in paths]
    if ".dcm" in suffixes:
        return True
    plain = [
        path
        for path, suffix in zip(paths, suffixes, strict=True)
        if suffix == "" or suffix[1:].isdecimal()
    ]
    return bool(plain) and all(map(_is_dicom, find_files(plain[:1], storage)))


def _is_dicom(file: StoredFile) -> bool:
    with open_stream(file) as stream:
        return stream.read(_PREAMBLE_BYTES)[128:] == b"DICM"


def _paths(pattern: str) -> list[StoredFile]:
    path = Path(pattern)
    if path.is_file():
        return [pattern]
    found = path.iterdir() if path.is_dir() else map(Path, glob.iglob(pattern))
    paths = sorted(
        str(each.absolute()) for each in found if each.is_file() and each.name != "DICOMDIR"
    )
    return _choose_dicom(pattern, paths, [_is_dicom(each) for each in paths])


def _remote_files(url: str, storage: Storage) -> list[StoredFile]:
    """The DICOM files that a URL names; other files are left out, but for those of a range."""
    if not names_files(url):
        return find_files([url], storage)
    urls = [each for each in list_remote_files(url, storage) if not each.endswith("/DICOMDIR")]
    files = find_files(urls, storage)
    with ThreadPoolExecutor(FILES_AT_A_TIME) as executor:
        are_dicom = list(executor.map(_is_dicom, files))
    if is_range(url) and not all(are_dicom):
        raise VolumeError(f"{files[are_dicom.index(False)]} is no DICOM file")
    return _choose_dicom(url, files, are_dicom)


def _choose_dicom(
    pattern: str, files: Sequence[StoredFile], are_dicom: Sequence[bool]
) -> list[StoredFile]:
    """The files that are DICOM's.

    Raises:
        VolumeError: there are none, or another one looks like a slice of which little is left.
    """
    found = [file for file, is_dicom in zip(files, are_dicom, strict=True) if is_dicom]
    if not found:
        raise VolumeError(f"{pattern} holds no DICOM files")
    kinds = {_kind_of_name(file) for file in found}
    for file, is_dicom in zip(files, are_dicom, strict=True):
        if is_dicom:
            continue
        kind = _kind_of_name(file)
        size = count_bytes(file)
        if kind == ".dcm" or (kind in kinds and size < _PREAMBLE_BYTES):
            raise VolumeError(
                f"{file} has the name of a DICOM file, but does not begin as one, and has "
                f"{size:,} bytes: a slice would be missing. Copy it again; or name the others "
                "alone, if it is none of them."
            )
    return found


def _kind_of_name(file: StoredFile) -> str:
    """The suffix of a file; the numbers that scanners put there are none."""
    suffix = suffix_of(file)
    return "" if suffix[1:].isdecimal() else suffix


def _read_header(file: StoredFile) -> list[_Slice]:
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


def _check_packed_frame(file: BinaryIO, frame: int) -> None:
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
    """Bytes of the pixels, which come next in a file; None where they are packed, or floats.

    Of a file that was cut off within them, those that are there.
    """
    pydicom = import_library("pydicom", "DICOM", INSTRUMENTS)
    syntax = pydicom.uid.UID(header.file_meta.get("TransferSyntaxUID", ""))
    if not syntax.is_transfer_syntax or _is_packed(header):
        return None
    is_implicit, is_little = header.original_encoding
    order = "<" if is_little else ">"
    head = stream.read(_EXPLICIT_HEAD)
    if head[:4] != struct.pack(f"{order}HH", *_PIXEL_DATA) or len(head) < _EXPLICIT_HEAD:
        return None
    behind_kind = 4 if is_implicit else 8
    length: int = struct.unpack_from(f"{order}I", head, behind_kind)[0]
    start = stream.tell() - _EXPLICIT_HEAD + behind_kind + 4
    return min(length, count_bytes(file) - start)


def _check_pixel_bytes(file: StoredFile, header: Any, found: int | None, frames: int) -> None:
    """Refuse a file that has other bytes of pixels than its header requires, such as a frame more.

    Raises:
        VolumeError: it has.
    """
    samples = int(header.get("SamplesPerPixel", 1))
    if found is None or (samples > 1 and "42" in str(header.get("PhotometricInterpretation", ""))):
        return  # in the latter, pixels share colours
    pixels = frames * int(header.Rows) * int(header.Columns) * samples
    expected = ceil_div(pixels * int(header.BitsAllocated), 8)
    if found not in (expected, expected + expected % 2):  # elements have even lengths
        raise VolumeError(
            f"{file} has {found:,} bytes of pixels, and its header requires {expected:,}: it is "
            "damaged, or states fewer frames than it has. Copy or save it again."
        )


def _describe(file: StoredFile, header: Any) -> list[_Slice]:
    count = int(header.get("NumberOfFrames", 1) or 1)
    groups = header.get("PerFrameFunctionalGroupsSequence") or []
    if not 1 <= count <= _MOST_FRAMES or (groups and len(groups) != count):
        raise VolumeError(
            f"{file} states {count} frames, and describes {len(groups)}: it is damaged. Copy it "
            "again."
        )
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


def _describe_frame(
    file: StoredFile,
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
        position = _step_along(header, position, directions, frame, count, thickness)
    (slope,) = numbers("PixelValueTransformationSequence", "RescaleSlope", 1) or (1.0,)
    (intercept,) = numbers("PixelValueTransformationSequence", "RescaleIntercept", 1) or (0.0,)
    dose = _numbers(file, (header,), "DoseGridScaling", 1)  # of volumes of dose, in place of these
    slope *= 1.0 if dose is None else dose[0]
    if slope == 0 or max(abs(slope), abs(intercept)) > _LARGEST_SCALE:
        raise VolumeError(
            f"{file} states the slope {slope:g} and the intercept {intercept:g} of its values, "
            "which are no scale: it is damaged. Copy or save it again."
        )
    return _Slice(
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
    if len({each.space for each in slices}) > 1:
        raise VolumeError(
            f"the slices of {pattern} are in several frames of reference (FrameOfReferenceUID), "
            "whose positions cannot be compared. Move those of the other ones elsewhere."
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
    frames = tuple((each.file, each.frame) for each in ordered)
    source = DicomSeries(
        frames=frames,
        files_hash=_hash_of_files(frames),
        stored_dtype=first.kind[3],
        scalings=scalings if is_scaled else (),
        is_packed=any(each.is_packed for each in ordered),
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
    name = Path(str(each.file)).name
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


def _hash_of_files(frames: Sequence[tuple[StoredFile, int]]) -> str:
    return hash_contents(dict.fromkeys(file for file, _ in frames))
