"""Networks, predictors and jobs for tests of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fib25_job import NETWORKS
from helpers import job_values, toy, write_job

from beam_inference.cli.main import main
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.predictor import Predictor

CONVERTED = ["openvino", "onnxruntime"]
PATCH = (8, 16, 32)
ROI = {"start": [0, 0, 0], "stop": [32, 64, 64]}
LARGE = (2, 1, 20, 256, 256)
"""Shape of a batch of which so much is summed up that digits would be lost."""

FIB25 = {
    "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
    "weights": str(NETWORKS / "fib25.safetensors"),
    "output_channels": 3,
    "activation": "sigmoid",
}
UNET = toy("residual_unet", output_channels=3)


def job_config(model: dict[str, Any], **inference: Any) -> JobConfig:
    """A job with a network."""
    keys = {"patch_shape": PATCH, "patch_overlap": [0, 0, 0], "batch_size": 2, **inference}
    return parse_job(job_values("in", "out", model=model, inference=keys), Path("/"))


def load(model: dict[str, Any], engine: str, **inference: Any) -> Predictor:
    """A network of a job, run by an engine."""
    job = job_config(model, engine=engine, **inference)
    return load_predictor(job.model, job.inference)


def answer(predictor: Predictor, batch: np.ndarray) -> np.ndarray:
    """What a network answers to a batch."""
    device = predictor.device
    with device.session():
        return device.download(predictor.predict(device.upload(batch)))().copy()


def answer_of_file(path: str, batch: np.ndarray, engine: str, **model: Any) -> np.ndarray:
    """What the network of a file or factory answers; the batch has the job's patch shape."""
    pytest.importorskip(engine)
    return answer(load({"path": path, **model}, engine, patch_shape=batch.shape[2:]), batch)


def exact_answer(network: torch.nn.Module, batch: np.ndarray) -> np.ndarray:
    """What PyTorch answers in float64."""
    with torch.inference_mode():
        exact: torch.Tensor = network.double()(torch.from_numpy(batch).double())
        return exact.numpy()


def batch_of(model: dict[str, Any], count: int = 2, depth: int = PATCH[0]) -> np.ndarray:
    """Noise that a network takes."""
    shape = (count, model.get("input_channels", 1), depth, *PATCH[1:])
    return np.random.default_rng(0).random(shape, np.float32)


def offset_noise() -> np.ndarray:
    """An image of uint8 / 255 around 0.7, of little contrast."""
    levels = 255 * (0.7 + 0.05 * np.random.default_rng(0).standard_normal(LARGE))
    return np.round(levels).astype(np.float32) / np.float32(255)


def run_job(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Run a job to its end; the record of it."""
    assert main(["run", str(write_job(folder / "job.yaml", values))]) == 0
    path = Path(values["output"]["path"]) / "_beam_inference" / "job.json"
    record: dict[str, Any] = json.loads(path.read_text())
    return record
