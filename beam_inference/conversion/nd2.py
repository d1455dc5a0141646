"""ND2, the files of Nikon's microscopes: frames of all channels, in loops over z and time."""

from __future__ import annotations

import math
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.conversion.planes import (
    Image,
    PlaneSource,
    ReadPlane,
    choose_volume,
    instrument_source,
    nm_of_micrometres,
)
from beam_inference.conversion.protocol import (
    INSTRUMENTS,
    SourceInfo,
    Voxels,
    check_shape,
    import_library,
    number_dtype,
    stated_voxel_size,
)
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm

_IN_A_FRAME = "CSYX"
_MOST_FRAMES = 10**7
_HEADER_BYTES = 4096 + 24
"""Bytes of the file before the voxels of a frame, from where its chunk begins."""

_ROW_ALIGNMENT = 4
"""Bytes whose multiples rows take, as those of Windows' bitmaps."""

_FRAME_NAME = b"ImageDataSeq|"
_TIME_BYTES = 8
"""Bytes of a chunk's data before the voxels of its frame."""


def nd2_source(path: str, name: str | None) -> PlaneSource:
    """A volume of an ``.nd2`` file; with positions or times, "P0", "T0", "P0/T0" and so on.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: nd2 is not installed.
    """
    import_library("nd2", "ND2", INSTRUMENTS)
    return instrument_source(path, "ND2", name, describe_nd2)


def describe_nd2(path: str, name: str | None) -> PlaneSource:
    """Read the header of a file, and check that it has all its frames."""
    with import_library("nd2", "ND2", INSTRUMENTS).ND2File(path) as file:
        if file.is_legacy:
            raise VolumeError(
                f"{path} is an ND2 file of before 2008, made of JPEG 2000 pictures. Save it anew "
                "with NIS-Elements, or as OME-TIFF with Bio-Formats."
            )
        chosen = choose_volume(path, [_image(file)], name)
        attributes = file.attributes
        shape = (_loops(file).get("Z", 1), int(attributes.heightPx), int(attributes.widthPx or 0))
        check_shape(path, shape)
        notes = _check_frames(path, file)
        info = SourceInfo(
            BoundingBox((0, 0, 0), shape),
            int(attributes.componentCount),
            number_dtype(file.dtype, path),
            _voxel_size(file) if shape[0] > 1 else None,
            (1, *shape[1:]),
            notes,
        )
    return PlaneSource(path, chosen.name, info, open_nd2)


def open_nd2(path: str, volume: str) -> ReadPlane:
    """Open a file for reading planes."""
    file = import_library("nd2", "ND2", INSTRUMENTS).ND2File(path)
    chosen = choose_volume(path, [_image(file)], volume)
    loops = _loops(file)
    attributes = file.attributes
    channels = int(attributes.channelCount or 1)
    shape = (
        channels,
        int(attributes.heightPx),
        int(attributes.widthPx or 0),
        int(attributes.componentCount) // channels,
    )
    chunks = file._rdr.chunkmap if attributes.compressionType == "lossless" else {}
    most = math.prod(shape) * file.dtype.itemsize + int(attributes.widthBytes or 0)

    def read_plane(z: int, window: BoundingBox) -> Voxels:
        _, y, x = (slice(a, b) for a, b in zip(window.start, window.stop, strict=True))
        positions = chosen.positions | {"Z": z}
        number = 0
        for axis, length in loops.items():
            number = number * length + (positions[axis] if length > 1 else 0)
        if chunks:
            _check_unpacked_size(path, chunks[_chunk_name(number)], most)
        frame = file.read_frame(number).reshape(shape)
        czyx = np.moveaxis(frame, 3, 1).reshape(-1, *shape[1:3])
        window_of_it: Voxels = czyx[:, y, x]
        return window_of_it

    weakref.finalize(read_plane, file.close)
    return read_plane


def _voxel_size(file: Any) -> VoxelSizeNm | None:
    """The voxel size; None where there is none, or its library does not understand the metadata."""
    try:
        volume = file.metadata.channels[0].volume
    except Exception:  # it interprets dyes and filters on the way
        return None
    # Without a calibration its library says 1 µm.
    if not all(volume.axesCalibrated) or set(volume.axesInterpretation) != {"distance"}:
        return None
    x, y, z = volume.axesCalibration
    return stated_voxel_size(nm_of_micrometres(each) for each in (z, y, x))


def _loops(file: Any) -> dict[str, int]:
    """Letters and lengths of the loops over frames, slowest first."""
    import_library("nd2", "ND2", INSTRUMENTS)
    from nd2._util import AXIS

    loops = {str(AXIS._MAP[loop.type]): int(loop.count) for loop in file.experiment}
    loops.setdefault("Z", 1)
    return loops


def _image(file: Any) -> Image:
    further = tuple((axis, n) for axis, n in _loops(file).items() if axis != "Z" and n > 1)
    return Image("", further)


def _chunk_name(frame: int) -> bytes:
    return _FRAME_NAME + b"%d!" % frame


def _check_frames(path: str, file: Any) -> tuple[str, ...]:
    """Refuse a file that has other frames than it states, or frames of another size.

    Of frames that are absent its library would return zeros.

    Returns:
        A note where frames may have more rows than are stated.

    Raises:
        VolumeError: it has.
    """
    count = math.prod(_loops(file).values())
    if count > _MOST_FRAMES:
        raise VolumeError(f"{path} states {count} frames: it is damaged. Copy it again.")
    attributes = file.attributes
    row_bytes = int(attributes.widthBytes or 0)
    voxel_bytes = int(attributes.componentCount) * file.dtype.itemsize
    needed = int(attributes.widthPx or 0) * voxel_bytes
    if not needed <= row_bytes < needed + _ROW_ALIGNMENT:
        raise VolumeError(
            f"{path} states rows of {attributes.widthPx} voxels of {voxel_bytes} bytes, which "
            f"begin every {row_bytes} bytes: it is damaged. Copy it again."
        )
    is_packed = attributes.compressionType == "lossless"
    frame_bytes = 1 if is_packed else row_bytes * int(attributes.heightPx)
    size = Path(path).stat().st_size
    chunks = file._rdr.chunkmap
    stored = sum(name.startswith(_FRAME_NAME) for name in chunks)
    if stored > count:
        raise VolumeError(
            f"{path} holds {stored} frames, and its loops over z, time and positions state "
            f"{count}: which voxels the others are is not known. Save it anew with NIS-Elements, "
            "or as OME-TIFF."
        )

    def is_absent(number: int) -> bool:
        start, stated = chunks.get(_chunk_name(number), (-1, 0))
        if not 0 <= start <= size - _HEADER_BYTES - frame_bytes:
            return True
        if stated >= _TIME_BYTES + frame_bytes:
            return False
        return _data_bytes(path, start) < _TIME_BYTES + frame_bytes

    absent = [number for number in range(count) if is_absent(number)]
    if absent:
        raise VolumeError(
            f"{path} lacks {len(absent)} of its {count} frames, the first is {absent[0]}: the "
            "recording was stopped, or the file was cut off. Copy it again, or save what there is "
            "with NIS-Elements."
        )
    held = 0 if is_packed else _data_bytes(path, chunks[_chunk_name(0)][0]) - _TIME_BYTES
    if held >= 2 * frame_bytes > 0:
        raise VolumeError(
            f"{path} states frames of {frame_bytes} bytes, and holds {held} of the first: its "
            "height, its width or its dtype is not what it states. Copy it again."
        )
    if held >= frame_bytes + row_bytes:
        rows = (held - frame_bytes) // row_bytes
        return (
            f"its frames hold {held} bytes, {rows} rows more than the {attributes.heightPx} that "
            "it states: these are not read",
        )
    return ()


def _data_bytes(path: str, start: int) -> int:
    """Bytes of a chunk's data, as the chunk itself says."""
    with Path(path).open("rb") as file:
        file.seek(start)
        return int(np.frombuffer(file.read(16), np.uint64)[1])


def _check_unpacked_size(path: str, chunk: tuple[int, int], most: int) -> None:
    """Refuse a frame that unpacks to more than its voxels: the library unpacks all of it."""
    start, _ = chunk
    with Path(path).open("rb") as file:
        file.seek(start)
        magic_and_lengths = np.frombuffer(file.read(16), np.uint32)
        file.seek(int(magic_and_lengths[1]) + 8, 1)
        packed = file.read(int(magic_and_lengths[2]) - 8)
    if len(zlib.decompressobj().decompress(packed, most + 1)) > most:
        raise ValueError("a frame unpacks to more than its voxels")
