"""Chunks of an HDF5 dataset that hold fewer bytes than their voxels, or more.

HDF5's library (2.0.0) does not notice that. It takes what lies in memory behind such a chunk for
the voxels that are missing: bytes of anything that the process holds, or none, and then it crashes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from beam_inference.conversion.hdf5_filters import (
    Filter,
    count_plain,
    count_unpacked,
    fails_on_damage,
    is_size_told,
    list_filters,
)
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.zyx import ceil_div

_FURTHER_BYTES = 2**16
"""Bytes that a packed chunk may have beyond twice its voxels, to be fetched before it is read."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """What a file says of a chunk that it holds.

    Attributes:
        start: place of its first byte in the file.
        size: bytes that it has there.
        filter_mask: bits of the filters that it did not go through.
    """

    start: int
    size: int
    filter_mask: int


class ChunkIndex:
    """Where the chunks of a dataset lie; HDF5's library would go through all of them for each.

    Args:
        dataset: the dataset, open, with chunks.
    """

    def __init__(self, dataset: Any) -> None:
        self._chunks: tuple[int, ...] = dataset.chunks
        self._counts = [
            ceil_div(extent, chunk)
            for extent, chunk in zip(dataset.shape, dataset.chunks, strict=True)
        ]
        numbers = array("q")
        starts = array("q")
        sizes = array("q")
        masks = array("q")

        def note(chunk: Any) -> None:
            numbers.append(self._number(chunk.chunk_offset))
            starts.append(chunk.byte_offset)
            sizes.append(chunk.size)
            masks.append(chunk.filter_mask)

        dataset.id.chunk_iter(note)
        order = np.argsort(np.array(numbers), kind="stable")
        self._numbers = np.array(numbers)[order]
        self._stored = np.stack([np.array(starts), np.array(sizes), np.array(masks)], axis=1)[order]

    @property
    def has_twins(self) -> bool:
        """Whether two chunks have the same place."""
        return bool((self._numbers[1:] == self._numbers[:-1]).any())

    def find(self, place: Sequence[int]) -> StoredChunk | None:
        """The chunk whose first voxel is at a place; None if the file holds none."""
        number = self._number(place)
        at = int(np.searchsorted(self._numbers, number))
        if at == len(self._numbers) or self._numbers[at] != number:
            return None
        return StoredChunk(*map(int, self._stored[at]))

    def _number(self, place: Sequence[int]) -> int:
        number = 0
        for start, chunk, count in zip(place, self._chunks, self._counts, strict=True):
            number = number * count + start // chunk
        return number


def check_chunks(dataset: Any, chunks: ChunkIndex, index: Sequence[slice]) -> None:
    """Refuse a chunk of a window that unpacks to fewer bytes than its voxels, or more.

    Args:
        dataset: the dataset, open, with chunks.
        chunks: where they lie.
        index: the window, a slice for each axis.

    Raises:
        PermanentReadError: there is such a chunk.
        OSError: HDF5 cannot read one.
    """
    filters = list_filters(dataset)
    nbytes = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    for place in _chunk_places(dataset, index):
        stored = chunks.find(place)
        held = None if stored is None else _unpacked_bytes(dataset, place, stored, filters, nbytes)
        if held is not None and held != nbytes:
            found = f"more than {nbytes:,}" if held > nbytes else f"{held:,}"
            raise PermanentReadError(
                f"its chunk at {place} holds {found} bytes, expected {nbytes:,}: the file is "
                "damaged. Copy or save it again."
            )


def chunk_parts(dataset: Any, chunks: ChunkIndex, index: Sequence[slice]) -> list[tuple[int, int]]:
    """The parts of a file that hold the chunks of a window, but for chunks of a size in doubt.

    Args:
        dataset: the dataset, open, with chunks.
        chunks: where they lie.
        index: the window, a slice for each axis.

    Returns:
        The first byte of each, and the one behind its last.
    """
    most = 2 * math.prod(dataset.chunks) * dataset.id.get_type().get_size() + _FURTHER_BYTES
    found = (chunks.find(place) for place in _chunk_places(dataset, index))
    return [
        (chunk.start, chunk.start + chunk.size)
        for chunk in found
        if chunk is not None and 0 < chunk.size <= most
    ]


def check_chunk_places(name: str, dataset: Any) -> None:
    """Refuse a dataset with chunks that lie nowhere in it, or with two in one place.

    They belong where it has none, and HDF5 looks at the size of one, and reads the other.

    Raises:
        VolumeError: there is such a chunk; ``name`` says whose.
    """

    def find(chunk: Any) -> Any:
        places = zip(chunk.chunk_offset, dataset.chunks, dataset.shape, strict=True)
        is_inside = all(at % size == 0 and at < extent for at, size, extent in places)
        return None if is_inside else tuple(chunk.chunk_offset)  # a value ends the search

    place = dataset.id.chunk_iter(find)
    if place is not None:
        raise VolumeError(
            f"{name} has a chunk at {place}, where no chunk of its {dataset.shape} voxels can be: "
            "the file is damaged, and voxels would be missing. Copy or save it again."
        )
    if ChunkIndex(dataset).has_twins:
        raise VolumeError(
            f"{name} has two chunks in one place: the file is damaged, and voxels would be "
            "missing. Copy or save it again."
        )


def check_plain_size(name: str, dataset: Any) -> None:
    """Refuse a dataset without chunks whose file holds fewer bytes for it, or more.

    Raises:
        VolumeError: it does; ``name`` says whose.
    """
    held = dataset.id.get_storage_size()
    expected = dataset.size * dataset.id.get_type().get_size()
    if held not in (0, expected):
        raise VolumeError(
            f"{name} is stored in {held:,} bytes, and its {dataset.shape} voxels need "
            f"{expected:,}: the file is damaged. Copy or save it again."
        )


def absence_notes(dataset: Any) -> tuple[str, ...]:
    """A note on voxels of a dataset that are stored nowhere, and read as its fill value."""
    if dataset.is_virtual:
        covered = sum(each.vspace.get_select_npoints() for each in dataset.virtual_sources())
        missing = max(0, dataset.size - covered)
    else:
        missing = dataset.size if dataset.id.get_storage_size() == 0 else 0
    if not missing:
        return ()
    share = "all its" if missing == dataset.size else f"{missing:,} of its {dataset.size:,}"
    return (f"{share} voxels are stored nowhere, and are {dataset.fillvalue}, its fill value",)


def _chunk_places(dataset: Any, index: Sequence[slice]) -> list[tuple[int, ...]]:
    """The first voxels of the chunks that a window touches."""
    ranges = []
    for part, extent, chunk in zip(index, dataset.shape, dataset.chunks, strict=True):
        start, stop, _ = part.indices(extent)
        ranges.append(range(start // chunk * chunk, ceil_div(stop, chunk) * chunk, chunk))
    return list(product(*ranges))


def _unpacked_bytes(
    dataset: Any,
    place: tuple[int, ...],
    stored: StoredChunk,
    filters: Sequence[Filter],
    expected: int,
) -> int:
    """Bytes that a chunk holds once it is unpacked, up to a few more than ``expected``."""
    applied = [each for bit, each in enumerate(filters) if not stored.filter_mask >> bit & 1]
    if is_size_told(applied):
        return count_plain(applied, stored.size)
    _, data = dataset.id.read_direct_chunk(place)
    try:
        return count_unpacked(applied, data, expected)
    except OSError as error:
        # Files may keep chunks that extend beyond the dataset without any filter.
        if _is_partial(dataset, place) and stored.size == expected and fails_on_damage(applied):
            return expected
        raise OSError(f"the chunk at {place} cannot be unpacked: {error}") from None


def _is_partial(dataset: Any, place: tuple[int, ...]) -> bool:
    ends = zip(place, dataset.chunks, dataset.shape, strict=True)
    return any(start + chunk > extent for start, chunk, extent in ends)
