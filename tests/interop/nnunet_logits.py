"""Logits of nnU-Net's own predictor: ``python nnunet_logits.py FOLDER``, with nnU-Net installed.

Writes a TorchScript file of each network, with random weights, and for each case the image and the
logits, as the tool gives them and with its arrays in half precision made float32.
"""

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
    os.environ[variable] = sys.argv[1]

from dynamic_network_architectures.architectures.unet import (  # noqa: E402 - it looks for its folders when it is imported
    PlainConvUNet,
    ResidualEncoderUNet,
)
from nnunetv2.inference import predict_from_raw_data  # noqa: E402

CLASSES = 3
NETWORKS = {
    "plain": (PlainConvUNet, {"n_conv_per_stage": 2}),
    "residual": (ResidualEncoderUNet, {"n_blocks_per_stage": [1, 1, 1]}),
}
CASES = {
    # network, patch, image, mirrored axes
    "plain": ("plain", (32, 48, 40), (50, 90, 77), None),
    "mirrored": ("plain", (32, 48, 40), (50, 60, 77), (0, 1, 2)),
    "mirrored in the plane": ("residual", (16, 48, 48), (40, 71, 90), (1, 2)),
    "smaller than a patch": ("residual", (32, 48, 40), (21, 90, 33), None),
}


class FloatTorch:
    """PyTorch, whose half precision is float32."""

    half = torch.float32

    def __getattr__(self, name):
        """Everything else."""
        return getattr(torch, name)


def make_network(name):
    """One of nnU-Net's networks, with random weights."""
    torch.manual_seed(1)
    kind, keys = NETWORKS[name]
    return kind(
        input_channels=1,
        n_stages=3,
        features_per_stage=[8, 16, 32],
        conv_op=torch.nn.Conv3d,
        kernel_sizes=3,
        strides=[1, 2, 2],
        num_classes=CLASSES,
        n_conv_per_stage_decoder=1,
        conv_bias=True,
        norm_op=torch.nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=torch.nn.LeakyReLU,
        deep_supervision=False,
        **keys,
    ).eval()


def predict(network, patch, image, axes):
    """Logits (classes, Z, Y, X) of nnU-Net's sliding window."""
    predictor = predict_from_raw_data.nnUNetPredictor(
        tile_step_size=0.5,
        use_gaussian=True,
        use_mirroring=axes is not None,
        perform_everything_on_device=False,
        device=torch.device("cpu"),
        allow_tqdm=False,
    )
    predictor.network = network
    predictor.allowed_mirroring_axes = axes
    predictor.configuration_manager = SimpleNamespace(patch_size=patch)
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=CLASSES)
    with torch.inference_mode():
        logits = predictor.predict_sliding_window_return_logits(torch.from_numpy(image)[None])
    return logits.float().numpy()


def main(folder):
    """Write networks, images and logits."""
    gaussian = predict_from_raw_data.compute_gaussian
    networks = {name: make_network(name) for name in NETWORKS}
    for name, network in networks.items():
        torch.jit.trace(network, torch.zeros(1, 1, 32, 48, 48)).save(str(folder / f"{name}.pt"))
    for case, (name, patch, shape, axes) in CASES.items():
        image = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        as_it_is = predict(networks[name], patch, image, axes)
        predict_from_raw_data.torch = FloatTorch()
        predict_from_raw_data.compute_gaussian = partial(gaussian, dtype=torch.float32)
        in_float = predict(networks[name], patch, image, axes)
        predict_from_raw_data.torch = torch
        predict_from_raw_data.compute_gaussian = gaussian
        np.savez(folder / f"{case}.npz", image=image, as_it_is=as_it_is, in_float=in_float)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
