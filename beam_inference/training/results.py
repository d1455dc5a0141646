"""What a training leaves: weights, the network's source, a job file, and a page."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from importlib.util import find_spec
from pathlib import Path

import safetensors.torch
import yaml
from torch import nn

from beam_inference.config.fields import Json
from beam_inference.training.config import TrainingConfig
from beam_inference.training.labelled_volumes import as_source
from beam_inference.volumes.opening import open_source

WEIGHTS = "weights.safetensors"
NETWORK_FILE = "network.py"
JOB_FILE = "job.yaml"
PAGE = "training.html"
RESULTS = (WEIGHTS, NETWORK_FILE, JOB_FILE, PAGE)


def write_network_file(config: TrainingConfig) -> None:
    """Write the source of the residual U-Net with the training's widths, for job files to name."""
    unet = config.network.residual_unet
    (Path(config.output) / NETWORK_FILE).write_text(
        f'''"""The network that was trained here."""

from beam_inference.residual_unet import ResidualUNet


def network():
    return ResidualUNet(
        input_channels={config.network.input_channels},
        output_channels={config.output_channels},
        widths={tuple(unet.widths)},
        pooling={tuple(unet.pooling)},
        normalization="{unet.normalization}",
    )
'''
    )


def write_results(config: TrainingConfig, network: nn.Module, metrics: Json, example: Json) -> None:
    """Write weights, job file and page into the output folder.

    Args:
        config: the training; it is recorded with the weights, its split included.
        network: the trained network.
        metrics: losses by step.
        example: planes of a sample, by name.
    """
    folder = Path(config.output)
    weights = folder / WEIGHTS
    state = {name: each.detach().cpu().contiguous() for name, each in network.state_dict().items()}
    record = config.model_dump(mode="json")
    record["split"]["block_shape"] = list(config.definite_split.block_shape)
    safetensors.torch.save_file(state, weights, {"training": json.dumps(record)})
    (folder / JOB_FILE).write_text(yaml.safe_dump(_job(config, weights), sort_keys=False))
    if find_spec("matplotlib") is not None:
        (folder / PAGE).write_text(_page(metrics, example))


def _job(config: TrainingConfig, weights: Path) -> Json:
    """The job that runs the network over the first volume."""
    folder = weights.parent
    image = open_source(as_source(config.labelled_volumes[0].image))
    size = config.voxel_size_nm or image.voxel_size_nm
    path = config.network.path or f"{folder / NETWORK_FILE}:network"
    model: Json = {
        "path": path,
        "weights": str(weights),
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "input_channels": config.network.input_channels,
        "output_channels": config.output_channels,
        "channels": [
            {} if offset is None else {"affinity": list(offset)}
            for offset in config.target.channel_offsets
        ],
        "activation": config.activation,
        "crop_margin": list(config.network.crop_margin),
        "normalize": config.model_dump(mode="json")["normalize"],
    }
    if size is not None:
        model["voxel_size_nm"] = list(size)
    inference: Json = {
        "patch_shape": list(config.patch_shape),
        "patch_overlap": [n // 2 for n in config.patch_shape],
        "chunk_shape": "auto",
    }
    values: Json = {
        "input": {"path": config.volumes[0].image, "scale": config.volumes[0].scale},
        "output": {"path": str(folder / "prediction"), "dtype": "uint8", "value_range": [0, 1]},
        "model": model,
        "inference": inference,
    }
    storage = config.storage.model_dump(mode="json", exclude_defaults=True)
    return {**values, "storage": storage} if storage else values


def _page(metrics: Json, example: Json) -> str:
    """One HTML file with curves and planes, as pictures inside of it."""
    from matplotlib.figure import Figure

    curves = Figure(figsize=(9, 3))
    axes = curves.add_subplot()
    axes.plot(range(1, len(metrics["loss"]) + 1), metrics["loss"], linewidth=0.8, label="training")
    if metrics["validation"]:
        axes.plot(*zip(*metrics["validation"], strict=True), label="validation")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    planes = Figure(figsize=(9, 3.2))
    for number, (name, plane) in enumerate(example.items(), 1):
        drawn = planes.add_subplot(1, len(example), number)
        drawn.imshow(plane, cmap="gray")
        drawn.set_title(name)
        drawn.set_axis_off()
    pictures = []
    for figure, text in ((curves, "Loss by step"), (planes, "The middle plane of a sample")):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
        data = base64.b64encode(buffer.getvalue()).decode()
        pictures.append(
            f'<h2>{html.escape(text)}</h2><img alt="{html.escape(text)}" '
            f'src="data:image/png;base64,{data}">'
        )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Training</title>'
        f"<h1>Training</h1>{''.join(pictures)}</html>\n"
    )
