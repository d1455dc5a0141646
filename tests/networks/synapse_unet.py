"""The synaptic-cleft 3-D U-Net that Seung Lab published for the IARPA MICrONS phase 1 data.

Architecture and weights: github.com/seung-lab/modelzoo, ``models/IARPAphase1/SynapseDetection``
(``mip1_d2_1175k``; MIT licence, (c) 2020 seung-lab), by Nicholas Turner after Kisuk Lee. This is
an independent implementation of that topology; only the module names, which the published
checkpoint dictates, are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_WIDTHS = (28, 36, 48)
_PLANAR = (1, 3, 3)
_CUBIC = (3, 3, 3)
_EDGE = (1, 5, 5)
_SCALE = (1, 2, 2)

_Size = tuple[int, int, int]


class _Conv(nn.Module):
    """A convolution that keeps Z,Y,X: (N,in,Z,Y,X) to (N,out,Z,Y,X), zero padded."""

    def __init__(self, inputs: int, outputs: int, kernel: _Size, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, kernel, padding="same", bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return out


class _Embed(nn.Module):
    """A biased convolution and an ELU: (N,in,Z,Y,X) to (N,out,Z,Y,X)."""

    def __init__(self, inputs: int, outputs: int, kernel: _Size) -> None:
        super().__init__()
        self.conv = _Conv(inputs, outputs, kernel, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(self.conv(x))


def _batch_norm(channels: int) -> nn.BatchNorm3d:
    """A BatchNorm3d whose only buffers are the mean and the variance.

    The checkpoint predates ``num_batches_tracked``. Without tracking the layer has no such
    buffer, and given its two statistics it still uses them in eval mode; in training mode it
    uses those of the patch and leaves the stored ones as they are.
    """
    norm = nn.BatchNorm3d(channels, track_running_stats=False)
    norm.register_buffer("running_mean", torch.zeros(channels))
    norm.register_buffer("running_var", torch.ones(channels))
    return norm


class _Block(nn.Module):
    """Three convolutions, the first planar, with a residual around the last two.

    (N,in,Z,Y,X) to (N,out,Z,Y,X). The residual starts after the first activation and joins ahead
    of the last normalisation.
    """

    def __init__(self, inputs: int, outputs: int, kernel: _Size) -> None:
        super().__init__()
        self.conv1 = _Conv(inputs, outputs, _PLANAR, bias=False)
        self.conv2 = _Conv(outputs, outputs, kernel, bias=False)
        self.conv3 = _Conv(outputs, outputs, kernel, bias=False)
        self.bn1 = _batch_norm(outputs)
        self.bn2 = _batch_norm(outputs)
        self.bn3 = _batch_norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        first = F.elu(self.bn1(self.conv1(x)))
        second = F.elu(self.bn2(self.conv2(first)))
        return F.elu(self.bn3(self.conv3(second) + first))


class _Upsample(nn.Module):
    """Nearest-neighbour doubling of Y and X, then a convolution.

    (N,in,Z,Y,X) to (N,out,Z,2Y,2X).
    """

    def __init__(self, inputs: int, outputs: int, kernel: _Size) -> None:
        super().__init__()
        self.conv = _Conv(inputs, outputs, kernel, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=_SCALE, mode="nearest"))
        return out


class _Expand(nn.Module):
    """One level of the expanding path.

    (N,in,Z,Y,X) and the skip (N,out,Z,2Y,2X), which is added, to (N,out,Z,2Y,2X).
    """

    def __init__(self, inputs: int, outputs: int, kernel: _Size) -> None:
        super().__init__()
        self.upsampling = _Upsample(inputs, outputs, kernel)
        self.bn1 = _batch_norm(outputs)
        self.convmod = _Block(outputs, outputs, kernel)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        out: Tensor = self.convmod(F.elu(self.bn1(self.upsampling(x) + skip)))
        return out


class _Output(nn.Module):
    """The last convolution: (N,in,Z,Y,X) to the logits (N,1,Z,Y,X)."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.psd_label = _Conv(inputs, 1, _EDGE, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.psd_label(x)
        return out


class SynapseUNet(nn.Module):
    """A three-level residual U-Net that halves Y and X twice and never Z.

    Input: float32 (N,1,Z,Y,X), uint8 grey values / 255, Y and X divisible by 4, Z any size.
    Output: float32 (N,1,Z,Y,X), the logits of "synaptic cleft".
    """

    def __init__(self) -> None:
        super().__init__()
        fine, middle, coarse = _WIDTHS
        self.inputconv = _Embed(1, fine, _EDGE)
        self.convmod0 = _Block(fine, fine, _PLANAR)
        self.convmod1 = _Block(fine, middle, _CUBIC)
        self.convmod2 = _Block(middle, coarse, _CUBIC)
        self.rszconvmod1 = _Expand(coarse, middle, _CUBIC)
        self.rszconvmod0 = _Expand(middle, fine, _PLANAR)
        self.embedconv = _Embed(fine, fine, _PLANAR)
        self.outputdeconv = _Output(fine)

    def forward(self, x: Tensor) -> Tensor:
        level0 = self.convmod0(self.inputconv(x))
        level1 = self.convmod1(F.max_pool3d(level0, _SCALE))
        level2 = self.convmod2(F.max_pool3d(level1, _SCALE))
        x = self.rszconvmod1(level2, level1)
        x = self.rszconvmod0(x, level0)
        out: Tensor = self.outputdeconv(self.embedconv(x))
        return out


def synapse_unet() -> nn.Module:
    """The network without its weights; the published checkpoint loads strictly.

    (N,1,Z,Y,X) float32 in 0..1 to (N,1,Z,Y,X) float32 logits; Y and X divisible by 4.
    """
    return SynapseUNet()
