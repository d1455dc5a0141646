"""Results folders as nnU-Net 2.8.1 writes them, with small networks of random weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

PATCH = (16, 24, 24)
CT_PROPERTIES = {
    "mean": 100.0,
    "std": 40.0,
    "percentile_00_5": 10.0,
    "percentile_99_5": 220.0,
    "median": 99.0,
    "min": 0.0,
    "max": 255.0,
}
LABELS = {"background": 0, "vessel": 1, "fibre": 2}


def architecture(name: str = "PlainConvUNet", dims: int = 3) -> dict[str, Any]:
    """How plans describe a small network."""
    of_stage = "n_conv_per_stage" if name == "PlainConvUNet" else "n_blocks_per_stage"
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{name}",
        "arch_kwargs": {
            "n_stages": 3,
            "features_per_stage": [4, 8, 8],
            "conv_op": f"torch.nn.modules.conv.Conv{dims}d",
            "kernel_sizes": [[3] * dims] * 3,
            "strides": [[1] * dims, [2] * dims, [2] * dims],
            of_stage: [1, 1, 1],
            "n_conv_per_stage_decoder": [1, 1],
            "conv_bias": True,
            "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{dims}d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def configuration(**changes: Any) -> dict[str, Any]:
    """A configuration of plans."""
    return {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": list(PATCH),
        "median_image_size_in_voxels": [40.0, 60.0, 60.0],
        "spacing": [2.0, 1.0, 1.0],
        "normalization_schemes": ["CTNormalization"],
        "use_mask_for_norm": [False],
        "architecture": architecture(),
        "batch_dice": True,
        **resampling("data", is_seg=False, order=3),
        **resampling("seg", is_seg=True, order=1),
        **resampling("probabilities", is_seg=False, order=1),
    } | changes


def resampling(what: str, **keys: Any) -> dict[str, Any]:
    """How plans say that something is resampled."""
    return {
        f"resampling_fn_{what}": "resample_data_or_seg_to_shape",
        f"resampling_fn_{what}_kwargs": {**keys, "order_z": 0, "force_separate_z": None},
    }


def plans(**changes: Any) -> dict[str, Any]:
    """The content of plans.json."""
    forward = changes.get("transpose_forward", [0, 1, 2])
    return {
        "dataset_name": "Dataset001_Vessels",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": [2.0, 1.0, 1.0],
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": forward,
        "transpose_backward": np.argsort(forward).tolist(),
        "configurations": {"3d_fullres": configuration()},
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {"0": CT_PROPERTIES},
    } | changes


def dataset(**changes: Any) -> dict[str, Any]:
    """The content of dataset.json."""
    return {
        "name": "Vessels",
        "licence": "CC BY 4.0",
        "channel_names": {"0": "CT"},
        "labels": LABELS,
        "numTraining": 4,
        "file_ending": ".nii.gz",
    } | changes


def make_network(config: dict[str, Any], channels: int, classes: int, seed: int) -> torch.nn.Module:
    """The network that a configuration describes, with random weights."""
    from dynamic_network_architectures.architectures import unet

    torch.manual_seed(seed)
    described = config["architecture"]
    dims = len(config["patch_size"])
    arguments = described["arch_kwargs"] | {
        "conv_op": getattr(torch.nn, f"Conv{dims}d"),
        "norm_op": getattr(torch.nn, f"InstanceNorm{dims}d"),
        "nonlin": torch.nn.LeakyReLU,
    }
    name = described["network_class_name"].rpartition(".")[2]
    network: torch.nn.Module = getattr(unet, name)(
        input_channels=channels, num_classes=classes, deep_supervision=False, **arguments
    )
    return network.eval()


def checkpoint(
    network: torch.nn.Module,
    name: str = "3d_fullres",
    mirror_axes: Sequence[int] | None = (0, 1, 2),
    trainer: str = "nnUNetTrainer",
) -> dict[str, Any]:
    """The content of a checkpoint, with what stands beside the weights in real ones."""
    return {
        "network_weights": network.state_dict(),
        "optimizer_state": {"state": {}, "param_groups": [{"lr": 0.01, "params": [0]}]},
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float64(0.5)], "train_losses": [np.float32(1.5)]},
        "_best_ema": np.float64(0.7),
        "current_epoch": 1000,
        "init_args": {"configuration": name, "fold": 0, "device": torch.device("cuda:0")},
        "trainer_name": trainer,
        "inference_allowed_mirroring_axes": mirror_axes,
    }


def make_folder(
    folder: Path,
    *,
    folds: Sequence[int | str] = (0,),
    name: str = "3d_fullres",
    made: dict[str, Any] | None = None,
    described: dict[str, Any] | None = None,
    **keys: Any,
) -> tuple[Path, list[torch.nn.Module]]:
    """Write a results folder, and return it with the networks of its folds.

    Args:
        folder: where.
        folds: numbers of the folds.
        name: of the configuration that was trained.
        made: plans.json; by default :func:`plans`.
        described: dataset.json; by default :func:`dataset`.
        keys: for :func:`checkpoint`.
    """
    made = made or plans()
    described = described or dataset()
    config = made["configurations"][name]
    classes = len(described.get("regions_class_order") or described["labels"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json.dumps(made))
    (folder / "dataset.json").write_text(json.dumps(described))
    networks = []
    for fold in folds:
        seed = fold if isinstance(fold, int) else 7
        network = make_network(config, len(described["channel_names"]), classes, seed)
        inner = folder / f"fold_{fold}"
        inner.mkdir()
        torch.save(checkpoint(network, name, **keys), inner / "checkpoint_final.pth")
        networks.append(network)
    return folder, networks
