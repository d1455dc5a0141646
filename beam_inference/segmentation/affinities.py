"""Stored affinities, read as links: see :mod:`~beam_inference.segmentation.watershed`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray, AnyDtype, empty
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx, triple
from beam_inference.segmentation.compiled import kernels
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
    # The link at p on an axis is between the voxels p - 1 and p; the later one's affinity, or the
    # earlier one's. One plane more on each axis holds all of them.
    start = triple(first - to_next for first in core.start)
    stop = triple(last + (not to_next) for last in core.stop)
    inside = BoundingBox(zyx.maximum(start, bounds.start), zyx.minimum(stop, bounds.stop))
    dtype = _links_dtype(volume.dtype)
    values = empty((3, *zyx.subtract(stop, start)), dtype)
    read = values[:, *inside.slices_in(BoundingBox(start, stop))]
    volume.read_into(inside, read)
    none = no_link(dtype)
    if dtype.kind == "f":
        kernels().clear_numbers(read, none, np.finfo(dtype).min)
    z, y, x = (_along(values, axis, core.shape, to_next) for axis in range(3))
    for axis, links in enumerate((z, y, x)):
        planes = np.moveaxis(links, axis, 0)
        if core.start[axis] == bounds.start[axis]:
            planes[0] = none
        if core.stop[axis] == bounds.stop[axis]:
            planes[-1] = none
    return z, y, x


def _links_dtype(dtype: AnyDtype) -> AnyDtype:
    """The least dtype that holds affinities of a dtype, and :func:`no_link`."""
    if dtype.kind == "f":
        return np.dtype(np.float32)
    return np.dtype(np.int16 if dtype.itemsize == 1 else np.int32)


def _along(values: AnyArray, axis: int, shape: Zyx, to_next: bool) -> AnyArray:
    """The links along one axis, among values with one plane more on each axis than the chunk."""
    parts = [slice(to_next, to_next + size) for size in shape]
    parts[axis] = slice(None)
    z, y, x = parts
    links: AnyArray = values[axis, z, y, x]
    return links


def as_summands(links: AnyArray) -> NDArray[np.int64]:
    """Affinities as integers, whose sums are exact; floats are clipped to ±:data:`MOST`."""
    if links.dtype.kind == "f":
        links = np.rint(np.ldexp(np.clip(links.astype(np.float64), -MOST, MOST), FRACTION_BITS))
    return links.astype(np.int64)


def as_limit(threshold: float, *, floats: bool) -> float:
    """A threshold for means of :func:`as_summands`.

    Means reach it that are as great as the number itself, as 3 / 5 is for 0.6, or as its float32.
    """
    if not floats:
        return threshold
    stored = float(as_summands(np.array([threshold], np.float32))[0])
    return min(stored, float(np.ldexp(np.clip(threshold, -MOST, MOST), FRACTION_BITS)))
