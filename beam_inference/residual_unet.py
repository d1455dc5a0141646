"""The residual symmetric U-Net with which this kind of tool began, to train and to measure with.

Architecture: Lee, Zung, Li, Jain and Seung, "Superhuman Accuracy on the SNEMI3D Connectomics
    Challenge", 2017 (arXiv:1706.00120), in the form of Wu et al., "Chunkflow", Nature Methods 2021,
    Fig. 4: instance normalisation, 1×5×5 convolutions in and out, pooling and resize-convolutions
    in the plane of the sections only. This is an independent implementation, and no published
    weights load into it.

A job names a factory without arguments, in a file of one's own, and as ``model.weights`` what
training has saved::

    from beam_inference.residual_unet import ResidualUNet

    def network():
        return ResidualUNet(output_channels=3)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class ResidualUNet(nn.Module):
    """Maps (N, input_channels, Z, Y, X) to (N, output_channels, Z, Y, X), logits, float32.

    Z, Y and X must be multiples of the product of ``pooling`` along their axis, taken once per
    level below the first: with the defaults any Z, and Y and X multiples of 8. Instance
    normalisation takes its statistics from the whole patch, so a network must be run with the patch
    shape it was trained with.

    Args:
        input_channels: Channels of the volume that is read.
        output_channels: Channels of the result.
        widths: Feature maps of each level, the finest first.
        pooling: Factors by which each level is coarser than the one above it, ZYX.
    """

    def __init__(
        self,
        input_channels: int = 1,
        output_channels: int = 1,
        widths: Sequence[int] = (16, 32, 64, 80),
        pooling: tuple[int, int, int] = (1, 2, 2),
    ) -> None:
        super().__init__()
        self.enter = _convolution(input_channels, widths[0], (1, 5, 5))
        self.down = nn.ModuleList(
            _Level(a, b) for a, b in zip([widths[0], *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool3d(pooling)
        self.resize = nn.ModuleList(_Resize(b, a, pooling) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_Level(a, a) for a in widths[:-1])
        self.leave = nn.Conv3d(widths[0], output_channels, (1, 5, 5), padding=(0, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of a batch."""
        x = self.down[0](self.enter(x))
        skipped = []
        for level in self.down[1:]:
            skipped.append(x)
            x = level(self.pool(x))
        for resize, level, skip in reversed(list(zip(self.resize, self.up, skipped, strict=True))):
            x = level(resize(x) + skip)
        logits: Tensor = self.leave(x)
        return logits


def _convolution(inputs: int, outputs: int, shape: tuple[int, int, int]) -> nn.Sequential:
    """Convolution without bias, which the normalisation would remove; normalisation; ReLU."""
    return nn.Sequential(
        nn.Conv3d(
            inputs,
            outputs,
            shape,
            padding=(shape[0] // 2, shape[1] // 2, shape[2] // 2),
            bias=False,
        ),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.ReLU(inplace=True),
    )


class _Level(nn.Module):
    """A convolution, and two more around which its result is added: Lee et al. 2017, Fig. 2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, (3, 3, 3))
        self.second = _convolution(outputs, outputs, (3, 3, 3))
        self.third = nn.Conv3d(outputs, outputs, 3, padding=1, bias=False)
        self.leave = nn.Sequential(nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        activated: Tensor = self.leave(self.third(self.second(x)) + x)
        return activated


class _Resize(nn.Sequential):
    """Interpolation, linear along each pooled axis, and a 1×1×1 convolution."""

    def __init__(self, inputs: int, outputs: int, pooling: tuple[int, int, int]) -> None:
        scale = tuple(float(n) for n in pooling)
        super().__init__(
            nn.Upsample(scale_factor=scale, mode="trilinear", align_corners=False),
            nn.Conv3d(inputs, outputs, 1, bias=False),
        )
