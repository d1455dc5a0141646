"""The network of the demo: a small 3-D U-Net that tells grey from white matter in a T1 image.

Spatial axes are always in the order (z, y, x). The network has no normalisation layers, so a
voxel's result depends only on the image within 16 voxels of it and never on the rest of the patch
or batch. Beyond the sides of a patch it sees zeros, so overlapping patches agree well inside and
less near their sides. It costs about 6,300 multiply-adds per voxel and has about 40,000
parameters.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

CLASSES = ("other", "grey matter", "white matter")
"""The meaning of the output channels, in order."""

DOWNSAMPLING = 4
"""Every spatial side of the input must be a multiple of this."""


class TissueNetwork(nn.Module):
    """A U-Net with three levels of 8, 16 and 32 channels and additive skip connections.

    Input: float32 (N, 1, Z, Y, X), the uint8 image divided by 255; Z, Y and X are multiples of
    ``DOWNSAMPLING``. Output: float32 logits (N, 3, Z, Y, X) for ``CLASSES``; softmax over axis 1
    is left to the caller.
    """

    def __init__(self) -> None:
        """Build the layers with PyTorch's default random weights."""
        super().__init__()
        self.encode_fine = _convolutions(1, 8, 8)
        self.encode_middle = _convolutions(8, 16, 16)
        self.encode_coarse = _convolutions(16, 32)
        self.shrink = nn.MaxPool3d(2)
        # A transposed convolution whose stride equals its kernel computes each output voxel from
        # exactly one coarse voxel, so unlike interpolation it adds nothing to the receptive field.
        self.grow_middle = nn.ConvTranspose3d(32, 16, kernel_size=2, stride=2)
        self.decode_middle = _convolutions(16, 16)
        self.grow_fine = nn.ConvTranspose3d(16, 8, kernel_size=2, stride=2)
        self.decode_fine = _convolutions(8, 8)
        self.classify = nn.Conv3d(8, len(CLASSES), kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Logits float32 (N, 3, Z, Y, X) of an image float32 (N, 1, Z, Y, X) in [0, 1]."""
        fine = self.encode_fine(image)
        middle = self.encode_middle(self.shrink(fine))
        coarse = self.encode_coarse(self.shrink(middle))
        # Skips are added rather than concatenated: it halves the cost of the decoder, which at
        # full resolution would otherwise be most of the network.
        middle = self.decode_middle(middle + self.grow_middle(coarse))
        fine = self.decode_fine(fine + self.grow_fine(middle))
        logits: torch.Tensor = self.classify(fine)
        return logits


def tissue_network() -> nn.Module:
    """A ``TissueNetwork`` with random weights, ready for the demo's ``tissue.safetensors``."""
    return TissueNetwork()


def _convolutions(*channels: int) -> nn.Sequential:
    """3 x 3 x 3 convolutions, each with a ReLU, from each channel count to the next."""
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [nn.Conv3d(before, after, kernel_size=3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers)
