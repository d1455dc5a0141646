"""Networks to measure with, each the same at every call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from beam_inference.residual_unet import ResidualUNet

NNUNET_WIDTHS = (32, 64, 128, 256, 320)
"""Feature maps of nnU-Net's plain 3-D U-Net, and of MLPerf's for KiTS19."""


class PlainUNet(nn.Module):
    """A U-Net of nnU-Net's type: two 3×3×3 convolutions a level, strides down, transposed up.

    Args:
        output_channels: channels of the result.
        widths: feature maps of each level, the finest first.
    """

    def __init__(self, output_channels: int = 3, widths: Sequence[int] = NNUNET_WIDTHS) -> None:
        super().__init__()
        self.enter = _double(1, widths[0], 1)
        self.down = nn.ModuleList(_double(a, b, 2) for a, b in pairwise(widths))
        self.resize = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_double(2 * width, width, 1) for width in widths[:-1])
        self.leave = nn.Conv3d(widths[0], output_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of a batch."""
        levels = [self.enter(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for resize, up in zip(reversed(self.resize), reversed(self.up), strict=True):
            x = up(torch.cat((resize(x), levels.pop()), 1))
        result: Tensor = self.leave(x)
        return result


def _double(channels: int, width: int, stride: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, step in ((channels, stride), (width, 1)):
        layers += [
            nn.Conv3d(inputs, width, 3, step, 1),
            nn.InstanceNorm3d(width, affine=True),
            nn.LeakyReLU(0.01),
        ]
    return nn.Sequential(*layers)


def residual() -> nn.Module:
    """A network of the connectomics papers' kind."""
    torch.manual_seed(0)
    return ResidualUNet(output_channels=3)


def plain() -> nn.Module:
    """A network of nnU-Net's kind, of full width."""
    torch.manual_seed(0)
    return PlainUNet()


def tiny() -> nn.Module:
    """A plain U-Net of two levels, for tests."""
    torch.manual_seed(0)
    return PlainUNet(widths=(2, 4))
