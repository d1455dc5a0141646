"""Writes what scikit-image makes of an array at other shapes: FOLDER/resized.npz.

Run by the Python of requirements.txt; nnU-Net resamples with this function.
"""

import sys
from pathlib import Path

import numpy as np
from skimage.transform import resize

SHAPES = ((61, 13, 40), (9, 96, 27), (30, 41, 23))

image = np.random.default_rng(0).random((31, 40, 23), np.float32)
results = {
    f"{order} {' '.join(map(str, shape))}": resize(
        image.astype(np.float64), shape, order, mode="edge", anti_aliasing=False, clip=False
    )
    for order in (0, 1, 3)
    for shape in SHAPES
}
np.savez(Path(sys.argv[1]) / "resized.npz", image=image, **results)
