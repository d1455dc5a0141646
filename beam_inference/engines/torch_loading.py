"""Loads a job's network for PyTorch, or for an engine that converts it: device, precision, memory format."""

from __future__ import annotations

from typing import Any

import torch

from beam_inference.config.job import Inference, Network
from beam_inference.engines.batch_norm_folding import folded
from beam_inference.engines.choice import (
    CONVERTED_SUFFIXES,
    engine_description,
    parameters_sha256,
    suffix_of,
)
from beam_inference.engines.compiled import compiled_forward
from beam_inference.engines.device_errors import device_errors
from beam_inference.engines.devices import claimed_cuda_device
from beam_inference.engines.onednn import by_onednn
from beam_inference.engines.onnxruntime import onnxruntime_forward
from beam_inference.engines.openvino import openvino_forward
from beam_inference.engines.per_shape import Forward, per_shape
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.torch_forward import torch_predictor
from beam_inference.errors import ConfigError, DeviceOutOfMemory, EngineError, ModelContractError
from beam_inference.geometry.bounding_box import grown_shape
from beam_inference.models.batch_norm import check_exported, set_batch_norm
from beam_inference.models.files import existing_file, load_module


def load_torch_predictor(model: Network, inference: Inference, *, allow_pickle: bool) -> Predictor:
    """Load a job's network; errors as :func:`beam_inference.engines.loading.load_predictor` says."""
    if inference.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "inference.device: cuda, but PyTorch sees no CUDA device on this machine (torch "
            f"{torch.__version__}). Use device: cpu, or a machine with a GPU and a CUDA build of "
            "PyTorch."
        )
    device = torch.device(
        f"cuda:{claimed_cuda_device(torch.cuda.device_count())}"
        if inference.device == "cuda"
        else "cpu"
    )
    if suffix_of(model) in CONVERTED_SUFFIXES:
        return _predictor(_of_file(model, inference), model, inference, device)
    forward, kind = load_module(model, allow_pickle=allow_pickle)
    parameters = None
    if kind == "module" and model.weights is None:
        parameters = parameters_sha256(forward)
        if parameters != parameters_sha256(load_module(model, allow_pickle=allow_pickle)[0]):
            raise ModelContractError(
                f"model.path {model.path} makes a network with other parameters at every call "
                "(random initial values), so every worker would have another. Give its trained "
                "weights as model.weights."
            )
    if kind == "export":
        check_exported(forward, model, inference)
        program: Any = forward
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        forward = program.module()
    else:
        module: Any = forward
        module.eval()
        set_batch_norm(module, model.batch_norm, scripted=kind == "torchscript")
        forward = module.to(device)
        if inference.engine == "torch" and kind == "module" and model.batch_norm == "running":
            with device_errors():
                forward = folded(forward, (1, *_shape(model, inference)[1:]), device)
        _lay_out(forward, _memory_format(model, inference))
    if inference.engine == "torch":
        if device.type == "cpu" and kind != "torchscript":
            forward = by_onednn(forward)
    else:
        try:
            with device_errors():
                forward = _converted(forward, model, inference, device)
        except DeviceOutOfMemory as error:
            raise EngineError(
                f"inference.engine: {inference.engine}: out of memory for a batch of "
                f"{inference.batch_size}: {error}. Write a smaller inference.batch_size."
            ) from None
    return _predictor(forward, model, inference, device, parameters)


def _predictor(
    forward: Any,
    model: Network,
    inference: Inference,
    device: torch.device,
    parameters: str | None = None,
) -> Predictor:
    return torch_predictor(
        forward,
        device,
        precision=inference.precision,
        activation=model.activation,
        dims=model.dims,
        threads=inference.threads or 1,
        memory_format=_memory_format(model, inference),
        description=engine_description(model, inference, parameters),
    )


def _lay_out(module: torch.nn.Module, memory_format: torch.memory_format) -> None:
    """Bring the weights of convolutions, of as many axes as the format is of, into it."""
    axes = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == axes:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


def _memory_format(model: Network, inference: Inference) -> torch.memory_format:
    if inference.memory_format == "contiguous":
        return torch.contiguous_format
    return torch.channels_last if model.dims == 2 else torch.channels_last_3d


def _of_file(model: Network, inference: Inference) -> Forward:
    """A network that is in a file of an engine's own format."""
    if model.batch_norm == "batch":
        raise ModelContractError(
            f"{model.path} has BatchNorm as it was exported, which cannot be changed by "
            "model.batch_norm: batch. Remove that."
        )
    path = existing_file(model.path, "model.path")
    threads = inference.threads or 1
    weights = None if model.weights is None else existing_file(model.weights, "model.weights")
    if inference.engine == "openvino":
        return per_shape(
            lambda shape: openvino_forward(path, shape, threads, weights), _shape(model, inference)
        )
    return per_shape(
        lambda shape: onnxruntime_forward(path, shape, threads), _shape(model, inference)
    )


def _converted(network: Any, model: Network, inference: Inference, device: torch.device) -> Forward:
    """A network of PyTorch's, run by ``inference.engine``."""
    threads = inference.threads or 1
    if inference.engine == "compile":
        torch.set_num_threads(threads)
        layout = _memory_format(model, inference)
        return per_shape(
            lambda shape: compiled_forward(network, shape, device, layout),
            _shape(model, inference),
        )
    engine = openvino_forward if inference.engine == "openvino" else onnxruntime_forward
    return per_shape(lambda shape: engine(network, shape, threads), _shape(model, inference))


def _shape(model: Network, inference: Inference) -> tuple[int, ...]:
    """Of the job's batches."""
    patch = grown_shape(inference.patch_shape, model.crop_margin)
    return (inference.patches_per_call, model.input_channels, *patch[3 - model.dims :])
