"""Writes what nnU-Net makes of an image before it resamples it: ``python ... FOLDER``.

The image is cropped to what is not zero, and each channel is normalised by a scheme of its own.
"""

import os
import sys
from pathlib import Path

import numpy as np

for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ[variable] = sys.argv[1]

from nnunetv2.preprocessing.cropping.cropping import (  # noqa: E402 - it looks for its folders when it is imported
    crop_to_nonzero,
)
from nnunetv2.preprocessing.normalization.default_normalization_schemes import (  # noqa: E402
    CTNormalization,
    RescaleTo01Normalization,
    RGBTo01Normalization,
    ZScoreNormalization,
)

CT = {"mean": 40.5, "std": 110.25, "percentile_00_5": -150.0, "percentile_99_5": 390.0}
SCHEMES = [CTNormalization, ZScoreNormalization, RescaleTo01Normalization, RGBTo01Normalization]

generator = np.random.default_rng(0)
image = np.zeros((4, 30, 50, 44), np.float32)
inside = generator.gamma(2, 60, (4, 19, 32, 27)).round(3).clip(0, 255)
image[:, 6:25, 11:43, 9:36] = inside - [[[[100]]], [[[0]]], [[[0]]], [[[0]]]]
image[:, 10:15, 20:30, 15:20] = 0
image[1] *= 100
cropped, _, box = crop_to_nonzero(image)
normalized = [
    scheme(use_mask_for_norm=False, intensityproperties=CT).run(channel.copy())
    for scheme, channel in zip(SCHEMES, cropped, strict=True)
]
np.savez(Path(sys.argv[1]) / "normalized.npz", image=image, box=np.array(box), result=normalized)
