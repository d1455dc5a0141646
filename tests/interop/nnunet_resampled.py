"""Writes what nnU-Net's resampling gives: ``python nnunet_resampled.py FOLDER``.

For each pair of voxel sizes: a volume, as preprocessing resamples it after its clip, and logits at
the network's voxel size, as they are resampled to the volume's again.
"""

import os
import sys
from pathlib import Path

import numpy as np

for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ[variable] = sys.argv[1]

from nnunetv2.preprocessing.resampling.default_resampling import (  # noqa: E402 - it looks for its folders when it is imported
    compute_new_shape,
    resample_data_or_seg_to_shape,
)

CLIP = (-200, 300)
SHAPE = (14, 40, 36)
CASES = {
    "isotropic": ((2.0, 1.0, 1.0), (1.5, 1.5, 1.5)),
    "thick sections": ((5.0, 0.8, 0.8), (2.5, 1.1, 1.1)),
    "thick sections wanted": ((1.0, 0.9, 0.9), (4.0, 1.2, 1.2)),
}

generator = np.random.default_rng(0)
image = generator.integers(-1000, 1500, (1, *SHAPE)).astype(np.int16)
results = {"image": image, "clip": np.array(CLIP)}
for name, (size, wanted) in CASES.items():
    shape = compute_new_shape(SHAPE, size, wanted)
    clipped = image.clip(*CLIP).astype(np.float32)
    logits = generator.standard_normal((3, *shape)).astype(np.float32)
    results[f"{name}: sizes"] = np.array([size, wanted])
    results[f"{name}: made"] = resample_data_or_seg_to_shape(
        clipped, shape, size, wanted, order=3, order_z=0, force_separate_z=None
    )
    results[f"{name}: logits"] = logits
    results[f"{name}: back"] = resample_data_or_seg_to_shape(
        logits, SHAPE, wanted, size, order=1, order_z=0, force_separate_z=None
    )
np.savez(Path(sys.argv[1]) / "resampled.npz", **results)
