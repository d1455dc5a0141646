"""Stored affinities, read as links: see :mod:`~beam_inference.segmentation.watershed`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import triple
from beam_inference.segmentation.watershed import Links, no_link
from beam_inference.volumes.volume import Volume

FRACTION_BITS = 20
"""Affinities that are floats are summed as multiples of 2^-20: exactly, whatever their order."""
MOST = 2.0**10
"""Affinities that are floats are clipped to plus or minus this before they are summed."""


def read_links(volume: Volume, core: BoundingBox, *, to_next: bool) -> Links:
    """Read the links of a chunk.

    Args:
        volume: affinities along z, y and x in its channels, in this order; 8-bit or 16-bit unsigned
            integers, or floats, which are read as float32.
        core: the chunk's box.
        to_next: whether a voxel's affinities are to the next voxels; else to the previous ones.

    Raises:
        The errors of :meth:`beam_inference.volumes.volume.Volume.read`.
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
    values: AnyArray,
    box: BoundingBox,
    core: BoundingBox,
    bounds: BoundingBox,
    axis: int,
    to_next: bool,
) -> AnyArray:
    """The links along one axis, from the affinities along it in a box."""
    dtype = np.dtype(np.float32 if values.dtype.kind == "f" else np.int32)
    shape = list(core.shape)
    shape[axis] += 1
    links = np.full(shape, no_link(dtype), dtype)
    # The link at p is between the voxels p - 1 and p, both of which must be in the volume.
    first = max(core.start[axis], bounds.start[axis] + 1)
    last = min(core.stop[axis] + 1, bounds.stop[axis])
    if last > first:
        start = list(core.start)
        stop = list(core.stop)
        start[axis] = first - to_next
        stop[axis] = last - to_next
        inside = np.moveaxis(links, axis, 0)[first - core.start[axis] : last - core.start[axis]]
        inside[...] = np.moveaxis(
            values[BoundingBox(triple(start), triple(stop)).slices_in(box)], axis, 0
        )
        if dtype.kind == "f":
            # Minus infinity is an affinity, but also means "no link": raise it. NaN is no link.
            np.maximum(inside, np.finfo(np.float32).min, out=inside)
            inside[np.isnan(inside)] = no_link(dtype)
    return links


def as_summands(links: AnyArray) -> NDArray[np.int64]:
    """Affinities as integers, whose sums are exact; floats are clipped to ±:data:`MOST`."""
    if links.dtype.kind == "f":
        links = np.rint(np.ldexp(np.clip(links.astype(np.float64), -MOST, MOST), FRACTION_BITS))
    return links.astype(np.int64)


def as_limit(threshold: float, *, floats: bool) -> float:
    """A threshold for means of :func:`as_summands`, rounded alike, so that it includes itself."""
    return float(as_summands(np.array([threshold], np.float32))[0]) if floats else threshold
