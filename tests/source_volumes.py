"""Sources for tests of conversion: random arrays, stacks of slices, and what a source must hold."""

import pickle

import numpy as np
from PIL import Image

from beam_inference.conversion.find_source import find_source
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.kvstores import LOCAL

RANDOM = np.random.default_rng(0)


def random_array(dtype="uint16", shape=(5, 6, 7)):
    if np.dtype(dtype).kind == "f":
        return RANDOM.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    native = np.dtype(dtype).newbyteorder("=")
    return RANDOM.integers(info.min, info.max, shape, native, endpoint=True).astype(dtype)


def source_of(path, dataset=None, scale=0):
    """The source at a path, as a worker gets it: pickled and unpickled."""
    return pickle.loads(pickle.dumps(find_source(str(path), dataset, scale, LOCAL)))


def assert_holds(source, array, size=None, start=(0, 0, 0)):
    """Check everything a source says of itself, and its voxels, whole and in a window."""
    czyx = array if array.ndim == 4 else array[None]
    info = source.info
    assert (info.channels, *info.bounds.shape) == czyx.shape
    assert info.bounds.start == start
    assert info.voxel_size_nm == size
    read = source.open()
    whole = read(info.bounds)
    assert info.dtype == whole.dtype.name == array.dtype.name
    np.testing.assert_array_equal(whole, czyx)
    lower = tuple(n // 3 for n in info.bounds.shape)
    box = BoundingBox(tuple(a + b for a, b in zip(start, lower, strict=True)), info.bounds.stop)
    np.testing.assert_array_equal(read(box), czyx[(slice(None), *(slice(n, None) for n in lower))])


def save_slices(folder, array, pattern="s{}.png", numbers=None, **options):
    """Slices (z, y, x) or (z, y, x, c), written by Pillow."""
    folder.mkdir(exist_ok=True)
    for z, plane in zip(numbers or range(len(array)), array, strict=True):
        Image.fromarray(plane).save(folder / pattern.format(z), **options)
    return folder
