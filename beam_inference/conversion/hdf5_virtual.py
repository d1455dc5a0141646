"""Chunks of the datasets that a virtual dataset of HDF5 is put together from.

HDF5 reads these by itself, and takes what lies in memory behind a chunk that is too short for
voxels, as it does in a dataset that is read directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from beam_inference.conversion.hdf5_chunks import ChunkIndex, check_chunks
from beam_inference.conversion.hdf5_links import OWN_FILE, OpenFile
from beam_inference.conversion.named_files import file_beside
from beam_inference.conversion.protocol import import_library
from beam_inference.conversion.stored_files import StoredFile

_Box: TypeAlias = Sequence[tuple[int, int]]
"""Start and stop along each axis."""


class VirtualChunks:
    """The chunks behind a virtual dataset, whose sources were found to be near.

    Args:
        open_file: opens a file for reading.
        path: path of the file.
        dataset: the virtual dataset, open.
    """

    def __init__(self, open_file: OpenFile, path: StoredFile, dataset: Any) -> None:
        self._open_file = open_file
        self._path = path
        self._dataset = dataset
        self._sources = list(dataset.virtual_sources())
        self._targets = [_dense_box(each.vspace, dataset.shape) for each in self._sources]
        self._indexes: dict[int, ChunkIndex] = {}
        self._wholly_checked: set[int] = set()

    def check(self, index: Sequence[slice]) -> None:
        """Refuse a window for which a chunk is read that has too few bytes, or too many.

        Args:
            index: the window, a slice for each axis.

        Raises:
            PermanentReadError: there is such a chunk.
            OSError, KeyError: HDF5 cannot read one.
        """
        window = [
            part.indices(extent)[:2]
            for part, extent in zip(index, self._dataset.shape, strict=True)
        ]
        for number, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
            if number in self._wholly_checked or not _meets(target, window):
                continue
            with self._open(source) as part:
                if not part.chunks:
                    continue
                chunks = self._indexes.get(number) or ChunkIndex(part)
                self._indexes[number] = chunks
                of_source = _source_window(target, _dense_box(source.src_space, part.shape), window)
                if of_source is None:  # whatever it takes of there
                    check_chunks(part, chunks, (slice(None),) * part.ndim)
                    self._wholly_checked.add(number)
                else:
                    check_chunks(part, chunks, of_source)

    @contextmanager
    def _open(self, source: Any) -> Iterator[Any]:
        if source.file_name == OWN_FILE:
            yield self._dataset.file[source.dset_name]
            return
        with self._open_file(file_beside(self._path, source.file_name)) as file:
            yield file[source.dset_name]


def _meets(box: _Box | None, window: _Box) -> bool:
    if box is None:
        return True
    pairs = zip(box, window, strict=True)
    return all(begin < stop and start < end for (begin, end), (start, stop) in pairs)


def _source_window(
    target: _Box | None, origin: _Box | None, window: _Box
) -> tuple[slice, ...] | None:
    """The part of a source that a window shows; None where that is not one box like it.

    Args:
        target: the box of the virtual dataset that shows the source; None if it is no box.
        origin: the box of the source that is shown; None if it is no box.
        window: the window.
    """
    if target is None or origin is None:
        return None
    shown = [
        (max(begin, start) - begin, min(end, stop) - begin)
        for (begin, end), (start, stop) in zip(target, window, strict=True)
    ]
    # Axes of one voxel may be there, or not: a slice is a source of a volume.
    long = [part for part, (begin, end) in zip(shown, target, strict=True) if end - begin > 1]
    extents = [end - begin for begin, end in target if end - begin > 1]
    if extents != [end - begin for begin, end in origin if end - begin > 1]:
        return None
    parts = iter(long)
    return tuple(
        slice(begin + part[0], begin + part[1])
        for begin, end in origin
        for part in [next(parts) if end - begin > 1 else (0, 1)]
    )


def _dense_box(selection: Any, shape: Sequence[int]) -> _Box | None:
    """The box that a selection is of a dataset of some shape; None if it is none."""
    if selection.get_select_type() == import_library("h5py.h5s", "HDF5").SEL_ALL:
        return [(0, extent) for extent in shape]  # a file does not keep the bounds of this
    try:
        first, last = selection.get_select_bounds()
        count = selection.get_select_npoints()
    except (RuntimeError, ValueError, TypeError):  # of a selection without end
        return None
    box = [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]
    return box if math.prod(end - begin for begin, end in box) == count else None
