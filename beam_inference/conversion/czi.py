"""CZI, the files of Zeiss's microscopes: tiles of planes, with scenes, times and further axes."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from xml.etree import ElementTree

import numpy as np

from beam_inference.conversion.planes import (
    ChosenVolume,
    Image,
    PlaneSource,
    ReadPlane,
    choose_volume,
    instrument_source,
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

_AXES = "CZYX"
_MOSAIC = "M"
_METRE_NM = 1e9
_FEW = 5
_JPEG = 1
_LZW = 2
_JPEG_XR = 4
_ZSTD = 5
_ZSTD_WITH_HEADER = 6
_COMPRESSIONS = {0, _JPEG, _LZW, _JPEG_XR, _ZSTD, _ZSTD_WITH_HEADER}
_UNCLEAR_PIXELS = {"Gray32": "Gray32 (12)", "Gray64": "Gray64 (13)"}
"""Types of pixels that czifile takes for signed integers, libCZI and Bio-Formats for others."""
_HILO = 3
"""Bytes of the header of a tile whose low and high bytes lie apart."""


def czi_source(path: str, name: str | None) -> PlaneSource:
    """A volume of a ``.czi`` file; with scenes or times, "S0", "T0", "S0/T0" and so on.

    Raises:
        VolumeError: it cannot be read as one volume of numbers.
        ConfigError: czifile or imagecodecs is not installed.
    """
    import_library("czifile", "CZI", INSTRUMENTS)
    import_library("imagecodecs", "CZI", INSTRUMENTS)
    return instrument_source(path, "CZI", name, describe_czi)


_Area: TypeAlias = tuple[int, int, int, int]
"""Rows and columns of a plane: the first and behind the last of each."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """A tile of a plane.

    Attributes:
        entry: czifile's entry of it in the file's directory.
        positions: of its first voxel, by the letters of all axes.
        shape: its height and width.
    """

    entry: Any
    positions: dict[str, int]
    shape: tuple[int, int]

    @property
    def order(self) -> int:
        """Where tiles overlap, the one of the highest order is seen."""
        return self.positions.get(_MOSAIC, 0)


def describe_czi(path: str, name: str | None) -> PlaneSource:
    """Read the header of a file and its list of tiles."""
    with _open(path) as czi:
        tiles = _tiles(path, czi)
        chosen, chosen_tiles = _choose(path, tiles, name)
        first = chosen_tiles[0]
        bounds = _bounds(chosen_tiles)
        channels = 1 + max(tile.positions.get("C", 0) for tile in chosen_tiles)
        samples = _samples(first.entry)
        check_shape(path, (channels, *bounds.shape))
        info = SourceInfo(
            BoundingBox((0, 0, 0), bounds.shape),
            channels * samples,
            number_dtype(_dtype(first.entry), path),
            _voxel_size(czi, depth=bounds.shape[0]),
            (
                1,
                max(tile.shape[0] for tile in chosen_tiles),
                max(tile.shape[1] for tile in chosen_tiles),
            ),
            _gap_notes(chosen_tiles, bounds, channels) + _size_notes(path, czi, tiles),
        )
    return PlaneSource(path, chosen.name, info, open_czi)


def open_czi(path: str, volume: str) -> ReadPlane:
    """Open a file for reading planes."""
    czi = _open(path)
    _, tiles = _choose(path, _tiles(path, czi), volume)
    bounds = _bounds(tiles)
    samples = _samples(tiles[0].entry)
    dtype = _dtype(tiles[0].entry)
    channels = 1 + max(tile.positions.get("C", 0) for tile in tiles)
    by_depth: dict[int, list[_Tile]] = {}
    for tile in sorted(tiles, key=lambda each: each.order):
        by_depth.setdefault(tile.positions.get("Z", 0) - bounds.start[0], []).append(tile)
    lock = threading.Lock()

    def read_plane(z: int, window: BoundingBox) -> Voxels:
        out = np.zeros((channels, samples, *window.shape[1:]), dtype)
        plane = BoundingBox((0, *window.start[1:]), (1, *window.stop[1:]))
        for tile in by_depth.get(z, []):
            y, x = (tile.positions[axis] - bounds.start[k] for k, axis in ((1, "Y"), (2, "X")))
            area = BoundingBox((0, y, x), (1, y + tile.shape[0], x + tile.shape[1]))
            both = plane.intersection(area)
            if not both.size:
                continue
            with lock:
                segment = tile.entry.data_segment()
                _check_is_listed(segment.directory_entry, tile.entry)
                data = segment.data(raw=True)
            voxels = _decode(data, tile)
            to = (slice(None), *both.slices_in(plane)[1:])
            out[tile.positions.get("C", 0)][to] = voxels[(slice(None), *both.slices_in(area)[1:])]
        flat: Voxels = out.reshape(-1, *window.shape[1:])
        return flat

    weakref.finalize(read_plane, czi.close)
    return read_plane


def _open(path: str) -> Any:
    """Open a file that is complete, and whose tiles are all in it.

    Raises:
        VolumeError: it is not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what czifile warns of is looked at here
        czi = import_library("czifile", "CZI", INSTRUMENTS).CziFile(
            path, multifile=False, detectmosaic=False
        )
    try:
        _check_header(path, czi.header)
    except VolumeError:
        czi.close()
        raise
    return czi


def _check_header(path: str, header: Any) -> None:
    if header.file_part:
        raise VolumeError(
            f"{path} is a part of a CZI data set in several files: save it as one file with ZEN"
        )
    if header.update_pending or not header.directory_position:
        raise VolumeError(
            f"{path} was not completed by the microscope: its list of tiles is not to be trusted. "
            "Open it in ZEN, and save it."
        )
    if not 0 < header.directory_position < Path(path).stat().st_size:
        raise VolumeError(f"{path} ends before its list of tiles: it was cut off. Copy it again.")


def _tiles(path: str, czi: Any) -> list[_Tile]:
    """The tiles of a file, without those of its coarser scales.

    Raises:
        VolumeError: there are none, or they cannot be read.
    """
    size = Path(path).stat().st_size
    tiles = []
    for entry in czi.subblock_directory:
        dimensions = {dimension.dimension: dimension for dimension in entry.dimension_entries}
        if len(dimensions) < len(entry.dimension_entries):
            raise VolumeError(
                f"{path} lists a tile that has two positions along one axis: it is damaged. Copy "
                "it again."
            )
        if not {"X", "Y"} <= dimensions.keys():
            continue
        if any(each.stored_size != each.size for each in dimensions.values()):
            continue
        _check_tile(path, entry, dimensions, size)
        positions = {axis: int(each.start) for axis, each in dimensions.items()}
        tiles.append(_Tile(entry, positions, (dimensions["Y"].size, dimensions["X"].size)))
    if not tiles:
        raise VolumeError(f"{path} holds no image")
    places = Counter(tuple(sorted(tile.positions.items())) for tile in tiles)
    (place, count), *_ = places.most_common(1)
    if count > 1:
        where = ", ".join(f"{axis} {position}" for axis, position in place)
        raise VolumeError(
            f"{path} lists {count} tiles at one place ({where}), and does not say which of them is "
            "to be seen: it is damaged. Copy it again, or save it with ZEN."
        )
    return tiles


def _check_tile(path: str, entry: Any, dimensions: Mapping[str, Any], size: int) -> None:
    """Check what the list of a file of ``size`` bytes says of a tile.

    Raises:
        VolumeError: the tile is not in the file, or cannot be read.
    """
    if entry.file_part or not 0 < entry.file_position < size:
        raise VolumeError(
            f"{path} lists a tile that is not in it: it was cut off, or is one of several "
            "files. Copy it again, or save it as one file with ZEN."
        )
    if entry.compression not in _COMPRESSIONS:
        raise VolumeError(
            f"{path} holds tiles with compression {entry.compression}, which is not known "
            "here. Save it with another compression in ZEN, or as OME-TIFF with Bio-Formats."
        )
    if min(each.size for each in dimensions.values()) < 1:
        raise VolumeError(f"{path} lists a tile of no size: it is damaged. Copy it again.")
    channel = dimensions.get("C")
    if (channel is not None and channel.start < 0) or any(
        each.size != 1 for axis, each in dimensions.items() if axis not in "YX"
    ):
        raise VolumeError(
            f"{path} holds a tile of several planes, or of a channel below 0, which is not "
            "read here. Save it as OME-TIFF with ZEN or Bio-Formats."
        )


def _check_is_listed(own: Any, listed: Any) -> None:
    """Check that a tile says of itself what the file's list of tiles says of it.

    Raises:
        ValueError: it does not.
    """
    ours, theirs = (
        {each.dimension: (int(each.start), int(each.size)) for each in entry.dimension_entries}
        for entry in (own, listed)
    )
    if ours != theirs:
        raise ValueError(f"a tile says that it lies at {ours}, and the list of tiles says {theirs}")
    own_kind, listed_kind = (
        f"pixels {entry.pixel_type} under compression {entry.compression}"
        for entry in (own, listed)
    )
    if own_kind != listed_kind:
        raise ValueError(
            f"a tile says that it holds {own_kind}, and the list of tiles says {listed_kind}"
        )


def _choose(
    path: str, tiles: Sequence[_Tile], name: str | None
) -> tuple[ChosenVolume, list[_Tile]]:
    """Choose a volume by its name, and its tiles."""
    starts: dict[str, int] = {}
    stops: dict[str, int] = {}
    for tile in tiles:
        for axis, position in tile.positions.items():
            starts[axis] = min(starts.get(axis, position), position)
            stops[axis] = max(stops.get(axis, position + 1), position + 1)
    further = tuple(
        (axis, stops[axis])
        for axis in sorted(stops)
        if axis not in _AXES + _MOSAIC and stops[axis] - starts[axis] > 1
    )
    without = [axis for axis, _ in further for tile in tiles if axis not in tile.positions]
    if without:
        raise VolumeError(
            f"{path} lists tiles that state no position along {without[0]}, where others do: it is "
            "damaged. Copy it again, or save it with ZEN."
        )
    chosen = choose_volume(path, [Image("", further)], name)
    found = [
        tile
        for tile in tiles
        if all(tile.positions.get(axis, 0) == n for axis, n in chosen.positions.items())
    ]
    if not found:
        raise VolumeError(f"the volume {chosen.name} of {path} has no tiles")
    unclear = {str(tile.entry.pixel_type) for tile in found} & set(_UNCLEAR_PIXELS)
    if unclear:
        raise VolumeError(
            f"{path} holds pixels of the type {_UNCLEAR_PIXELS[min(unclear)]}, which programs read "
            "as different numbers. Save it as OME-TIFF with ZEN."
        )
    kinds = {(tile.entry.dtype, tile.entry.axes) for tile in found}
    if len({dtype for dtype, _ in kinds}) > 1:
        raise VolumeError(
            f"{path} holds channels of several dtypes: {', '.join(sorted(d for d, _ in kinds))}. "
            "Save them as files of their own with ZEN."
        )
    return chosen, found


def _bounds(tiles: Sequence[_Tile]) -> BoundingBox:
    """The box of all tiles, in the positions that the file states."""
    y, x = (
        [(tile.positions[axis], tile.positions[axis] + tile.shape[k]) for tile in tiles]
        for k, axis in enumerate("YX")
    )
    z = [(depth, depth + 1) for depth in {tile.positions.get("Z", 0) for tile in tiles}]
    starts = [min(a for a, _ in along) for along in (z, y, x)]
    stops = [max(b for _, b in along) for along in (z, y, x)]
    return BoundingBox((starts[0], starts[1], starts[2]), (stops[0], stops[1], stops[2]))


def _size_notes(path: str, czi: Any, tiles: Sequence[_Tile]) -> tuple[str, ...]:
    """Returns a note on sizes that the file's metadata state otherwise than its tiles.

    Raises:
        VolumeError: their planes are as large, and of another shape: they would be sheared.
    """
    text = czi.metadata()
    image = ElementTree.fromstring(text).find(".//Information/Image") if text else None
    if image is None:
        return ()
    z, y, x = _bounds(tiles).shape
    found = {"T": 0, "C": 0, "Z": z, "Y": y, "X": x}
    for axis in "TC":
        positions = {tile.positions.get(axis, 0) for tile in tiles}
        found[axis] = max(positions) - min(positions) + 1
    stated = {axis: int(image.findtext(f"Size{axis}") or number) for axis, number in found.items()}
    if stated == found:
        return ()
    listed = " and ".join(
        " × ".join(f"{size} {axis.lower()}" for axis, size in sizes.items())
        for sizes in (stated, found)
    )
    if stated["Y"] * stated["X"] == y * x and stated["Y"] != y:
        raise VolumeError(
            f"the metadata of {path} and its tiles state planes of another shape, {listed}: it is "
            "damaged. Copy it again."
        )
    return (f"its metadata and its tiles state other sizes, {listed}: the tiles' are taken",)


def _gap_notes(tiles: Sequence[_Tile], bounds: BoundingBox, channels: int) -> tuple[str, ...]:
    """Returns notes on the planes, and parts of planes, that no tile covers."""
    planes: dict[tuple[int, int], set[_Area]] = {}
    for tile in tiles:
        y = tile.positions["Y"]
        x = tile.positions["X"]
        plane = (tile.positions.get("Z", 0), tile.positions.get("C", 0))
        planes.setdefault(plane, set()).add((y, y + tile.shape[0], x, x + tile.shape[1]))
    notes = []
    expected = bounds.shape[0] * channels
    absent = expected - len(planes)
    if absent:
        notes.append(f"{absent} of its {expected} planes were not recorded, and are zeros")
    size = bounds.shape[1] * bounds.shape[2]
    layouts = {layout: _covered(layout) for layout in map(frozenset, planes.values())}
    covered = [layouts[frozenset(areas)] for areas in planes.values()]
    partial = [part for part in covered if part < size]
    if partial:
        notes.append(
            f"tiles do not cover {len(partial)} of its {expected} planes, down to "
            f"{100 * min(partial) / size:.3g} % of one: what is between them is zeros"
        )
    return tuple(notes)


def _covered(areas: Collection[_Area]) -> int:
    """How many voxels of a plane several areas cover together."""
    edges = np.array(list(areas), np.int64)
    rows = np.unique(edges[:, :2])
    covered = 0
    for top, bottom in pairwise(rows):
        within = edges[(edges[:, 0] <= top) & (edges[:, 1] >= bottom)]
        within = within[np.argsort(within[:, 2])]
        if not len(within):
            continue
        # Where each area begins to be new: behind all that begin before it.
        behind = np.concatenate([within[:1, 2], np.maximum.accumulate(within[:, 3])[:-1]])
        new = within[:, 3] - np.maximum(within[:, 2], behind)
        covered += int(bottom - top) * int(np.maximum(new, 0).sum())
    return covered


def _samples(entry: Any) -> int:
    return math.prod(np.dtype(entry.dtype).shape) or 1


def _dtype(entry: Any) -> Any:
    return np.dtype(np.dtype(entry.dtype).base)


def _decode(data: bytes, tile: _Tile) -> Voxels:
    """Decode a tile: (samples, y, x); colours are red, green, blue, as everywhere but in CZI."""
    codecs = import_library("imagecodecs", "CZI", INSTRUMENTS)
    entry = tile.entry
    shape = (*tile.shape, _samples(entry))
    dtype = _dtype(entry)
    nbytes = math.prod(shape) * dtype.itemsize
    compression = entry.compression
    if compression in (_JPEG, _JPEG_XR):
        decode = codecs.jpeg8_decode if compression == _JPEG else codecs.jpegxr_decode
        # Given an array, it refuses a picture of another extent before it allocates any.
        voxels = decode(data, out=np.empty(shape[:2] if shape[2] == 1 else shape, dtype))
    else:
        if compression == _LZW:
            data = codecs.lzw_decode(data, out=nbytes)
        elif compression == _ZSTD:
            data = codecs.zstd_decode(data, out=nbytes)
        elif compression == _ZSTD_WITH_HEADER:
            data = _unpack_with_header(data, nbytes, dtype.itemsize)
        voxels = np.frombuffer(data, dtype, count=math.prod(shape))
    if voxels.dtype != dtype or voxels.size != math.prod(shape):
        raise ValueError("a tile decodes to another shape or dtype than the file states")
    is_blue_first = shape[2] in (3, 4) and compression != _JPEG_XR
    voxels = voxels.reshape(shape)
    if is_blue_first:
        voxels = voxels[..., [2, 1, 0, 3][: shape[2]]]
    decoded: Voxels = np.moveaxis(voxels, -1, 0)
    return decoded


def _unpack_with_header(data: bytes, nbytes: int, itemsize: int) -> bytes:
    """Unpack Zstandard behind a header, which says whether high and low bytes lie apart."""
    codecs = import_library("imagecodecs", "CZI", INSTRUMENTS)
    length = data[0]
    is_apart = length == _HILO and data[1] == 1 and bool(data[2] & 1)
    unpacked = codecs.zstd_decode(data[length:], out=nbytes)
    if not is_apart:
        return bytes(unpacked)
    if itemsize != 2 or len(unpacked) != nbytes:
        raise ValueError("a tile decodes to another length than the file states")
    return np.frombuffer(unpacked, np.uint8).reshape(2, -1).T.tobytes()


def _voxel_size(czi: Any, depth: int) -> VoxelSizeNm | None:
    text = czi.metadata()
    if not text or depth == 1:
        return None
    sizes = {}
    for distance in ElementTree.fromstring(text).iterfind(".//Scaling/Items/Distance"):
        value = distance.findtext("Value")
        if value:
            sizes[distance.get("Id")] = float(f"{float(value) * _METRE_NM:.9g}")
    if not {"X", "Y", "Z"} <= sizes.keys():
        return None
    return stated_voxel_size(sizes[axis] for axis in "ZYX")
