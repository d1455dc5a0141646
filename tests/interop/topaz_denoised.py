"""Writes what topaz makes of a tomogram, and its network: ``python topaz_denoised.py FOLDER``.

The network is the published one of topaz-em, which lies in its wheel; topaz 0.3.20 does not find it
there by its name. A patch of 32 voxels with 16 around it stands for the 96 and 48 that are topaz's
defaults.
"""

import sys
import warnings
from pathlib import Path

import numpy as np
import topaz
import torch
from scipy.ndimage import gaussian_filter
from topaz.denoise import Denoise3D
from topaz.denoising.models import UDenoiseNet3D

PATCH = 32
PADDING = 16

folder = Path(sys.argv[1])
random = np.random.default_rng(0)
smooth = gaussian_filter(random.normal(size=(70, 64, 51)), 3)
tomogram = (100 + 2000 * smooth + random.normal(0, 30, smooth.shape)).astype(np.float32)
network = UDenoiseNet3D(base_width=7)
weights = Path(topaz.__file__).parent / "pretrained" / "denoise" / "unet-3d-10a-v0.2.4.sav"
network.load_state_dict(torch.load(weights, weights_only=True))
model = Denoise3D(torch.nn.Sequential(network), dims=3)  # it takes no other class of network
result = model.denoise(tomogram, PATCH, PADDING, verbose=False)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that TorchScript is an old form
    window = [PATCH + 2 * PADDING] * 3
    traced = torch.jit.trace(network.eval(), torch.zeros(1, 1, *window))
    torch.jit.save(traced, folder / "network.ts")
np.savez(folder / "denoised.npz", image=tomogram, result=result)
