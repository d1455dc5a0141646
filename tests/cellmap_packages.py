"""CellMap's packages, with a small network of random weights."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch


def described(**changes: Any) -> dict[str, Any]:
    """The content of metadata.json, of a network that takes 16 nm and answers in 8 nm."""
    return {
        "model_name": "mito",
        "model_type": "UNet",
        "framework": "torch",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels_names": ["mito", "er"],
        "input_shape": [16, 16, 16],
        "output_shape": [24, 24, 24],
        "inference_input_shape": [20, 20, 20],
        "inference_output_shape": [32, 32, 32],
        "input_voxel_size": [16, 16, 16],
        "output_voxel_size": [8, 8, 8],
        "author": "somebody",
        "description": "Mitochondria",
    } | changes


def make_network() -> torch.nn.Module:
    """A network without padding, whose output is finer than its input."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv3d(1, 4, 3), torch.nn.Upsample(scale_factor=2), torch.nn.Conv3d(4, 2, 5)
    ).eval()


def make_package(folder: Path, content: Any = None, network: torch.nn.Module | None = None) -> Path:
    """Write a package with TorchScript, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.json").write_text(json.dumps(content or described()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is an old form
        torch.jit.save(torch.jit.script(network or make_network()), folder / "model.ts")
    return folder
