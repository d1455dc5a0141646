"""What of an engine determines the bits it computes: part of a job's fingerprint. And which engine ``auto`` means."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from importlib import metadata
from pathlib import PurePosixPath
from typing import Any

from beam_inference.config.factories import factory_parts
from beam_inference.config.job import Inference, Network
from beam_inference.config.job import Network as NetworkConfig
from beam_inference.engines import identity
from beam_inference.errors import ConfigError, EngineError

_PACKAGES = {
    "torch": "torch",
    "compile": "torch",
    "openvino": "openvino",
    "onnxruntime": "onnxruntime",
}
CONVERTED_SUFFIXES = (".onnx", ".xml")
"""Network files that PyTorch cannot run: ONNX, and OpenVINO's own format, with a .bin beside it."""

CPU_ENGINES = ("openvino", "onnxruntime")
"""They run on CPUs only here, and have allocators of their own, which keep what a network took."""

TOLERANCES = {"float32": 1e-5, "tf32": 1e-3, "float16": 3e-3, "bfloat16": 2e-2}
"""By how much, root mean square over a patch, a precision may differ from PyTorch in float32: as a
share of the largest magnitude there, or of 1 where that is less. A wrong kernel, or BatchNorm in
the wrong mode, is far beyond it.
"""


def engine_description(
    model: Network, inference: Inference, parameters: str | None = None
) -> dict[str, str]:
    """What determines bits: ``threads`` on a CPU, ``parameters`` where no weights file states them.

    ``inference.engine`` must be definite.

    Raises:
        EngineError: it is not installed.
    """
    package = _PACKAGES[inference.engine]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise EngineError(
            f"inference.engine: {inference.engine} is not installed here: pip install "
            f"'beam-inference[{package}]', here and on the workers"
        ) from None
    described = {
        "engine": inference.engine,
        "engine_version": version,
        "device": inference.device,
        "precision": inference.precision,
    }
    if inference.memory_format != "contiguous":
        described["memory_format"] = inference.memory_format
    if inference.device == "cpu":
        described["threads"] = str(inference.threads or 1)
    if package != "torch" and suffix_of(model) not in CONVERTED_SUFFIXES:
        described["converted_from"] = f"torch {metadata.version('torch')}"
    if parameters is not None:
        described["parameters"] = parameters
    return described


def engines_to_try(model: Network, inference: Inference) -> Sequence[str]:
    """What ``inference.engine`` may mean, the best first; ``inference.device`` must be definite.

    Raises:
        EngineError: none of those installed runs a file of this kind.
    """
    suffix = suffix_of(model)
    if suffix not in CONVERTED_SUFFIXES:
        if inference.engine != "auto":
            return [inference.engine]
        converts = (
            inference.device == "cpu"
            and inference.precision == "float32"
            and model.path != "identity"
        )
        return [*_installed("openvino"), "torch"] if converts else ["torch"]
    found = _of_files(model, inference)
    able = _runs(suffix)
    if inference.engine not in ("auto", *able):
        raise EngineError(
            f"model.path {model.path} is run by {' or '.join(able)}, not by inference.engine: "
            f"{inference.engine}"
        )
    return found[:1] if inference.engine == "auto" else [inference.engine]


def _runs(suffix: str) -> list[str]:
    return ["openvino", "onnxruntime"] if suffix == ".onnx" else ["openvino"]


def _of_files(model: Network, inference: Inference) -> list[str]:
    """What is installed of the engines that run a file."""
    able = _runs(suffix_of(model))
    if inference.device != "cpu" or inference.precision != "float32":
        raise EngineError(
            f"model.path {model.path} runs on the CPU in float32 only: write device: cpu"
        )
    found = _installed(*able)
    if not found:
        raise EngineError(
            f"model.path {model.path} is run by {' or '.join(able)}, which is not installed: "
            f"pip install 'beam-inference[{able[0]}]'"
        )
    return found


def engines_to_measure(model: Network, inference: Inference) -> list[dict[str, str]]:
    """What ``inference.engine: fastest`` may mean, as keys of ``inference``; ``inference.device`` must be definite.

    Raises:
        EngineError: none of those installed runs a file of this kind.
    """
    if model.path == "identity":
        return [{"engine": "torch"}]
    if suffix_of(model) in CONVERTED_SUFFIXES:
        return [{"engine": engine} for engine in _of_files(model, inference)]
    of_cpus = inference.device == "cpu" and inference.precision == "float32"
    others = _installed("openvino", "onnxruntime") if of_cpus else []
    return [
        *({"engine": engine} for engine in others),
        *(
            {"engine": e, "memory_format": f}
            for e in ("torch", "compile")
            for f in ("contiguous", "channels_last")
        ),
    ]


def suffix_of(model: Network) -> str:
    """The suffix of the network's file, as far as ``model.path`` is one."""
    return PurePosixPath(model.path).suffix


def _installed(*engines: str) -> list[str]:
    return [engine for engine in engines if importlib.util.find_spec(engine) is not None]


def parameters_sha256(module: Any) -> str:
    """Hash of a torch module's parameters and buffers: names, shapes, dtypes and bytes."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def describe_engine(model: NetworkConfig, inference: Inference) -> dict[str, str]:
    """A predictor's description on a worker that has this process's libraries; nothing is loaded."""
    if model.path == "identity":
        return dict(identity.DESCRIPTION)
    if factory_parts(model.path) and model.weights is None:
        raise ConfigError(
            f"model.path {model.path} has no model.weights beside it: workers elsewhere could not "
            "tell whether they have the same network. Save its weights to a file, and name that "
            "as model.weights."
        )
    return engine_description(model, inference)


def runs_on_cpu_only(model: NetworkConfig) -> bool:
    """Whether the network's file is one that PyTorch cannot run."""
    return suffix_of(model) in CONVERTED_SUFFIXES
