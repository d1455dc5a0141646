"""MONAI bundles as its own tools write them, with small networks of random weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch

ROI = [24, 20, 16]
"""X, Y, Z, as MONAI has it."""

NETWORK = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [4, 8],
    "strides": [2],
    "num_res_units": 1,
    "norm": "batch",
}

TRANSFORMS = [
    {"_target_": "LoadImaged", "keys": "@image_key"},
    {"_target_": "EnsureChannelFirstd", "keys": "image"},
    {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS"},
    {"_target_": "Spacingd", "keys": "image", "pixdim": [1.5, 1.0, 2.0], "mode": "bilinear"},
    {
        "_target_": "ScaleIntensityRanged",
        "keys": "@image_key",
        "a_min": -57,
        "a_max": 164,
        "b_min": 0,
        "b_max": 1,
        "clip": True,
    },
    {"_target_": "EnsureTyped", "keys": "image", "device": "@device"},
]

AFTER = [
    {"_target_": "Activationsd", "keys": "pred", "softmax": True},
    {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": "image"},
    {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
    {"_target_": "SaveImaged", "keys": "pred", "output_dir": "@output_dir"},
]


def config(
    transforms: Any = TRANSFORMS,
    after: Any = AFTER,
    network: Any = NETWORK,
    inferer: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The content of inference.json, with expressions where real ones have them."""
    return {
        "imports": ["$import glob"],
        "bundle_root": ".",
        "image_key": "image",
        "output_dir": "$@bundle_root + '/eval'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": network,
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": transforms},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            "roi_size": ROI,
            "sw_batch_size": 4,
            "overlap": 0.5,
        }
        | (inferer or {}),
        "postprocessing": {"_target_": "Compose", "transforms": after},
    } | changes


def metadata(channels: int = 1, outputs: int = 2) -> dict[str, Any]:
    """The content of metadata.json."""
    image = {"type": "image", "num_channels": channels, "is_patch_data": True}
    prediction = {
        "type": "image",
        "num_channels": outputs,
        "channel_def": {"0": "background", "1": "spleen"},
    }
    return {
        "name": "Small segmentation",
        "version": "0.5.0",
        "monai_version": "1.6.1",
        "license": "Apache-2.0",
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": prediction}},
    }


def make_network() -> torch.nn.Module:
    """A network whose answer depends on the order of the axes."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, (5, 3, 1), padding=(2, 1, 0)),
        torch.nn.ReLU(),
        torch.nn.Conv3d(4, 2, 3, padding=1),
    ).eval()


def make_bundle(folder: Path, content: Any = None, described: Any = None) -> Path:
    """Write a bundle with a TorchScript network, and return its folder."""
    for name in ("configs", "models"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "configs" / "inference.json").write_text(json.dumps(content or config()))
    (folder / "configs" / "metadata.json").write_text(json.dumps(described or metadata()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is an old form
        torch.jit.save(torch.jit.script(make_network()), folder / "models" / "model.ts")
    return folder
