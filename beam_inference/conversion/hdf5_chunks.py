"""Chunks of an HDF5 dataset that hold fewer bytes than their voxels.

HDF5's library (2.0.0) does not notice that. It takes what lies in memory behind such a chunk for
the voxels that are missing: bytes of anything that the process holds, or none, and then it crashes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import product
from typing import Any

from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.zyx import ceil_div

_DEFLATE = 1
_SHUFFLE = 2
_FLETCHER32 = 3
_CHECKSUM_BYTES = 4


def check_chunks(dataset: Any, index: Sequence[slice]) -> None:
    """Refuse a chunk of a window that unpacks to fewer bytes than its voxels.

    Chunks that other filters than deflate, shuffle and Fletcher's checksum have packed are left to
    HDF5.

    Args:
        dataset: the dataset, open.
        index: the window, a slice for each axis.

    Raises:
        PermanentReadError: there is such a chunk.
        OSError: HDF5 cannot read one.
    """
    if not dataset.chunks:
        return
    filters = _filters(dataset)
    if not {_DEFLATE, _SHUFFLE, _FLETCHER32}.issuperset(filters):
        return
    nbytes = math.prod(dataset.chunks) * dataset.id.get_type().get_size()
    for place in _chunk_places(dataset, index):
        held = _unpacked_bytes(dataset, place, filters, nbytes)
        if held is not None and held < nbytes:
            raise PermanentReadError(
                f"the chunk at {place} of {dataset.file.filename}:{dataset.name} holds {held:,} "
                f"bytes, expected {nbytes:,}: the file is damaged. Copy or save it again."
            )


def check_chunk_places(name: str, dataset: Any) -> None:
    """Refuse a dataset with chunks that lie nowhere in it: they belong where it has none.

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


def _filters(dataset: Any) -> list[int]:
    """Numbers of the filters that chunks went through, in this order."""
    pipeline = dataset.id.get_create_plist()
    return [pipeline.get_filter(number)[0] for number in range(pipeline.get_nfilters())]


def _chunk_places(dataset: Any, index: Sequence[slice]) -> list[tuple[int, ...]]:
    """The first voxels of the chunks that a window touches."""
    ranges = []
    for part, extent, chunk in zip(index, dataset.shape, dataset.chunks, strict=True):
        start, stop, _ = part.indices(extent)
        ranges.append(range(start // chunk * chunk, ceil_div(stop, chunk) * chunk, chunk))
    return list(product(*ranges))


def _unpacked_bytes(
    dataset: Any, place: tuple[int, ...], filters: Sequence[int], most: int
) -> int | None:
    """Bytes that a chunk holds once it is unpacked, up to ``most``; None if there is no chunk."""
    stored = dataset.id.get_chunk_info_by_coord(place)
    if stored.byte_offset is None:
        return None
    applied = [each for bit, each in enumerate(filters) if not stored.filter_mask >> bit & 1]
    size = int(stored.size) - _CHECKSUM_BYTES * applied.count(_FLETCHER32)
    if _DEFLATE not in applied:
        return size
    _, packed = dataset.id.read_direct_chunk(place)
    try:
        return len(zlib.decompressobj().decompress(packed, most))
    except zlib.error as error:
        raise OSError(f"the chunk at {place} cannot be unpacked: {error}") from None
