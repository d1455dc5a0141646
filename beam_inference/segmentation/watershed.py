"""The watershed of an affinity graph, in one chunk and across its seams: pure functions.

Voxels are the vertices, and each has an edge to its six neighbours. Each voxel is joined to the
neighbour that it has the greatest affinity with; what is joined, directly or not, is a fragment:
the basin of a local maximum of the affinities, a watershed cut (Cousty et al., *Watershed Cuts:
Minimum Spanning Forests and the Drop of Water Principle*, 2009, for edges of distinct weights;
Zlateski and Seung, *Image Segmentation by Size-Dependent Single Linkage Clustering of a Watershed
Basin Graph*, 2015, have the two limits below). Of equal affinities that along x counts as greater
than that along y, and that along z as least; on one axis, the one to the next voxel. This is a
total order of all edges of a volume, so no cycle can come about, and plateaus fall apart instead of
flowing into several basins at a time. **What a voxel is joined to depends on its own six edges
only**, hence fragments do not depend on the chunks.

Edges are given as *links*: along an axis with ``n`` voxels there are ``n + 1``, the first to the
voxel before the chunk, the last to the one after it. Where there is no voxel, or no number, the
link is :func:`no_link`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype
from beam_inference.geometry.zyx import Zyx
from beam_inference.segmentation.compiled import kernels
from beam_inference.segmentation.labelling import CODE_BITS, POSITIONS, STEPS
from beam_inference.volumes.packed_arrays import Arrays

Links = tuple[AnyArray, AnyArray, AnyArray]
"""Affinities along z, y and x, one more on that axis than the chunk's shape: integers with a sign,
or float32."""

_NEXT = (1, 4, 16)  # as kernels.label_basins numbers them
"""A voxel's choice of the edge to the next voxel along z, y or x."""
_BEFORE = (2, 8, 32)
"""A voxel's choice of the edge to the previous voxel along z, y or x."""


def no_link(dtype: AnyDtype) -> int | float:
    """The value of a link where there is none: less than any affinity."""
    return -np.inf if dtype.kind == "f" else -1


def find_fragments(
    links: Links, low: float, high: float
) -> tuple[NDArray[np.uint32], int, dict[str, NDArray[np.bool_]]]:
    """Find the fragments of a chunk.

    Args:
        links: links of the chunk.
        low: voxels are not joined by an edge of lower affinity; those with no other edges are
            background, 0.
        high: voxels with an edge of this affinity or more are joined in any case; at least ``low``.

    Returns:
        Labels (z, y, x), 0 or ``1 … count``; their count; and, per axis, ``joined_first0`` and
        ``joined_last0``, …: at which voxels of the first and last plane this chunk's side wants to
        be joined across the seam.
    """
    shape = links[0].shape[0] - 1, *links[0].shape[1:]
    dtype = links[0].dtype
    least, most, none = (
        np.float32(value) if dtype.kind == "f" else math.ceil(value)
        for value in (low, high, no_link(dtype))
    )
    choice = np.empty(shape, np.uint8)
    labels, count = kernels().label_basins(*links, least, most, none, choice)
    joined = {}
    for axis, link in enumerate(links):
        first = _parts(axis, slice(None, 1))
        last = _parts(axis, slice(-1, None))
        joined[f"joined_first{axis}"] = (choice[first] == _BEFORE[axis]) | (link[first] >= most)
        joined[f"joined_last{axis}"] = (choice[last] == _NEXT[axis]) | (link[last] >= most)
    return labels, int(count), joined


def _parts(axis: int, part: slice) -> tuple[slice, ...]:
    return tuple(part if a == axis else slice(None) for a in range(3))


def fragment_pairs(chunks: Mapping[Zyx, Arrays]) -> NDArray[np.int64]:
    """Pairs of labels, of a chunk and of its neighbours, that are one fragment.

    Args:
        chunks: arrays of the chunk, at position (0, 0, 0), and of its neighbours: planes of labels
            at seams, ``first0`` … ``last2``, and what :func:`find_fragments` returns for them.

    Returns:
        Codes, (pairs, 2): see :data:`~beam_inference.segmentation.labelling.CODE_BITS`.
    """
    pairs = [np.zeros((0, 2), np.int64)]
    own = chunks[0, 0, 0]
    for axis, step in enumerate(STEPS):
        if step in chunks:
            other = chunks[step]
            on = own[f"joined_last{axis}"] | other[f"joined_first{axis}"]
            ones = own[f"last{axis}"][on].astype(np.int64)
            both = np.unique(ones << CODE_BITS | other[f"first{axis}"][on])
            codes = np.stack([both >> CODE_BITS, both & (1 << CODE_BITS) - 1], axis=1)
            codes[:, 1] |= POSITIONS.index(step) << CODE_BITS
            pairs.append(codes)
    return np.concatenate(pairs)
