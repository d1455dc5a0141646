"""Picture of a whole volume: planes of a coarse scale, side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.storage import Storage
from beam_inference.errors import VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.sampling import spread
from beam_inference.geometry.zyx import ceil_div
from beam_inference.pyramid.multiscale import multiscale_volume
from beam_inference.volumes.detection import hint_at_neighbours, volume_at
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.volume import Volume

SIDE = 512
"""Pixels of a plane's longer side, at most, where the volume has such a scale."""
_LARGEST_SIDE = 2048


def draw_thumbnail(url: str, storage: Storage, path: Path, planes: int) -> str:
    """Draw z-planes of the finest scale whose planes are no larger than 512 pixels.

    Bytes are drawn as they are, and other values from the least in the picture (black) to the
    greatest (white). Labels have a colour each, with 0 black. Three channels are drawn as RGB; of
    any other number the first is drawn. Needs matplotlib.

    Args:
        url: the volume.
        storage: settings to reach it.
        path: image file to write.
        planes: number of planes.

    Returns:
        a line that describes the picture.

    Raises:
        VolumeError: there is no volume, or no scale that is coarse enough.
    """
    import matplotlib.image

    stored = volume_at(url, storage)
    if stored is None:
        raise VolumeError(f"no volume at {url}{hint_at_neighbours(url)}")
    volume, scale = _open_coarse_scale(url, storage, len(stored.scales))
    labels = (
        stored.scales[0].voxel_size_nm is not None and multiscale_volume(url, storage).holds_labels
    )
    z0, y0, x0 = volume.bounds.start
    z1, y1, x1 = volume.bounds.stop
    chosen = spread(range(z0, z1), planes)
    boxes = [BoundingBox((z, y0, x0), (z + 1, y1, x1)) for z in chosen]
    shown = np.stack([volume.read(box)[:, 0] for box in boxes])
    matplotlib.image.imsave(path, _montage(_pixels(shown, labels=labels)))
    return f"{len(chosen)} of {z1 - z0} planes of scale {scale}, {y1 - y0}×{x1 - x0} pixels"


def _open_coarse_scale(url: str, storage: Storage, count: int) -> tuple[Volume, int]:
    for scale in range(count):
        volume = open_volume(url, scale=scale, storage=storage)
        side = max(volume.bounds.shape[1:])
        if side <= SIDE or (scale == count - 1 and side <= _LARGEST_SIDE):
            return volume, scale
    raise VolumeError(
        f"the coarsest scale of {url} has planes of {side} pixels, too many for a thumbnail (at "
        f"most {_LARGEST_SIDE}). Make coarser ones first: beam-inference pyramid {url}"
    )


def _pixels(shown: AnyArray, *, labels: bool) -> NDArray[np.uint8]:
    """Colours of planes: from (planes, channels, y, x) to (planes, y, x, 3)."""
    chosen = np.moveaxis(shown if shown.shape[1] == 3 else shown[:, :1], 1, -1)
    if labels:
        # Fibonacci hashing, modulo 2^64
        mixed = chosen[..., :1].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bytes_of = [(mixed >> np.uint64(shift)) & np.uint64(0xFF) for shift in (56, 48, 40)]
        return np.concatenate(bytes_of, axis=-1).astype(np.uint8)
    if chosen.dtype != np.uint8:
        scaled = _scale_to_one(chosen)
        chosen = np.rint(np.nan_to_num(scaled).clip(0, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(chosen, (*chosen.shape[:-1], 3)))


def _scale_to_one(values: AnyArray) -> NDArray[np.float64]:
    """Map the least value to 0 and the greatest to 1, of those that are finite."""
    if values.dtype.kind in "iu":  # in 64 bits, of which differences wrap around to what they are
        wide = values.astype(np.int64 if values.dtype.kind == "i" else np.uint64)
        rest = (wide - wide.min()).view(np.uint64).astype(np.float64)
        scaled: NDArray[np.float64] = rest / max(1.0, rest.max())
        return scaled
    halves = values.astype(np.float64) / 2  # of which no difference is too large
    finite = halves[np.isfinite(halves)]
    low = finite.min(initial=np.inf)
    high = finite.max(initial=-np.inf)
    return (halves - low) / (high - low) if high > low else np.zeros_like(halves)


def _montage(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Arrange planes row by row, with a white line between them."""
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
