"""Writes what MONAI makes of what is not zero: ``python monai_normalized.py FOLDER``."""

import sys
from pathlib import Path

import numpy as np
from monai.transforms import NormalizeIntensity

generator = np.random.default_rng(0)
image = np.zeros((3, 30, 50, 44), np.float32)
image[:, 6:25, 11:43, 9:36] = generator.gamma(2, 60, (3, 19, 32, 27)).round(3)
image[:, 10:15, 20:30, 15:20] = 0
image[1, 8:12, 30:40] = 0  # zeros of one channel alone
image[2] *= -100
result = NormalizeIntensity(nonzero=True, channel_wise=True)(image.copy())
np.savez(Path(sys.argv[1]) / "normalized.npz", image=image, result=np.asarray(result))
