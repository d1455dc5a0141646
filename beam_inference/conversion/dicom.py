"""DICOM series: a folder or glob of files of one slice each, or one file of many frames.

In object stores and on web servers, a range of numbers or a list may name them.
"""

from __future__ import annotations

import io
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.conversion.dicom_files import list_dicom_files
from beam_inference.conversion.dicom_slices import DicomSlice, check_packed_frame, read_slices
from beam_inference.conversion.protocol import (
    INSTRUMENTS,
    Placement,
    Read,
    SourceInfo,
    Voxels,
    check_shape,
    import_library,
    placement_in_space,
)
from beam_inference.conversion.raw_array import scale_values
from beam_inference.conversion.stored_files import (
    FILES_AT_A_TIME,
    StoredFile,
    hash_contents,
    is_url,
)
from beam_inference.environment import filter_logs
from beam_inference.errors import BeamInferenceError, PermanentReadError, VolumeError, WorkerFault
from beam_inference.foreign_text import describe_error
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.remote_files import RemoteFile

_MM_NM = 1e6

_SAME_SPACING = 0.01
"""Part of a spacing by which others may differ from it, as positions are rounded."""

_SAME_DIRECTION = 1e-3
"""By how much cosines of one direction may differ, as they are rounded."""

_LOGGERS_OF_PYDICOM = ("pydicom", "pydicom.pixels.decoders.base")

_TOO_MANY_BYTES = "non-conformant padding"
"""Words of pydicom's warning of a frame that unpacks to more bytes than it has voxels."""

_NAMES_IN_MESSAGE = 10

_HEADER_BYTES = 2**24
"""Bytes that a file of a slice may have beyond twice its voxels, in an object store."""


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
                    check_packed_frame(own, frame)
            with _faults_of_decoder() as faults:
                array = pydicom.pixel_array(stream, index=frame)
            if faults:
                raise ValueError(faults[0])
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
            reason = describe_error(error, with_type=False)
            raise PermanentReadError(f"cannot read {file}: {reason}") from error
        return plane


@contextmanager
def _faults_of_decoder() -> Iterator[list[str]]:
    """Collect the frames of too many bytes that pydicom takes with a warning, in this thread.

    Tracebacks that it logs of what it raises are left out.
    """
    faults: list[str] = []

    def is_shown(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if _TOO_MANY_BYTES in text:
            faults.append(text)
        return _TOO_MANY_BYTES not in text and record.levelno < logging.ERROR

    with filter_logs(_LOGGERS_OF_PYDICOM, is_shown):
        yield faults


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
    files = list_dicom_files(pattern, storage)
    at_a_time = FILES_AT_A_TIME if is_url(pattern) else 1
    with ThreadPoolExecutor(at_a_time) as executor:
        headers = [each for found in executor.map(read_slices, files) for each in found]
    if not headers:
        raise VolumeError(f"{pattern} holds DICOM files, but no pictures")
    return _make_series(pattern, _choose_series(pattern, headers, name))


def _choose_series(
    pattern: str, headers: Sequence[DicomSlice], name: str | None
) -> list[DicomSlice]:
    """The slices of a series.

    Raises:
        VolumeError: there is none of that name, or there are several and none was named.
    """
    groups: dict[tuple[str, str, str], list[DicomSlice]] = {}
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


def _make_series(pattern: str, slices: Sequence[DicomSlice]) -> DicomSeries:
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
    notes = _value_notes(first.kind[4]) + _order_notes(ordered)
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


def _check_spacings(pattern: str, slices: Sequence[DicomSlice]) -> None:
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


def _order_notes(slices: Sequence[DicomSlice]) -> tuple[str, ...]:
    """What a person should know of slices that are in the order of their numbers."""
    if len(slices) == 1 or slices[0].number == slices[-1].number or _is_located(slices[0]):
        return ()
    missing = slices[-1].number - slices[0].number + 1 - len({each.number for each in slices})
    states = "positions, but not in which directions rows and columns go"
    if all(each.position is None for each in slices):
        states = "no positions in space"
    note = f"its slices state {states}: they are in the order of their numbers (InstanceNumber)"
    return (f"{note}, of which {missing} are missing" if missing else note,)


def _is_located(each: DicomSlice) -> bool:
    return each.directions is not None and each.position is not None


def _value_notes(meaning: str) -> tuple[str, ...]:
    """What a person should know of values that are not the larger the brighter."""
    if meaning == "PALETTE COLOR":
        return ("its table of colours is not kept, its values are",)
    if meaning == "MONOCHROME1":
        return ("its values mean the brighter the smaller they are, and are kept so",)
    return ()


def _name(each: DicomSlice) -> str:
    name = Path(str(each.file)).name
    return f"frame {each.frame} of {name}" if each.frame else name


def _in_order(pattern: str, slices: Sequence[DicomSlice]) -> list[DicomSlice]:
    """Slices in the order of z: by their positions in space, or where none has one, by numbers.

    Raises:
        VolumeError: they do not make a volume: two are at one place, some are missing, turned
            or shifted, or do not state their position.
    """
    located = [each for each in slices if _is_located(each)]
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


def _at_one_place(pattern: str, one: DicomSlice, other: DicomSlice) -> VolumeError:
    return VolumeError(
        f"two slices of {pattern} are at one place: {_name(one)} and {_name(other)}. Move those "
        "of other times or echoes elsewhere."
    )


def _heights(pattern: str, slices: Sequence[DicomSlice]) -> list[float]:
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


def _check_distances(pattern: str, slices: Sequence[DicomSlice], heights: AnyArray) -> None:
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


def _placement(slices: Sequence[DicomSlice]) -> Placement:
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


def _depth(slices: Sequence[DicomSlice]) -> float | None:
    """Distance of neighbouring slices, in millimetres; None where it is not known."""
    first = slices[0]
    if len(slices) == 1 or first.directions is None or first.position is None:
        return first.thickness
    normal = np.cross(first.directions[0], first.directions[1])
    away = np.array([each.position for each in slices]) - np.array(first.position)
    heights = away @ normal
    return float(heights[-1] - heights[0]) / (len(slices) - 1)


def _hash_of_files(frames: Sequence[tuple[StoredFile, int]]) -> str:
    return hash_contents(dict.fromkeys(file for file, _ in frames))
