"""Networks of PyTorch as engines are given them: on their device, in evaluation mode."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from beam_inference.config.devices import TRAITS, kind_of
from beam_inference.config.engines import LoadRequest
from beam_inference.config.inference import Inference
from beam_inference.config.network import Network
from beam_inference.engines.devices import claim_device, find_accelerator
from beam_inference.errors import BeamInferenceError, ConfigError, ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.models.batch_norm import check_exported, set_batch_norm
from beam_inference.models.exported_calls import guard_calls
from beam_inference.models.exported_state import check_stateless
from beam_inference.models.loading import LoadedNetwork, load_network
from beam_inference.models.pickles import first_line
from beam_inference.models.trust import Trust


def torch_device(inference: Inference) -> torch.device:
    """The device that a job means, of those that this process may use.

    Raises:
        ConfigError: there is none, or none of that number.
    """
    device = inference.device
    if device == "cpu":
        return torch.device("cpu")
    kind = kind_of(device)
    present = find_accelerator()
    if present != kind:
        other = f"; it has {TRAITS[present].title}" if present else ""
        raise ConfigError(
            f"inference.device: {device}, but PyTorch sees no {kind.upper()} device on this "
            f"machine (torch {torch.__version__}){other}. Use device: {present or 'cpu'}, or a "
            f"machine with such a GPU and a build of PyTorch for it."
        )
    count = torch.accelerator.device_count()
    _, _, number = device.partition(":")
    if not number:
        return torch.device(kind, claim_device(count))
    if int(number) >= count:
        raise ConfigError(
            f"inference.device: {device}, but PyTorch sees {count} such device(s) on this machine: "
            f"{kind}:0 … {kind}:{count - 1}. Use one of them, or {kind} for all of them."
        )
    return torch.device(kind, int(number))


def prepare_network(
    loaded: LoadedNetwork, model: Network, inference: Inference, device: str
) -> Any:
    """Bring a network to its device, in evaluation mode, with BatchNorm as the job says.

    Raises:
        ModelContractError: the network cannot be what the job says.
    """
    network = loaded.network
    if loaded.kind == "export":
        check_exported(network, model, inference)
        check_stateless(network, model.path)
        if device != "cpu":
            from torch.export.passes import move_to_device_pass

            network = move_to_device_pass(network, device)
        try:
            return guard_calls(network.module())
        except Exception as error:  # of PyTorch, which makes Python code of the program
            raise ModelContractError(
                f"cannot load the torch.export file {model.path}: PyTorch makes no network of its "
                f"program: {first_line(error)}. Export it again."
            ) from None
    _check_dtypes(network, model, device)
    with _own_methods(model):
        network.eval()
    set_batch_norm(network, model.batch_norm, scripted=loaded.kind == "torchscript")
    with _own_methods(model):
        return network.to(device)


@contextmanager
def _own_methods(model: Network) -> Iterator[None]:
    """Tell of a network's own methods that fail, which may be written by anybody.

    Raises:
        ModelContractError: one does.
    """
    try:
        yield
    except (BeamInferenceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = describe_error(error).rstrip(".")
        raise ModelContractError(
            f"model.path {model.path}: the network cannot be brought to its device in evaluation "
            f"mode: {reason}. Its eval(), to() and state_dict() must work as those of "
            "torch.nn.Module; a program of torch.export is saved as a .pt2 file instead."
        ) from error


def _check_dtypes(network: torch.nn.Module, model: Network, device: str) -> None:
    """Refuse parameters of dtypes that the device's arrays cannot have."""
    kind = kind_of(device)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in TRAITS[kind].missing_dtypes:
            raise ModelContractError(
                f"model.path {model.path}: {name} is {dtype}, which {TRAITS[kind].title} do not "
                "have. Convert the network to float32, or write device: cpu."
            )


def parameters_hash(loaded: LoadedNetwork, model: Network, *, trust: Trust) -> str | None:
    """Hash a network's parameters where no file of weights stands for them; else None.

    Raises:
        ModelContractError: the network's parameters, or buffers that it does not save, are other
            ones each time that it is made.
    """
    if loaded.kind != "module":
        return None
    with _own_methods(model):
        is_stated = model.weights is not None
        if is_stated and not _unsaved_buffers(loaded.network):
            return None
        _check_values(loaded.network, model)
        parameters = parameters_sha256(loaded.network)
        again = load_network(model, trust=trust)
        is_same = parameters == parameters_sha256(again.network)
    if not is_same:
        raise ModelContractError(
            f"model.path {model.path} makes a network with other parameters at every call "
            "(random initial values), so every worker would have another. Give its trained "
            "weights as model.weights, and make what these do not hold without random numbers."
        )
    return None if is_stated else parameters


def _check_values(network: torch.nn.Module, model: Network) -> None:
    """Refuse parameters and buffers without values, or of kinds that few operators take."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise ModelContractError(
                f"model.path {model.path}: {name} has no shape yet, as in a lazy layer: call the "
                "network once in the factory, before its weights are loaded."
            )
        if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
            kind = "has no values" if tensor.is_meta else "is sparse or nested"
            raise ModelContractError(
                f"model.path {model.path}: {name} {kind}: expected dense tensors. Return a network "
                "that has its weights, on the CPU."
            )


def parameters_sha256(module: torch.nn.Module) -> str:
    """Hash of a module's parameters and all buffers: names, shapes, dtypes and bytes."""
    digest = hashlib.sha256()
    values = module.state_dict() | _unsaved_buffers(module)
    for name, value in sorted(values.items()):
        if isinstance(value, torch.Tensor):
            tensor = value.detach().cpu().resolve_conj().resolve_neg()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:  # what a module packs, or saves beside its tensors
            file = io.BytesIO()
            torch.save(value, file)
            digest.update(f"{name} {hashlib.sha256(file.getvalue()).hexdigest()}".encode())
    return digest.hexdigest()


def storages_of(module: torch.nn.Module) -> set[int]:
    """Where the values lie that a module's weights replace: an address for each storage."""
    unsaved = _unsaved_buffers(module).keys()
    buffers = [each for name, each in module.named_buffers() if name not in unsaved]
    tensors = (*module.parameters(), *buffers)
    dense = [each for each in tensors if each.layout is torch.strided and not is_lazy(each)]
    return {each.untyped_storage().data_ptr() for each in dense if each.numel()}


def _unsaved_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's buffers that are not part of its state dict."""
    saved = module.state_dict().keys()
    return {name: tensor for name, tensor in module.named_buffers() if name not in saved}


def memory_format_of(request: LoadRequest) -> torch.memory_format:
    """The layout of a network's arrays, as PyTorch names it."""
    return torch_memory_format(request.model, request.inference)


def torch_memory_format(model: Network, inference: Inference) -> torch.memory_format:
    """``inference.memory_format`` as PyTorch names it."""
    if inference.memory_format == "contiguous":
        return torch.contiguous_format
    return torch.channels_last if model.dims == 2 else torch.channels_last_3d


def lay_out(network: torch.nn.Module, request: LoadRequest) -> None:
    """Bring the weights of convolutions into the job's memory format; an exported graph's stay."""
    if request.kind == "export":
        return
    memory_format = memory_format_of(request)
    axes = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(memory_format)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.dim() == axes:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)
