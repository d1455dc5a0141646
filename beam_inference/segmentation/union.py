"""Union-find over arrays: which labels are one component, from pairs that come a batch at a time.

``parent`` is an int64 array, 8 bytes per label, with ``parent[k] <= k``; a root is its own parent.
Pairs are not kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]

_BLOCK_LABELS = 2**20


def unite(parent: Labels, one: Labels, other: Labels) -> None:
    """Make each ``one[k]`` and ``other[k]`` the same component.

    All pairs are united at once: the greater of two roots becomes a child of the smaller. Where
    several pairs share their greater root, only one of them is united in a round, so rounds are
    repeated for the pairs that are still apart. Each round leaves fewer roots.
    """
    while len(one):
        one = _roots(parent, one)
        other = _roots(parent, other)
        apart = one != other
        one = one[apart]
        other = other[apart]
        np.minimum.at(parent, np.maximum(one, other), np.minimum(one, other))


def _roots(parent: Labels, labels: Labels) -> Labels:
    """Find the roots of labels, and make them the labels' parents, so that paths stay short."""
    roots = parent[labels]
    while not np.array_equal(above := parent[roots], roots):
        roots = above
    parent[labels] = roots
    return roots


def number_components(parent: Labels, block_labels: int = _BLOCK_LABELS) -> int:
    """Replace each label's parent by the number of its component, ``0 … n - 1``, in place.

    Args:
        parent: the parents.
        block_labels: labels that are worked on at a time.

    Returns:
        The number of components, n.
    """
    for start in range(0, len(parent), block_labels):
        _roots(parent, np.arange(start, min(start + block_labels, len(parent))))
    count = 0
    for start in range(0, len(parent), block_labels):
        block = parent[start : start + block_labels]
        roots = block.copy()
        is_root = roots == np.arange(start, start + len(block))
        block[is_root] = np.arange(count, count + np.count_nonzero(is_root))
        # A root is not greater than its labels, so its place holds its number by now.
        block[~is_root] = parent[roots[~is_root]]
        count += int(np.count_nonzero(is_root))
    return count
