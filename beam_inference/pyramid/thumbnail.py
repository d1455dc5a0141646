"""A picture of a whole volume: planes of a coarse level, quantised to uint8, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.sampling import spread
from beam_inference.geometry.zyx import ceil_div
from beam_inference.pyramid.scales import multiscale_volume
from beam_inference.volumes.detection import neighbours, volume_at
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume

SIDE = 512
"""Pixels of a plane's longer side, at most, where the volume has such a level."""
_LARGEST_SIDE = 2048


def thumbnail(url: str, storage: Storage, path: Path, planes: int) -> str:
    """Draw z-planes of the finest level whose planes are no larger than 512 pixels; says what was drawn.

    Bytes are drawn as they are, other values from the least that is shown (black) to the greatest
    (white), labels each in a colour of its own, with 0 black; three channels as RGB, of others the
    first. Needs matplotlib.

    Raises:
        VolumeError: there is no volume, or no level that is coarse enough.
    """
    import matplotlib.image

    found = volume_at(url, storage)
    if found is None:
        raise VolumeError(f"no volume at {url}{neighbours(url)}")
    volume, scale = _coarse(url, storage, len(found.scales))
    labels = (
        found.scales[0].voxel_size_nm is not None and multiscale_volume(url, storage).holds_labels
    )
    z0, *start = volume.bounds.start
    z1, *stop = volume.bounds.stop
    where = spread(range(z0, z1), planes)
    boxes = [BoundingBox((z, start[0], start[1]), (z + 1, stop[0], stop[1])) for z in where]
    shown = np.stack([volume.read(box)[:, 0] for box in boxes])
    matplotlib.image.imsave(path, _montage(_pixels(shown, labels=labels)))
    return (
        f"{path}: {len(where)} of {z1 - z0} planes of scale {scale}, "
        f"{stop[0] - start[0]}×{stop[1] - start[1]} pixels"
    )


def _coarse(url: str, storage: Storage, count: int) -> tuple[Volume, int]:
    for scale in range(count):
        volume = open_volume(url, scale=scale, storage=storage)
        side = max(volume.bounds.shape[1:])
        if side <= SIDE or (scale == count - 1 and side <= _LARGEST_SIDE):
            return volume, scale
    raise VolumeError(
        f"the coarsest level of {url} has planes of {side} pixels, too many for a thumbnail (at "
        f"most {_LARGEST_SIDE}). Make coarser ones first: beam-inference pyramid {url}"
    )


def _pixels(shown: NDArray[Any], *, labels: bool) -> NDArray[np.uint8]:
    """(planes, channels, y, x) as (planes, y, x, 3)."""
    chosen = np.moveaxis(shown if shown.shape[1] == 3 else shown[:, :1], 1, -1)
    if labels:
        # Fibonacci hashing, modulo 2^64
        mixed = chosen[..., :1].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bytes_of = [(mixed >> np.uint64(shift)) & np.uint64(0xFF) for shift in (56, 48, 40)]
        return np.concatenate(bytes_of, axis=-1).astype(np.uint8)
    if chosen.dtype != np.uint8:
        values = chosen.astype(np.float64)
        low = np.nanmin(values)
        high = np.nanmax(values)
        scaled = (values - low) / (high - low) if high > low else np.zeros_like(values)
        chosen = np.rint(np.nan_to_num(scaled) * 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(chosen, (*chosen.shape[:-1], 3)))


def _montage(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Row by row, with a white line between planes."""
    count, height, width, _ = planes.shape
    columns = min(count, max(1, round((count * height / width) ** 0.5)))
    rows = ceil_div(count, columns)
    picture = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, 3), 255, np.uint8)
    for k, plane in enumerate(planes):
        row, column = divmod(k, columns)
        top = row * (height + 1)
        left = column * (width + 1)
        picture[top : top + height, left : left + width] = plane
    return picture
