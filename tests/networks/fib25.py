"""A small affinity network for the FIB-25 medulla volume, made for this project's tests.

Architecture: a two-level 3-D U-Net (Çiçek et al. 2016) with instance normalisation and a dilated
coarse level. ``train_fib25.py`` made ``fib25.safetensors`` from the labels of Janelia FlyEM (HHMI).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

_FINE = 8
_COARSE = 16
_DILATIONS = (1, 2, 2, 1)


def _block(inputs: int, outputs: int, dilation: int = 1) -> nn.Sequential:
    """A 3x3x3 convolution, an instance norm and a ReLU: (N,in,Z,Y,X) to (N,out,Z,Y,X).

    The norm removes any constant, so the convolution needs no bias.
    """
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=dilation, dilation=dilation, bias=False),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.ReLU(inplace=True),
    )


class Fib25Network(nn.Module):
    """Affinities of an isotropic EM patch; 5,568 multiply-adds in convolutions per voxel.

    Input: float32 (N,1,Z,Y,X), uint8 grey values / 255; each of Z, Y, X even and at least 8.
    Output: float32 (N,3,Z,Y,X), the logits that a voxel and its predecessor along z, y and x
    (channels 0, 1, 2) belong to one body. Instance norm takes its statistics from the whole patch,
    so that every output voxel depends on the extent of the patch it was computed in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = _block(1, _FINE)
        self.down = nn.Conv3d(_FINE, _COARSE, 2, stride=2)
        self.coarse = nn.Sequential(*(_block(_COARSE, _COARSE, d) for d in _DILATIONS))
        self.lateral = nn.Conv3d(_COARSE, _FINE, 1)
        self.merge = _block(_FINE, _FINE)
        self.head = nn.Conv3d(_FINE, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        context = self.lateral(self.coarse(self.down(fine)))
        merged = fine + F.interpolate(context, scale_factor=2, mode="nearest")
        out: Tensor = self.head(self.merge(merged))
        return out


def fib25_network() -> nn.Module:
    """The network without its weights; ``fib25.safetensors`` loads strictly.

    (N,1,Z,Y,X) float32 in 0..1, even sides of at least 8, to (N,3,Z,Y,X) float32 logits.
    """
    return Fib25Network()
