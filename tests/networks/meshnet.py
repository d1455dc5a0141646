"""The MeshNet that brainchop publishes for grey and white matter (5 channels, 3 classes).

Architecture: MeshNet, Fedorov et al. 2017, "End-to-end learning of brain tissue segmentation from
imperfect labeling", as the model's own ``model.json`` lays it out. Weights:
github.com/neuroneural/brainchop-models, also in github.com/neuroneural/brainchop (MIT licence,
(c) 2021 neuroneural/brainchop). This is an independent implementation.
"""

from __future__ import annotations

from torch import Tensor, nn

_CHANNELS = 5
_CLASSES = 3
_DILATIONS = (1, 2, 4, 8, 16, 8, 4, 2, 1)


class MeshNet(nn.Module):
    """Nine dilated 3x3x3 convolutions with ReLUs and one of 1x1x1, all at full resolution.

    Input: float32 (N,1,Z,Y,X) in 0..1, any size. Output: float32 (N,3,Z,Y,X), the logits of
    background, white matter and grey matter. An output voxel sees 46 voxels, the sum of the
    dilations, in each direction; zeros stand for what lies outside the input, at every layer.
    """

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 1
        for dilation in _DILATIONS:
            layers += [
                nn.Conv3d(inputs, _CHANNELS, 3, padding=dilation, dilation=dilation),
                nn.ReLU(inplace=True),
            ]
            inputs = _CHANNELS
        layers.append(nn.Conv3d(_CHANNELS, _CLASSES, 1))
        self.model = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return out


def meshnet() -> nn.Module:
    """The network without its weights; the published safetensors file loads strictly.

    (N,1,Z,Y,X) float32 in 0..1 to (N,3,Z,Y,X) float32 logits.
    """
    return MeshNet()
