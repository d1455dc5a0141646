"""The chunks that a user names: by index, by box, or in a file of either.

Boxes are those of the output, in its voxels: every chunk is meant whose core box they touch. So a
list of boxes keeps its meaning when the job has other chunks.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.foreign_text import shorten_text
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import VoxelSizeNm, triple
from beam_inference.job.annotated_boxes import boxes_of_state, read_viewer_state
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.volumes.kvstores import read_file, url_of

_INDICES = re.compile(r"\d{1,18}(-\d{1,18})?(,\d{1,18}(-\d{1,18})?)*", re.ASCII)
_BOX = re.compile(",".join([r"(-?\d{1,18}):(-?\d{1,18})"] * 3), re.ASCII)
_BOX_COLUMNS = ("z0", "z1", "y0", "y1", "x0", "x1")


def choose_chunks(names: Sequence[str], job: ResolvedJob) -> list[int]:
    """Find the chunks that a user names.

    Args:
        names: each is a list of indices (``3,5,10-20``), a box (``z0:z1,y0:y1,x0:x1``, in voxels of
            the output), or the path or URL of a file: a quarantine file; indices or boxes, one a
            line; CSV with a column ``chunk`` or with columns ``z0 z1 y0 y1 x0 x1``; or a state of
            Neuroglancer as JSON, of which the boxes and points of one annotation layer are taken:
            ``state.json#LAYER``, where it has several.
        job: the job.

    Returns:
        Indices in ascending order, each once.

    Raises:
        ConfigError: a file is absent, is none of these, or belongs to a job with another
            fingerprint; or what is named lies outside of the job.
    """
    choice = _Choice(job.plan.chunks, job.fingerprint, job.voxel_size_nm, job.config.storage)
    return sorted(set(chain.from_iterable(map(choice.chunks_of, names))))


@dataclass(frozen=True, slots=True)
class _Choice:
    """What names are resolved by.

    Attributes:
        chunks: the job's chunks.
        fingerprint: of the job.
        voxel_size_nm: of its output, ZYX.
        storage: settings of the object stores.
    """

    chunks: ChunkGrid
    fingerprint: str
    voxel_size_nm: VoxelSizeNm
    storage: Storage

    def chunks_of(self, name: str) -> Iterable[int]:
        """Return the chunks of one name."""
        if _INDICES.fullmatch(name):
            return self._chunks_of_ranges(name)
        box = _parse_box(name)
        if box is not None:
            return self._touching(box, "--chunks")
        return self._chunks_of_file(name)

    def _chunks_of_ranges(self, name: str) -> Iterator[int]:
        for part in name.split(","):
            first, _, last = part.partition("-")
            start = self._existing(int(first), "--chunks")
            end = self._existing(int(last or first), "--chunks")
            if end < start:
                raise ConfigError(
                    f"--chunks: {part} names no chunk: write the smaller number first, "
                    f"{end}-{start}"
                )
            yield from range(start, end + 1)

    def _existing(self, index: int, where: str) -> int:
        if not 0 <= index < self.chunks.count:
            raise ConfigError(
                f"{where}: there is no chunk {index}, only 0 … {self.chunks.count - 1}"
            )
        return index

    def _touching(self, box: BoundingBox, where: str) -> Iterator[int]:
        """Yield the chunks that a box touches."""
        roi = self.chunks.roi
        inside = box.intersection(roi)
        if not inside.size:
            raise ConfigError(f"{where}: the box {box} touches no chunk; the job is over {roi}")
        ranges = [
            range((start - first) // length, (stop - 1 - first) // length + 1)
            for start, stop, first, length in zip(
                inside.start, inside.stop, roi.start, self.chunks.chunk_shape, strict=True
            )
        ]
        return (self.chunks.index(position) for position in product(*ranges))

    def _chunks_of_file(self, name: str) -> Iterable[int]:
        path, _, layer = name.partition("#")
        where = f"the chunks file {path}"
        try:
            content = read_file(url_of(path), self.storage)
        except VolumeError as error:
            raise ConfigError(
                f"cannot read the chunks file: {error}. (--chunks takes such a file, indices as "
                "3,5,10-20, or a box as z0:z1,y0:y1,x0:x1.)"
            ) from None
        try:
            chosen = set(self._chunks_of_text(content.decode(errors="replace"), layer, where))
        except csv.Error as error:
            raise ConfigError(f"{where} is damaged: {error}") from None
        if not chosen:
            raise ConfigError(f"{where} names no chunk")
        return chosen

    def _chunks_of_text(self, text: str, layer: str, where: str) -> Iterable[int]:
        """Return the chunks that the content of a file names."""
        state = read_viewer_state(text)
        if state is None and layer:
            raise ConfigError(f"{where} has no layer {layer}: it is no state of Neuroglancer")
        if state is not None:
            return chain.from_iterable(
                self._touching(box, where)
                for box in boxes_of_state(state, layer, self.voxel_size_nm, where)
            )
        if _is_csv(text):
            return chain.from_iterable(self._chunks_of_row(*row) for row in _rows(text, where))
        return chain.from_iterable(
            self._chunks_of_line(line, f"line {number} of {where}")
            for number, line in enumerate(text.splitlines(), 1)
            if line.strip()
        )

    def _chunks_of_row(self, row: dict[str, str], where: str) -> Iterable[int]:
        """Return the chunks of a row of CSV: by its box, where it has one."""
        if _BOX_COLUMNS[0] in row:
            intervals = zip(_BOX_COLUMNS[::2], _BOX_COLUMNS[1::2], strict=True)
            text = ",".join(f"{row[start]}:{row[stop]}" for start, stop in intervals)
            box = _parse_box(text)
            if box is None:
                raise ConfigError(f"{where} is no box of whole voxels: {shorten_text(text)}")
            return self._touching(box, where)
        index = row["chunk"]
        if not re.fullmatch(r"\d{1,18}", index, re.ASCII):
            raise ConfigError(f"{where} is no chunk index: {shorten_text(index)}")
        return [self._existing(int(index), where)]

    def _chunks_of_line(self, line: str, where: str) -> Iterable[int]:
        """Return the chunks of a line: an index, a box, or a quarantine record."""
        box = _parse_box(line.strip())
        if box is not None:
            return self._touching(box, where)
        try:
            entry = parse_json(line)
            index = entry["chunk"] if isinstance(entry, dict) else entry
        except (ValueError, KeyError):
            index = None
        if type(index) is not int:
            raise ConfigError(
                f"{where} is neither a chunk index nor a quarantine record, nor a box "
                f"z0:z1,y0:y1,x0:x1: {shorten_text(line)}"
            )
        if isinstance(entry, dict) and entry.get("fingerprint") != self.fingerprint:
            raise ConfigError(
                f"{where} belongs to another job (fingerprint "
                f"{shorten_text(str(entry.get('fingerprint'))[:12])}, this one is "
                f"{self.fingerprint[:12]}): its chunk numbers mean other boxes"
            )
        index = self._existing(index, where)
        if isinstance(entry, dict) and entry.get("box") is not None:
            self._check_same_box(entry["box"], index, where)
        return [index]

    def _check_same_box(self, box: object, index: int, where: str) -> None:
        """Refuse a record of before the ROI was enlarged, from which chunks are numbered."""
        own = self.chunks.core_box(index)
        if box != {"start": list(own.start), "stop": list(own.stop)}:
            raise ConfigError(
                f"{where} is of when the job had another roi: its chunk {index} was another box. "
                "Name chunks by boxes (z0:z1,y0:y1,x0:x1)"
            )


def _parse_box(text: str) -> BoundingBox | None:
    """The box that a text ``z0:z1,y0:y1,x0:x1`` means; None if it is no such text."""
    match = _BOX.fullmatch(text)
    if match is None:
        return None
    bounds = list(map(int, match.groups()))
    if any(stop <= start for start, stop in zip(bounds[::2], bounds[1::2], strict=True)):
        raise ConfigError(f"the box {text} is empty: each axis is start:stop, with start < stop")
    return BoundingBox(triple(bounds[::2]), triple(bounds[1::2]))


def _is_csv(text: str) -> bool:
    """Whether the first line is a header of CSV that names chunks or boxes."""
    header = _header(text)
    return "chunk" in header or _BOX_COLUMNS[0] in header


def _header(text: str) -> list[str]:
    first = text.lstrip("\ufeff").split("\n", 1)[0]
    return [name.strip() for name in next(csv.reader([first]), [])]


def _rows(text: str, where: str) -> Iterator[tuple[dict[str, str], str]]:
    """Yield the rows of CSV by the names of their columns, each with its place for messages."""
    header = _header(text)
    missing = [name for name in _BOX_COLUMNS if name not in header]
    if "chunk" not in header and missing:
        raise ConfigError(f"{where} has boxes without the columns {' '.join(missing)}")
    twice = [name for name in ("chunk", *_BOX_COLUMNS) if header.count(name) > 1]
    if twice:
        raise ConfigError(f"{where} has two columns {twice[0]}: take the wrong one out")
    names = header if not missing else [name if name == "chunk" else "" for name in header]
    for number, values in enumerate(csv.reader(text.splitlines()[1:]), 2):
        if not values:
            continue
        if len(values) < len(names):
            raise ConfigError(f"line {number} of {where} has {len(values)} of {len(names)} columns")
        stripped = (value.strip() for value in values)
        yield dict(zip(names, stripped, strict=False)), f"line {number} of {where}"
