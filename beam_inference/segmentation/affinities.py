"""Affinities as they are stored, read as links."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import triple
from beam_inference.segmentation.watershed import Links, no_link
from beam_inference.volumes.volume import Volume

FRACTION_BITS = 20
"""Sums of affinities that are no integers are of multiples of 2^-20, so that they are exact, whatever their order."""
MOST = 2.0**10


def read_links(volume: Volume, core: BoundingBox, *, to_next: bool) -> Links:
    """The links of a chunk.

    Args:
        volume: affinities along z, y and x in its channels, in this order; 8-bit or 16-bit unsigned
            integers, or floats, which are read as float32.
        core: the chunk's box.
        to_next: whether a voxel's affinities are those with the next voxels; else with the ones
            before.

    Raises:
        What :meth:`beam_inference.volumes.volume.Volume.read` does.
    """
    bounds = volume.bounds
    grown = []
    for a, b, first, last in zip(core.start, core.stop, bounds.start, bounds.stop, strict=True):
        grown.append((max(a - 1, first), b) if to_next else (a, min(b + 1, last)))
    box = BoundingBox(*zip(*grown, strict=True))
    values = volume.read(box)
    z, y, x = (_links(values[axis], box, core, bounds, axis, to_next) for axis in range(3))
    return z, y, x


def _links(
    values: NDArray[Any],
    box: BoundingBox,
    core: BoundingBox,
    bounds: BoundingBox,
    axis: int,
    to_next: bool,
) -> NDArray[Any]:
    """Those along one axis, of its affinities in a box."""
    dtype = np.dtype(np.float32 if values.dtype.kind == "f" else np.int32)
    shape = list(core.shape)
    shape[axis] += 1
    links = np.full(shape, no_link(dtype), dtype)
    # The link at p is between the voxels p - 1 and p, both of which must be there.
    first = max(core.start[axis], bounds.start[axis] + 1)
    last = min(core.stop[axis] + 1, bounds.stop[axis])
    if last > first:
        start = list(core.start)
        stop = list(core.stop)
        start[axis] = first - to_next
        stop[axis] = last - to_next
        there = np.moveaxis(links, axis, 0)[first - core.start[axis] : last - core.start[axis]]
        there[...] = np.moveaxis(
            values[BoundingBox(triple(start), triple(stop)).slices_in(box)], axis, 0
        )
        if dtype.kind == "f":
            # minus infinity is an affinity; NaN stays
            np.maximum(there, np.finfo(np.float32).min, out=there)
            there[np.isnan(there)] = no_link(dtype)
    return links


def as_summands(links: NDArray[Any]) -> NDArray[np.int64]:
    """Affinities as integers, whose sums are exact; those of floats are beyond ±1024 taken as that."""
    if links.dtype.kind == "f":
        links = np.rint(np.ldexp(np.clip(links.astype(np.float64), -MOST, MOST), FRACTION_BITS))
    return links.astype(np.int64)


def as_limit(threshold: float, *, floats: bool) -> float:
    """A threshold for means of :func:`as_summands`, rounded as these are, so that it includes its own value."""
    return float(as_summands(np.array([threshold], np.float32))[0]) if floats else threshold
