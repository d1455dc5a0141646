"""The real brain data of the demo: the MNI152 template that nilearn carries inside its wheel.

Every array here is indexed (z, y, x): z runs from inferior to superior, y from posterior to
anterior and x from left to right, one millimetre per voxel, 189 x 233 x 197. Nothing is
downloaded. nilearn is imported inside the functions, so that importing this module needs only
numpy; without nilearn the functions raise ImportError.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray


def t1_as_uint8(t1: AnyArray) -> NDArray[np.uint8]:
    """Scale a non-negative image of any shape and dtype so that its maximum becomes 255.

    Values below zero become 0. Returns uint8 of the same shape and axis order.
    """
    scaled: AnyArray = np.clip(t1 / t1.max(), 0, 1)
    return np.round(255 * scaled).astype(np.uint8)


def load_t1() -> NDArray[np.uint8]:
    """Load the skull-stripped T1 template at 1 mm as uint8, (z, y, x)."""
    from nilearn.datasets import load_mni152_template

    return t1_as_uint8(_as_zyx(load_mni152_template(resolution=1)))


def load_tissue_maps() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Load the probability maps of grey and white matter at 1 mm, float32 in [0, 1], (z, y, x)."""
    from nilearn.datasets import load_mni152_gm_template, load_mni152_wm_template

    grey = _as_zyx(load_mni152_gm_template(resolution=1))
    white = _as_zyx(load_mni152_wm_template(resolution=1))
    return grey, white


def _as_zyx(image: Any) -> NDArray[np.float32]:
    """The voxels of a NIfTI image, which are stored (x, y, z), as a contiguous (z, y, x) array."""
    voxels = np.asarray(image.dataobj, dtype=np.float32)
    return np.ascontiguousarray(voxels.transpose(2, 1, 0))
