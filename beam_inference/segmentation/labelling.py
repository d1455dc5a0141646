"""The connected components of one chunk, and those it shares with its neighbours: pure functions.

A chunk's labels are unique in that chunk only. Those that touch a seam (a border with another
chunk) come first, so that everything about seams is done on the numbers ``1 … touching``, and
everything else stays within the chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.errors import ConfigError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.grids import ChunkGrid
from beam_inference.geometry.zyx import Zyx
from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.records import RECORD

CODE_BITS = 32
"""A code is ``position << 32 | label``, with a neighbour's place in :data:`POSITIONS`."""

POSITIONS: tuple[Zyx, ...] = tuple((z, y, x) for z, y, x in product((0, 1), repeat=3))
"""A chunk and its seven neighbours at or after it on every axis: steps on the chunk grid, ZYX."""

STEPS: tuple[Zyx, ...] = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
"""The steps to the next chunk, or voxel, on each axis."""


def cc3d_library() -> ModuleType:
    """Import the library that labels arrays.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import cc3d
    except ImportError:
        raise ConfigError(
            "this needs connected-components-3d: pip install 'beam-inference[segmentation]', here "
            "and on workers"
        ) from None
    return cc3d


@dataclass(frozen=True)
class Faces:
    """Everything about a chunk that its neighbours need.

    Attributes:
        first, last: for each axis the first and last plane of labels, with the chunk's shape but
            for 1 on that axis; empty (shape (0,)) where no chunk is on that side.
        values: the input's value of each label that touches a seam; labels that touch are one only
            if these agree.
    """

    first: tuple[NDArray[np.uint32], ...]
    last: tuple[NDArray[np.uint32], ...]
    values: AnyArray


@dataclass(frozen=True)
class LabelledChunk:
    """The components of a chunk.

    Attributes:
        labels: (z, y, x); 0 is background, ``1 … touching`` touch a seam, the rest does not; each
            of the two sorts is in the order of its first voxels.
        touching: number of labels that touch a seam.
        records: record of label ``k`` at ``k - 1``, see :data:`~.records.RECORD`.
        first: place of each label's first voxel in ``labels``, in C order.
    """

    labels: NDArray[np.uint32]
    touching: int
    records: NDArray[np.void]
    first: NDArray[np.int64]


def seams_of(grid: ChunkGrid, index: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Whether a chunk has a neighbour before it, and after it, on each axis."""
    position = grid.position(index)
    after = tuple(p + 1 < n for p, n in zip(position, grid.shape, strict=True))
    return tuple(p > 0 for p in position), after


def label_chunk(
    values: AnyArray,
    core: BoundingBox,
    grid: ChunkGrid,
    index: int,
    connectivity: int,
    min_size: int,
) -> tuple[LabelledChunk, Faces]:
    """Label one chunk of a volume.

    Args:
        values: (z, y, x), the voxels of ``core``: booleans, or integers, of which equal ones that
            touch belong together; 0 is background.
        core: the chunk's box.
        grid: all chunks; they tile the volume.
        index: number of this chunk.
        connectivity: 6, 18 or 26 neighbours.
        min_size: components of fewer voxels are left out, unless they touch a seam.

    Returns:
        The components, and the faces for the neighbours.
    """
    labels, count = _components(values, connectivity)
    chunk = arrange_labels(labels, count, core, grid, index, min_size)
    first, last = planes_at_seams(chunk.labels, grid, index)
    return chunk, Faces(first, last, values.reshape(-1)[chunk.first[: chunk.touching]])


def arrange_labels(
    labels: NDArray[np.uint32],
    count: int,
    core: BoundingBox,
    grid: ChunkGrid,
    index: int,
    min_size: int,
) -> LabelledChunk:
    """Put the labels of a chunk into the order of :class:`LabelledChunk`, in place.

    Args:
        labels: (z, y, x); all of ``1 … count`` are in use.
        count: number of labels.
        core: the chunk's box.
        grid: all chunks.
        index: number of this chunk.
        min_size: labels of fewer voxels become background, unless they touch a seam.
    """
    first, records = _measure(labels, count, core, grid.roi)
    seam = np.zeros(count + 1, bool)
    for planes in planes_at_seams(labels, grid, index):
        for plane in planes:
            seam[plane] = True
    touches = seam[1:]
    stays = touches | (records["voxels"] >= min_size)
    order = np.concatenate([np.flatnonzero(touches), np.flatnonzero(stays & ~touches)])
    numbers = np.zeros(count + 1, np.uint32)
    numbers[order + 1] = np.arange(1, len(order) + 1, dtype=np.uint32)
    kernels().renumber(labels, numbers, labels)
    return LabelledChunk(labels, int(touches.sum()), records[order], first[order])


def planes_at_seams(
    array: AnyArray, grid: ChunkGrid, index: int
) -> tuple[tuple[AnyArray, ...], tuple[AnyArray, ...]]:
    """The first and the last plane of a chunk's array on each axis; empty where no seam is."""
    before, after = seams_of(grid, index)
    nothing = np.zeros(0, array.dtype)
    return (
        tuple(
            _plane(array, axis, slice(None, 1)) if before[axis] else nothing for axis in range(3)
        ),
        tuple(
            _plane(array, axis, slice(-1, None)) if after[axis] else nothing for axis in range(3)
        ),
    )


def _plane(array: AnyArray, axis: int, part: slice) -> AnyArray:
    return array[tuple(part if a == axis else slice(None) for a in range(3))].copy()


_FEW_VOXELS = 64


def _components(values: AnyArray, connectivity: int) -> tuple[NDArray[np.uint32], int]:
    # Of booleans, cc3d 4.1.1 expects too few labels where an axis is one voxel long, and raises; of
    # bytes it does not.
    values = values.view(np.uint8) if values.dtype == bool else values
    if values.dtype == np.uint64 and (values.size < _FEW_VOXELS or values.size == len(values)):
        # Of a line along z, or of a few voxels, it takes no label from 2^63 on.
        found, numbers = np.unique(values, return_inverse=True)
        values = (numbers.reshape(values.shape) + int(found[0] != 0)).astype(np.uint32)
    labels, count = cc3d_library().connected_components(
        values, connectivity=connectivity, return_N=True, out_dtype=np.uint32
    )
    return labels, int(count)


def _measure(
    labels: NDArray[np.uint32], count: int, core: BoundingBox, bounds: BoundingBox
) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """The place of each label's first voxel, in C order, and the labels' records."""
    first = np.zeros(count, np.int64)
    records = np.zeros(count, RECORD)
    kernels().measure_labels(
        labels, first, records["voxels"], records["start"], records["stop"], records["sums"]
    )
    offset = np.subtract(core.start, bounds.start)
    records["start"] += offset
    records["stop"] += offset
    records["sums"] += records["voxels"][:, None] * offset
    place = np.stack(np.unravel_index(first, labels.shape)) + offset[:, None]
    records["first"] = np.ravel_multi_index(tuple(place), bounds.shape)
    return first, records


def equivalences(chunks: Mapping[Zyx, Faces], shape: Zyx, connectivity: int) -> NDArray[np.int64]:
    """Pairs of labels, of a chunk and of its neighbours, that are parts of one component.

    Two voxels of different chunks that touch have a corner of their common box in one chunk, and
    both lie in that chunk or in its neighbours at :data:`POSITIONS`; and, on some axis, one is in
    the last plane before the seam and the other in the first after it. So on each axis these two
    planes are labelled anew, as one small volume that reaches one voxel into the next chunks of the
    other axes::

           own last plane │ one voxel of the next chunk's last plane
        ══════════════════╪═══════════
           its first plane│ one voxel of the diagonal chunk's first plane

    Voxels with one label there are of one component. Edges and corners need no rule of their own.

    Args:
        chunks: the faces of the chunk, at position (0, 0, 0), and of its neighbours.
        shape: shape of the chunk, ZYX.
        connectivity: 6, 18 or 26 neighbours.

    Returns:
        Codes, (pairs, 2).
    """
    pairs = [
        _one_component(*_slab(chunks, shape, axis), connectivity)
        for axis in range(3)
        if STEPS[axis] in chunks
    ]
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs])


def _slab(chunks: Mapping[Zyx, Faces], shape: Zyx, axis: int) -> tuple[NDArray[np.int64], AnyArray]:
    """The codes, and the input's values, of the two planes at the seam after a chunk on an axis."""
    reaches = [int(step in chunks) for step in STEPS]
    codes: dict[Zyx, NDArray[np.int64]] = {}
    values: dict[Zyx, AnyArray] = {}
    for number, position in enumerate(POSITIONS):
        if position in chunks:
            faces = chunks[position]
            plane = (faces.first if position[axis] else faces.last)[axis]
            reach = tuple(
                slice(0, 1 if step and a != axis else None) for a, step in enumerate(position)
            )
            labels = plane[reach]
            value_of = np.concatenate([np.zeros(1, faces.values.dtype), faces.values])
            codes[position] = labels.astype(np.int64) | np.where(labels > 0, number << CODE_BITS, 0)
            values[position] = value_of[labels]
        else:
            size = [
                1 if a == axis else reaches[a] if step else shape[a]
                for a, step in enumerate(position)
            ]
            codes[position] = np.zeros(size, np.int64)
            values[position] = np.zeros(size, chunks[0, 0, 0].values.dtype)
    return _assemble(codes), _assemble(values)


def _assemble(parts: Mapping[Zyx, AnyArray]) -> AnyArray:
    return np.block([[[parts[z, y, x] for x in (0, 1)] for y in (0, 1)] for z in (0, 1)])


def _one_component(
    codes: NDArray[np.int64], values: AnyArray, connectivity: int
) -> NDArray[np.int64]:
    """Pairs of codes that chain all codes of each component of a small volume."""
    components, _ = _components(values, connectivity)
    foreground = components > 0
    names, which = np.unique(codes[foreground], return_inverse=True)
    both = np.unique(components[foreground].astype(np.int64) * len(names) + which)
    component, name = divmod(both, max(1, len(names)))
    together = component[1:] == component[:-1]
    return np.stack([names[name[:-1][together]], names[name[1:][together]]], axis=1)
