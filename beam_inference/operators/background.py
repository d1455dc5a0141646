"""Background in a piece of a volume: zeros that are joined by their faces, and where they go on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

_SLAB_VOXELS = 2**22
"""Voxels that are counted at a time."""


@dataclass(frozen=True, slots=True)
class Background:
    """What of a piece is zero in every channel, in parts that are joined face by face.

    Parts that touch a face of the piece may go on beyond it. They are numbered from 1.

    Attributes:
        faces: numbers of the parts at each face of the piece, 0 where there is none; first and last
            along z, then along y, then along x.
        sizes: voxels of each of these parts.
        inner: voxels of all other parts.
    """

    faces: tuple[NDArray[np.int32], ...]
    sizes: NDArray[np.int64]
    inner: int


def find_background(inside: NDArray[np.bool_]) -> Background:
    """Find the background in a piece of a volume.

    Args:
        inside: what is not zero (Z, Y, X).
    """
    labels, count = _label(inside)
    touched = _labels_at_faces(labels)
    sizes = np.zeros(count + 1, np.int64)
    depth = max(1, _SLAB_VOXELS // max(1, inside[0].size))
    for z in range(0, len(labels), depth):
        sizes += np.bincount(labels[z : z + depth].ravel(), minlength=count + 1)
    numbers = np.zeros(count + 1, np.int32)
    numbers[touched] = np.arange(1, len(touched) + 1)
    faces = tuple(numbers[face] for face in _faces(labels))
    of_parts = sizes[touched]
    return Background(faces, of_parts, int(sizes[1:].sum() - of_parts.sum()))


def find_holes(inside: NDArray[np.bool_], outside: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where a piece of a volume has holes.

    Args:
        inside: what is not zero (Z, Y, X).
        outside: whether each part of :func:`find_background` is outside.

    Raises:
        ValueError: there is another number of parts.
    """
    labels, count = _label(inside)
    touched = _labels_at_faces(labels)
    if len(touched) != len(outside):
        raise ValueError(f"{len(touched)} parts of background, expected {len(outside)}")
    is_hole = np.ones(count + 1, bool)
    is_hole[0] = False
    is_hole[touched[outside]] = False
    holes: NDArray[np.bool_] = is_hole[labels]
    return holes


def _label(inside: NDArray[np.bool_]) -> tuple[NDArray[np.int32], int]:
    labels = np.zeros(inside.shape, np.int32)
    count = 0 if inside.all() else ndimage.label(~inside, output=labels)
    return labels, int(count)


def _faces(labels: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    return [np.take(labels, [end], axis).squeeze(axis) for axis in range(3) for end in (0, -1)]


def _labels_at_faces(labels: NDArray[np.int32]) -> NDArray[np.int32]:
    found: NDArray[np.int32] = np.unique(np.concatenate([np.unique(f) for f in _faces(labels)]))
    return found[found > 0]


class Joints:
    """Which parts of background are one, over all pieces of a volume, and which are outside.

    Parts are numbered over all pieces, from 1; part 0 is what lies beyond the volume.
    """

    def __init__(self) -> None:
        self._count = 1
        self._pairs: list[NDArray[np.int64]] = []

    def add_piece(self, background: Background) -> list[NDArray[np.int64]]:
        """Add a piece; its faces with the numbers that its parts have among all, else 0."""
        before = self._count - 1
        self._count += len(background.sizes)
        return [np.where(face, face + np.int64(before), 0) for face in background.faces]

    def join(self, face: NDArray[np.int64], other: NDArray[np.int64]) -> None:
        """Join the parts at two faces that touch."""
        both = (face > 0) & (other > 0)
        self._pairs.append(np.unique(np.stack([face[both], other[both]], axis=1), axis=0))

    def join_border(self, face: NDArray[np.int64]) -> None:
        """Join the parts at a face that is one of the volume with what lies beyond."""
        found = np.unique(face[face > 0])
        self._pairs.append(np.stack([found, np.zeros_like(found)], axis=1))

    def are_outside(self) -> NDArray[np.bool_]:
        """Whether each part, from 1 on, is outside."""
        pairs = np.concatenate([np.empty((0, 2), np.int64), *self._pairs])
        graph = coo_array(
            (np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(self._count,) * 2
        )
        _, component = connected_components(graph, directed=False)
        outside: NDArray[np.bool_] = component[1:] == component[0]
        return outside
