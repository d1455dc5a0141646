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
import torch
import yaml
from torch import nn

from beam_inference.config.fields import Json
from beam_inference.config.network import Network
from beam_inference.errors import ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.models.hashes import model_sha256
from beam_inference.models.local_files import existing_file
from beam_inference.models.module_versions import KEY, write_versions
from beam_inference.models.weights import load_weights
from beam_inference.residual_unet import ResidualUNet
from beam_inference.training.config import TrainingConfig
from beam_inference.training.labelled_volumes import as_source
from beam_inference.training.output_files import Write, replace_files
from beam_inference.volumes.opening import open_source

WEIGHTS = "weights.safetensors"
NETWORK_FILE = "network.py"
JOB_FILE = "job.yaml"
PAGE = "training.html"
RESULTS = (WEIGHTS, NETWORK_FILE, JOB_FILE, PAGE)
"""In the order in which they take their places: a job file must find what it was written for."""


def make_unet(config: TrainingConfig) -> nn.Module:
    """The residual U-Net that a training file asks for, as :func:`network_source` makes it.

    Raises:
        ModelContractError: it cannot be made, or the weights to begin with do not fit.
    """
    unet = config.network.residual_unet
    try:
        network = ResidualUNet(
            input_channels=config.network.input_channels,
            output_channels=config.output_channels,
            widths=tuple(unet.widths),
            pooling=unet.pooling,
            normalization=unet.normalization,
        )
    except (RuntimeError, ValueError, MemoryError) as error:
        raise ModelContractError(f"network.residual_unet: {describe_error(error)}") from None
    if config.network.weights is not None:
        weights = existing_file(config.network.weights, "network.weights")
        load_weights(network, weights, allow_pickle=False)
    return network


def network_source(config: TrainingConfig) -> str:
    """The source of the residual U-Net with the training's widths, for job files to name."""
    unet = config.network.residual_unet
    return f'''"""The network that was trained here."""

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


def source_sha256(config: TrainingConfig) -> str:
    """Hash of the file that makes the network: the factory's, or the one that is written."""
    path = config.network.path
    if path is None:
        return hashlib.sha256(network_source(config).encode()).hexdigest()
    return model_sha256(Network(path=path))


def write_results(
    config: TrainingConfig, network: nn.Module, source: str, metrics: Json, example: Json
) -> None:
    """Write weights, the network's source, job file and page into the output folder.

    The weights take their place first: an earlier job file, which knows its weights by their hash,
    then refuses what it finds until its successor is there.

    Args:
        config: the training; it is recorded with the weights, its split included.
        network: the trained network.
        source: hash of the file that made it, see :func:`source_sha256`.
        metrics: losses by step.
        example: planes of a sample, by name.

    Raises:
        WorkerFault: a file cannot be written.
    """
    # copies, for layers may share a tensor, which the file holds for each of them
    trained = network.state_dict()
    state = {
        name: each.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, each in trained.items()
    }
    record = config.model_dump(mode="json")
    record["split"]["block_shape"] = list(config.definite_split.block_shape)
    metadata = {"training": json.dumps(record), KEY: write_versions(trained)}
    weights = safetensors.torch.save(state, metadata)
    contents = {WEIGHTS: weights}
    if config.network.path is None:
        contents[NETWORK_FILE] = network_source(config).encode()
    sha256 = f"{source}+{hashlib.sha256(weights).hexdigest()}"
    contents[JOB_FILE] = yaml.safe_dump(_job(config, sha256), sort_keys=False).encode()
    if find_spec("matplotlib") is not None:
        contents[PAGE] = _page(metrics, example).encode()
    replace_files(
        Path(config.output), {name: _writer_of(content) for name, content in contents.items()}
    )


def _writer_of(content: bytes) -> Write:
    return lambda draft: draft.write(content)


def _job(config: TrainingConfig, sha256: str) -> Json:
    """The job that runs the network over the first volume.

    Args:
        config: the training.
        sha256: of the network's source and of the weights.
    """
    folder = Path(config.output)
    image = open_source(as_source(config.labelled_volumes[0].image))
    size = config.voxel_size_nm or image.voxel_size_nm
    path = config.network.path or f"{folder / NETWORK_FILE}:network"
    model: Json = {
        "path": path,
        "weights": str(folder / WEIGHTS),
        "sha256": sha256,
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
