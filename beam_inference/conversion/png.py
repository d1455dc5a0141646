"""PNG and JPEG slices, through Pillow: what would lose bits or colours on the way is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.conversion.protocol import library
from beam_inference.errors import PermanentReadError, VolumeError
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx

_CHANNELS = {"L": 1, "P": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 1, "I;16B": 1}
_GREY = 0
_PALETTE_TYPE = 3

PNG_CHANNELS = {"uint8": (1, 2, 3, 4), "uint16": (1,)}
"""How many channels a PNG may have, by dtype."""


def _pillow() -> Any:
    image: Any = library("PIL.Image", "PNG and JPEG")
    image.MAX_IMAGE_PIXELS = None  # a slice of a volume is large by right
    return image


def read_picture_header(path: str) -> tuple[int, int, int, str, Zyx]:
    """Channels, y, x, dtype and grain of a slice.

    Raises:
        VolumeError: it is no picture, or its values would not come through as they are.
    """
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            width, height = image.size
            mode = image.mode
            kind = image.format
    except (OSError, ValueError, SyntaxError) as error:
        raise VolumeError(f"{path} cannot be read as a picture: {error}") from None
    deep = False
    if kind == "PNG":
        with Path(path).open("rb") as file:
            bits, colour = file.read(26)[24:]
        deep = bits == 16
        # Pillow would stretch the one, and halve the other
        if bits < 8 or (deep and colour != _GREY):
            raise VolumeError(
                f"{path} has {bits} bits a channel in PNG's colour type {colour}; expected 8, or "
                "16 for grey. Save it as TIFF."
            )
    if mode not in _CHANNELS:
        raise VolumeError(
            f"{path} is of Pillow's mode {mode}; expected grey, RGB or RGBA with 8 bits, or grey "
            "with 16"
        )
    return _CHANNELS[mode], height, width, "uint16" if deep else "uint8", (1, height, width)


def read_picture(path: str, box: BoundingBox) -> NDArray[Any]:
    """The voxels of a box, one slice deep: (channels, 1, y, x)."""
    try:
        with _pillow().open(path) as image:
            array = np.asarray(image)
    except Exception as error:  # the decoders have errors of their own
        raise PermanentReadError(f"cannot read {path}: {error}") from error
    array = array[..., np.newaxis] if array.ndim == 2 else array
    _, y0, x0 = box.start
    _, y1, x1 = box.stop
    return np.moveaxis(array[y0:y1, x0:x1], -1, 0)[:, np.newaxis]


def write_png(path: Path, array: NDArray[Any]) -> None:
    """Write a slice (channels, y, x) of the dtype and channels of :data:`PNG_CHANNELS`."""
    image = array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)
    _pillow().fromarray(np.ascontiguousarray(image)).save(path, compress_level=1)
