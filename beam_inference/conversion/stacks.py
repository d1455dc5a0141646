"""Stacks of slices: a folder or a glob of picture files, one z each, in natural order of names.

In object stores and on web servers, a range of numbers or a list may name them.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.conversion.fetched_source import errors_of_copy, temporary_file
from beam_inference.conversion.png import read_picture, read_picture_header
from beam_inference.conversion.protocol import (
    FREE,
    PlaneOfMany,
    Read,
    SliceHeader,
    SourceInfo,
    Voxels,
)
from beam_inference.conversion.stored_files import (
    FILES_AT_A_TIME,
    MARK_BYTES,
    StoredFile,
    find_files,
    hash_contents,
    is_url,
    mark_content,
)
from beam_inference.conversion.tiff import read_tiff_slice, read_tiff_slice_header
from beam_inference.errors import PermanentReadError, VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.block_memory import check_block_memory
from beam_inference.volumes.kvstores import LOCAL
from beam_inference.volumes.remote_files import RemoteFile
from beam_inference.volumes.remote_names import list_remote_files, names_files


@dataclass(frozen=True, slots=True)
class _SliceFormat:
    """The functions that read the files of one kind of slices."""

    read_header: Callable[[StoredFile], SliceHeader]
    read: Callable[[str, BoundingBox], Voxels]


_TIFF = _SliceFormat(read_tiff_slice_header, read_tiff_slice)
_PICTURE = _SliceFormat(read_picture_header, read_picture)
_FORMATS = {
    ".tif": _TIFF,
    ".tiff": _TIFF,
    ".png": _PICTURE,
    ".jpg": _PICTURE,
    ".jpeg": _PICTURE,
}
_FRACTION = re.compile(r"(?<![\d.])\d+\.(\d+)(?![\d.])")
"""What stands behind a point between digits, if it is the only one."""
_SLICES_AT_A_TIME = 4
_HEADER_BYTES = 2**24
"""Bytes that a slice may have beyond twice its voxels, in an object store."""

_MOST_IN_MESSAGE = 8


@dataclass(frozen=True, slots=True)
class SliceStack:
    """A stack of files; their names are listed anew when it is opened, and must be the same.

    Attributes:
        pattern: a glob of the files, and perhaps of others that are no slices; of a store also a
            range of their numbers, or the URL of a list.
        names_hash: hash of the files' names, in order.
        files_hash: hash of the files' names, sizes and times; in object stores, of their names
            and generations.
        marks: a mark of the content of each file, one after the other.
        info: its extent, dtype, and so on.
        storage: how object stores are reached.
    """

    pattern: str
    names_hash: str
    files_hash: str
    marks: bytes
    info: SourceInfo
    storage: Storage = LOCAL

    @property
    def identity(self) -> Json:
        """The glob, and a hash of the files' names and contents, as far as these are known."""
        return {"slices": self.pattern, "files": self.files_hash}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that hold its voxels."""
        return _paths(self.pattern, self.storage)

    def open(self) -> Read:
        """List the files again."""
        paths = _paths(self.pattern, self.storage)
        if _hash(paths) != self.names_hash:
            raise WorkerFault(
                f"the slices {self.pattern} are not those that were there at the launch"
            )
        at_a_time = _SLICES_AT_A_TIME if is_url(self.pattern) else 1

        def read(box: BoundingBox) -> Voxels:
            window = BoundingBox((0, *box.start[1:]), (1, *box.stop[1:]))
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)

            def read_slice(z: int) -> None:
                part = out[:, z - box.start[0] : z - box.start[0] + 1]
                voxels = self._read_slice(paths[z], z, window)
                if (voxels.dtype, voxels.shape) != (part.dtype, part.shape):
                    raise PermanentReadError(
                        f"{paths[z]} holds {voxels.dtype} voxels of {list(voxels.shape)} where "
                        f"{part.dtype} ones of {list(part.shape)} (channels, z, y, x) are expected "
                        "by its header: it is damaged, or was changed. Copy or save it again."
                    )
                part[...] = voxels

            with ThreadPoolExecutor(at_a_time) as executor:
                for _ in executor.map(read_slice, range(box.start[0], box.stop[0])):
                    pass  # raises what was raised there
            return out

        return read

    def _read_slice(self, path: str, number: int, window: BoundingBox) -> Voxels:
        read = _format_of(path).read
        (file,) = find_files([path], self.storage)
        try:
            mark = mark_content(file)
        except OSError as error:
            raise PermanentReadError(f"cannot read {path}: {error.strerror}") from None
        if mark != self.marks[MARK_BYTES * number :][:MARK_BYTES]:
            raise WorkerFault(
                f"{path} was changed since the launch read its header: its slice would be of "
                "another volume. Give the command again, with --overwrite"
            )
        if not isinstance(file, RemoteFile):
            return read(path, window)
        most = 2 * self.info.itemsize * math.prod(self.info.bounds.shape[1:]) + _HEADER_BYTES
        content = file.read_whole(most)
        with temporary_file(content, f"slice{_suffix(path)}") as copy, errors_of_copy(copy, path):
            header = _format_of(path).read_header(copy)
            expected = (self.info.channels, *self.info.bounds.shape[1:], self.info.dtype)
            # Some servers state nothing by which a change is seen.
            if (header.channels, header.height, header.width, header.dtype) != expected:
                raise PermanentReadError(
                    f"{path} is another picture than when its header was read: its channels, "
                    f"height, width and dtype were {expected}. It was changed"
                )
            return read(copy, window)


def slice_stack(pattern: str, storage: Storage = LOCAL) -> SliceStack:
    """The slices of a folder or a glob; the headers of all of them are read.

    Args:
        pattern: path of a folder, glob, or URL of a slice, a glob, a range or a list.
        storage: how object stores are reached.

    Raises:
        VolumeError: there are none, they are of several kinds, or differ in shape or dtype.
        ConfigError: a library is not installed.
    """
    is_remote = is_url(pattern)
    if not is_remote:
        pattern = str(Path(pattern).absolute())
        if Path(pattern).is_dir():
            pattern = f"{glob.escape(pattern)}/*"
    paths = _paths(pattern, storage)
    if not paths:
        raise VolumeError(
            f"{pattern} matches no slices: expected files named {', '.join(sorted(_FORMATS))}"
        )
    suffixes = {_suffix(path) for path in paths}
    if len({_FORMATS[suffix] for suffix in suffixes}) > 1:
        raise VolumeError(
            f"{pattern} matches slices of several kinds: {', '.join(sorted(suffixes))}. Give a "
            f"glob: '*{min(suffixes)}'"
        )
    files = find_files(paths, storage)
    header = _common_header(files)
    if is_remote:  # slices are fetched whole
        header = replace(header, grain=(1, header.height, header.width))
    itemsize = header.channels * np.dtype(header.dtype).itemsize
    check_block_memory(pattern, header.grain, itemsize)
    info = SourceInfo(
        BoundingBox((0, 0, 0), (len(paths), header.height, header.width)),
        header.channels,
        header.dtype,
        None,
        header.grain,
        numbering_notes([_name(path) for path in paths]) + header.notes,
    )
    marks = b"".join(map(mark_content, files))
    return SliceStack(pattern, _hash(paths), hash_contents(files), marks, info, storage)


def is_slice(path: str) -> bool:
    """Whether a file is a slice, by its name."""
    return _suffix(path) in _FORMATS


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


def _format_of(path: str) -> _SliceFormat:
    return _FORMATS[_suffix(path)]


def _paths(pattern: str, storage: Storage) -> list[str]:
    """The paths or URLs of the slices that a glob gives, in natural order.

    Raises:
        VolumeError: something with the name of a slice is no file: the slice would be left out.
    """
    if is_url(pattern) and not names_files(pattern):
        return [pattern]
    if is_url(pattern):
        return _sort_naturally(filter(is_slice, list_remote_files(pattern, storage)))
    paths = list(filter(is_slice, glob.iglob(pattern)))
    for path in paths:
        if not Path(path).is_file():
            raise VolumeError(
                f"{path} has the name of a slice, and is a folder or the like, or a link that "
                "leads nowhere. Copy that file again, or give a glob that leaves it out."
            )
    return _sort_naturally(paths)


def _sort_naturally(paths: Iterable[str]) -> list[str]:
    """Sort paths by the numbers in their names.

    Raises:
        VolumeError: they may be decimals, by which the order is another one.
    """
    found = sorted(paths, key=lambda path: natural_key(_decode(path)))
    fractions = {part for path in found for part in _FRACTION.findall(Path(_decode(path)).stem)}
    # No decimal that is written as short as it can be ends with 0; a second number would.
    if len({len(part) for part in fractions}) > 1 and not any(
        part.endswith("0") for part in fractions
    ):
        other = sorted(found, key=lambda path: _decimal_key(_decode(path)))
        for path, other_path in zip(found, other, strict=True):
            if path != other_path:
                raise VolumeError(
                    "the names of slices hold numbers with a point, which may be decimals or two "
                    f"numbers: {_name(path)} and {_name(other_path)} come in the one order "
                    "or the other. Rename them, with as many digits behind the point everywhere."
                )
    return found


def _decode(path: str) -> str:
    """A path, or a URL as it reads: the digits of its encoded letters (``%20``) number nothing."""
    return unquote(path) if is_url(path) else path


def _name(path: str) -> str:
    return Path(_decode(path)).name


def _decimal_key(path: str) -> tuple[tuple[str | Decimal, ...], str]:
    """A sort key by which numbers in names, with a point or not, are ordered by value."""
    folder, name = os.path.split(path)
    parts = re.split(r"(\d+(?:\.\d+)?)", os.path.splitext(name)[0])
    ordered = (Decimal(part) if part[:1].isdecimal() else part for part in parts)
    return (folder, *ordered), path


def natural_key(path: str) -> tuple[tuple[str | int, ...], str]:
    """A sort key by which numbers in names are ordered by value.

    >>> sorted(["s10.png", "s9.png", "s1.png"], key=natural_key)
    ['s1.png', 's9.png', 's10.png']
    """
    parts = re.split(r"(\d+)", path)
    return tuple(int(part) if part.isdecimal() else part for part in parts), path


def _common_header(paths: Sequence[StoredFile]) -> SliceHeader:
    """The header that all slices share, with the largest grain among them.

    Raises:
        VolumeError: they differ.
    """
    read_header = _format_of(str(paths[0])).read_header
    with ThreadPoolExecutor(FILES_AT_A_TIME) as executor:
        headers = list(executor.map(read_header, paths))
    first: dict[SliceHeader, StoredFile] = {}  # a path by its header but for the grain
    for path, header in zip(paths, headers, strict=True):
        first.setdefault(replace(header, grain=FREE, plane=None), path)
    if len(first) > 1:
        counts = Counter(replace(header, grain=FREE, plane=None) for header in headers)
        names = {header: _name(str(file)) for header, file in first.items()}
        kinds = [
            f"{count} such as {names[header]}: {header.height} × {header.width} (y, x), "
            f"channels: {header.channels}, {header.dtype}"
            f"{''.join(f', {note}' for note in header.notes)}"
            f"{f' (table {header.colours[:8]})' if header.colours else ''}"
            for header, count in counts.most_common(_MOST_IN_MESSAGE)
        ]
        raise VolumeError(
            f"the slices differ: {'; '.join(kinds)}. A volume needs one shape and dtype: "
            "mend or leave out the odd ones, or give a glob that does."
        )
    notes = _plane_notes(paths, [header.plane for header in headers])
    grain_height = max(header.grain[1] for header in headers)
    grain_width = max(header.grain[2] for header in headers)
    return replace(headers[0], grain=(1, grain_height, grain_width), notes=headers[0].notes + notes)


def _plane_notes(
    paths: Sequence[StoredFile], planes: Sequence[PlaneOfMany | None]
) -> tuple[str, ...]:
    """A note on planes that are missing, by what slices say of themselves.

    Raises:
        VolumeError: they say that they are in another order, or of several channels or times.
    """
    first = next(filter(None, planes), None)
    if first is None or len(planes) == 1:
        return ()
    begin = planes[0].z if planes[0] else 0
    for number, (path, plane) in enumerate(zip(paths, planes, strict=True)):
        if plane is None or (plane.z, plane.rest) != (begin + number, first.rest):
            stated = "nothing of its place" if plane is None else f"z {plane.z}, {plane.rest}"
            raise VolumeError(
                f"{path} would be slice {number} by its name, and its OME metadata state "
                f"{stated}; expected z {begin + number}, {first.rest}. Give a glob of one channel "
                "and time whose names are in the order of z, or save the data set as one OME-TIFF."
            )
    if len(planes) == first.depth:
        return ()
    return (
        f"their OME metadata speak of {first.depth} planes along z, of which {len(planes)} are "
        "here",
    )


def numbering_notes(names: Sequence[str]) -> tuple[str, ...]:
    """Notes on slices that are missing, by the numbers in the names of slices, in order.

    Raises:
        VolumeError: two slices have the same number.
    """
    if len(names) == 1:
        return ()
    order = f"the order of the slices is {names[0]} … {names[-1]}"
    numbers = _slice_numbers(names)
    if numbers is None:
        return (f"their names have no single numbering, so that gaps cannot be seen; {order}",)
    steps = [b - a for a, b in pairwise(numbers)]
    if 0 in steps:
        twice = steps.index(0)
        raise VolumeError(f"two slices have one number: {names[twice]} and {names[twice + 1]}")
    step = min(steps)
    gaps = [(a + step, b - step) for a, b in pairwise(numbers) if b - a != step]
    if not gaps:
        return ()
    missing = ", ".join(
        str(first) if first >= last else f"{first} … {last}"
        for first, last in gaps[:_MOST_IN_MESSAGE]
    )
    if len(gaps) > _MOST_IN_MESSAGE:
        missing += f" and {len(gaps) - _MOST_IN_MESSAGE} more"
    return (f"slices are missing, and those behind them move up: {missing}; {order}",)


def _slice_numbers(names: Sequence[str]) -> list[int] | None:
    """The number of each slice; None if not exactly one number in the names varies.

    Names are split into texts at even places and numbers at odd ones. Names that differ only in
    how they write the same numbers, as "s01" and "s1", give the same number twice.
    """
    groups = [re.split(r"(\d+)", Path(name).stem) for name in names]
    if len({tuple(group[::2]) for group in groups}) > 1:
        return None
    places = range(1, len(groups[0]), 2)
    varying = [k for k in places if len({int(group[k]) for group in groups}) > 1]
    if not varying and len(set(names)) == len(names):
        return [0] * len(names)
    if len(varying) != 1:
        return None
    return [int(group[varying[0]]) for group in groups]


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
