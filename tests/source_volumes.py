"""Sources for tests of conversion: random arrays, stacks of slices, and checks of sources."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from beam_inference.conversion.find_source import find_source
from beam_inference.conversion.protocol import Source
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import VoxelSizeNm, Zyx
from beam_inference.volumes.kvstores import LOCAL

RANDOM = np.random.default_rng(0)


def random_array(dtype: str = "uint16", shape: tuple[int, ...] = (5, 6, 7)) -> np.ndarray:
    """Random values of the whole range of an integer type, or of the normal distribution."""
    if np.dtype(dtype).kind == "f":
        return RANDOM.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    native = np.dtype(dtype).newbyteorder("=")
    return RANDOM.integers(info.min, info.max, shape, native, endpoint=True).astype(dtype)


def source_of(path: Path | str, dataset: str | None = None, scale: int = 0) -> Source:
    """The source at a path, as a worker gets it: pickled and unpickled."""
    source: Source = pickle.loads(pickle.dumps(find_source(str(path), dataset, scale, LOCAL)))
    return source


def assert_holds(
    source: Source, array: np.ndarray, size: VoxelSizeNm | None = None, start: Zyx = (0, 0, 0)
) -> None:
    """Check the description of a source, and its voxels, whole and in a window."""
    czyx = array if array.ndim == 4 else array[None]
    info = source.info
    assert (info.channels, *info.bounds.shape) == czyx.shape
    assert info.bounds.start == start
    assert info.voxel_size_nm == size
    read = source.open()
    whole = read(info.bounds)
    assert info.dtype == whole.dtype.name == array.dtype.name
    np.testing.assert_array_equal(whole, czyx)
    lower = zyx.triple(n // 3 for n in info.bounds.shape)
    box = BoundingBox(zyx.add(start, lower), info.bounds.stop)
    np.testing.assert_array_equal(read(box), czyx[(slice(None), *(slice(n, None) for n in lower))])


def save_slices(
    folder: Path,
    array: np.ndarray,
    pattern: str = "s{}.png",
    numbers: Sequence[int] | None = None,
    **options: Any,
) -> Path:
    """Write slices (z, y, x) or (z, y, x, c) by Pillow, and return their folder."""
    folder.mkdir(exist_ok=True)
    for z, plane in zip(numbers or range(len(array)), array, strict=True):
        Image.fromarray(plane).save(folder / pattern.format(z), **options)
    return folder
