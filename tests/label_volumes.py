"""Volumes in memory for tests of components and segmentation, and what their tables should say."""

from itertools import count

import numpy as np

from beam_inference.bounding_box import BoundingBox
from beam_inference.outputs import OutputSpec, create_output
from beam_inference.stores import open_kvstore

_numbers = count()


def write(array, start=(3, -5, 2), voxel_size_nm=(40.0, 8.0, 4.0), **spec):
    """A volume in memory; its URL."""
    array = array if array.ndim == 4 else array[None]
    box = BoundingBox(start, tuple(a + n for a, n in zip(start, array.shape[1:], strict=True)))
    url = f"memory://volume{next(_numbers)}"
    create_output(
        OutputSpec(
            **{
                "url": url,
                "format": "precomputed",
                "dtype": array.dtype.name,
                "channels": len(array),
                "bounds": box,
                "block_shape": (8, 8, 8),
                "voxel_size_nm": voxel_size_nm,
            }
            | spec
        )
    ).write(box, array)
    return url


def read_table(work, parts=1):
    store = open_kvstore(work.table_url)
    texts = [store.read(f"{part:06d}.csv").result().value.decode() for part in range(parts)]
    assert store.read(f"{parts:06d}.csv").result().state == "missing"
    return texts


def rows_by_brute_force(labels, start, voxel_size_nm):
    for label in np.unique(labels[labels > 0]):
        places = np.argwhere(labels == label)
        box = [*(places.min(0) + start), *(places.max(0) + 1 + start)]
        centre = ((places + start + 0.5) * voxel_size_nm).mean(0)
        yield [label, len(places), *box, *centre]
