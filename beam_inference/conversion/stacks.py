"""Stacks of slices: a folder or a glob of picture files, one z each, in the natural order of their names."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.png import read_picture, read_picture_header
from beam_inference.conversion.protocol import Read, SourceInfo
from beam_inference.conversion.tiff import read_slice, read_slice_header
from beam_inference.errors import VolumeError, WorkerFault
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx

_Header = tuple[int, int, int, str, Zyx]
_READERS: dict[str, tuple[Callable[[str], _Header], Callable[[str, BoundingBox], NDArray[Any]]]] = {
    **dict.fromkeys((".tif", ".tiff"), (read_slice_header, read_slice)),
    **dict.fromkeys((".png", ".jpg", ".jpeg"), (read_picture_header, read_picture)),
}
_HEADERS_AT_A_TIME = 8
_NAMED = 8


@dataclass(frozen=True, slots=True)
class SliceStack:
    """A stack of files; their names are listed anew where it is opened, and must be the same.

    Attributes:
        pattern: a glob that gives the files, and perhaps others that are no slices.
        names_hash: of the names, in order.
        files_hash: of their names, sizes and times.
        info: what is known of it.
    """

    pattern: str
    names_hash: str
    files_hash: str
    info: SourceInfo

    @property
    def identity(self) -> dict[str, Any]:
        """The files as they are."""
        return {"slices": self.pattern, "files": self.files_hash}

    def open(self) -> Read:
        """List the files again."""
        paths = _paths(self.pattern)
        if _hash(paths) != self.names_hash:
            raise WorkerFault(
                f"the slices {self.pattern} are not those that were there at the launch"
            )
        _, read_one = _READERS[Path(paths[0]).suffix.lower()]

        def read(box: BoundingBox) -> NDArray[Any]:
            window = BoundingBox((0, *box.start[1:]), (1, *box.stop[1:]))
            out = np.empty((self.info.channels, *box.shape), self.info.dtype)
            for z in range(box.start[0], box.stop[0]):
                out[:, z - box.start[0]] = read_one(paths[z], window)[:, 0]
            return out

        return read


def slice_stack(pattern: str) -> SliceStack:
    """The slices that a folder or a glob gives, all of them looked at.

    Raises:
        VolumeError: there are none, they are of several kinds, or differ in shape or dtype.
        ConfigError: a library is not installed.
    """
    pattern = str(Path(pattern).absolute())
    if Path(pattern).is_dir():
        pattern = f"{glob.escape(pattern)}/*"
    paths = _paths(pattern)
    if not paths:
        raise VolumeError(
            f"{pattern} gives no slices: expected files named {', '.join(sorted(_READERS))}"
        )
    kinds = {path.suffix.lower() for path in map(Path, paths)}
    if len({_READERS[kind] for kind in kinds}) > 1:
        raise VolumeError(
            f"{pattern} gives slices of several kinds: {', '.join(sorted(kinds))}. Give a glob: "
            f"'*{min(kinds)}'"
        )
    channels, y, x, dtype, grain = _common_header(paths)
    bounds = BoundingBox((0, 0, 0), (len(paths), y, x))
    statuses = [Path(path).stat() for path in paths]
    files = _hash(
        [f"{p} {s.st_size} {s.st_mtime_ns}" for p, s in zip(paths, statuses, strict=True)]
    )
    info = SourceInfo(
        bounds, channels, dtype, None, grain, numbering_notes([Path(path).name for path in paths])
    )
    return SliceStack(pattern, _hash(paths), files, info)


def _paths(pattern: str) -> list[str]:
    found = [
        path
        for path in glob.iglob(pattern)
        if Path(path).suffix.lower() in _READERS and Path(path).is_file()
    ]
    return sorted(found, key=natural_key)


def natural_key(path: str) -> tuple[tuple[str | int, ...], str]:
    """What sorts names as people do: numbers in them by value.

    >>> sorted(["s10.png", "s9.png", "s1.png"], key=natural_key)
    ['s1.png', 's9.png', 's10.png']
    """
    return (
        tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)),
        path,
    )


def _common_header(paths: Sequence[str]) -> _Header:
    """The header that all slices have."""
    read_header, _ = _READERS[Path(paths[0]).suffix.lower()]
    first: dict[_Header, str] = {}
    count: dict[_Header, int] = {}
    with ThreadPoolExecutor(_HEADERS_AT_A_TIME) as executor:
        for path, header in zip(paths, executor.map(read_header, paths), strict=True):
            first.setdefault(header, path)
            count[header] = count.get(header, 0) + 1
    alike = {header[:4] for header in first}
    if len(alike) > 1:
        told = [
            f"{count[header]} such as {Path(path).name}: {y} × {x} (y, x), channels: {channels}, "
            f"{dtype}"
            for header, path in sorted(first.items(), key=lambda item: -count[item[0]])
            for channels, y, x, dtype, _ in [header]
        ]
        raise VolumeError(
            f"the slices differ: {'; '.join(told[:_NAMED])}. A volume needs one shape and dtype: "
            "mend or leave out the odd ones, or give a glob that does."
        )
    ((channels, y, x, dtype),) = alike
    grains = [header[4] for header in first]
    return channels, y, x, dtype, (1, max(g[1] for g in grains), max(g[2] for g in grains))


def numbering_notes(names: Sequence[str]) -> tuple[str, ...]:
    """What the numbers in the names of slices, in order, say of slices that are missing.

    Raises:
        VolumeError: two slices have one number.
    """
    order = f"the order of the slices is {names[0]} … {names[-1]}"
    groups = [re.split(r"(\d+)", Path(name).stem) for name in names]
    texts = {tuple(group[::2]) for group in groups}
    varying = (
        []
        if len(texts) > 1
        else [k for k in range(1, len(groups[0]), 2) if len({int(g[k]) for g in groups}) > 1]
    )
    if len(names) == 1:
        return ()
    if len(varying) != 1:
        if len(set(names)) == len(names) and len(texts) == 1 and not varying:
            raise VolumeError(f"two slices have one number: {names[0]} and {names[1]}")
        return (f"their names have no single numbering, so that gaps cannot be seen; {order}",)
    numbers = [int(group[varying[0]]) for group in groups]
    steps = [b - a for a, b in pairwise(numbers)]
    if 0 in steps:
        twice = steps.index(0)
        raise VolumeError(f"two slices have one number: {names[twice]} and {names[twice + 1]}")
    step = min(steps)
    gaps = [(a + step, b - step) for a, b in pairwise(numbers) if b - a != step]
    if not gaps:
        return ()
    told = ", ".join(str(a) if a >= b else f"{a} … {b}" for a, b in gaps[:_NAMED])
    more = f" and {len(gaps) - _NAMED} more" if len(gaps) > _NAMED else ""
    return (f"slices are missing, and those behind them move up: {told}{more}; {order}",)


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
