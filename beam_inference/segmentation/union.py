"""Union-find over arrays: which labels are one component, from pairs that come a batch at a time.

``parent`` is an int64 array, 8 bytes per label, with ``parent[k] <= k``; a root is its own parent.
Pairs are not kept.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]

_BLOCK = 2**20


def unite(parent: Labels, one: Labels, other: Labels) -> None:
    """Make each ``one[k]`` and ``other[k]`` the same component.

    All pairs at once: the greater of two roots is hooked to the smaller, again for those that are
        still apart. Each round leaves fewer roots.
    """
    while len(one):
        one = _roots(parent, one)
        other = _roots(parent, other)
        apart = one != other
        one = one[apart]
        other = other[apart]
        np.minimum.at(parent, np.maximum(one, other), np.minimum(one, other))


def _roots(parent: Labels, labels: Labels) -> Labels:
    roots = parent[labels]
    while not np.array_equal(above := parent[roots], roots):
        roots = above
    parent[labels] = roots
    return roots


def number_components(parent: Labels) -> int:
    """Put the number of its component, ``0 … n - 1``, in the place of each label's parent; returns n. In place."""
    for start in range(0, len(parent), _BLOCK):
        _roots(parent, np.arange(start, min(start + _BLOCK, len(parent))))
    count = 0
    for start in range(0, len(parent), _BLOCK):
        block = parent[start : start + _BLOCK]
        roots = block.copy()
        own = roots == np.arange(start, start + len(block))
        block[own] = np.arange(count, count + np.count_nonzero(own))
        block[~own] = parent[roots[~own]]  # roots come before, and have their number by now
        count += int(np.count_nonzero(own))
    return count
