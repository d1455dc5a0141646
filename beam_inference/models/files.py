"""Torch modules from files: TorchScript, torch.export, and factories with weights. Also what identifies them."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from beam_inference.config.factories import factory_parts
from beam_inference.config.job import Network
from beam_inference.config.job import Network as NetworkConfig
from beam_inference.environment import set_variable
from beam_inference.errors import ModelContractError
from beam_inference.models.fetch import file_sha256

_ALLOW = "If you trust it, pass --allow_pickle."


def load_module(model: Network, *, allow_pickle: bool) -> tuple[Any, str]:
    """The network of a job, callable, on the CPU, and its kind: "module", "torchscript" or "export".

    Raises:
        ModelContractError: a file is absent or not what its name says, needs pickled code while
            ``allow_pickle`` is not given, or weights and network do not fit each other.
    """
    factory = factory_parts(model.path)
    if factory:
        module = _from_factory(model.path, *factory)
        if model.weights is not None:
            _load_weights(module, existing_file(model.weights, "model.weights"), allow_pickle)
        return module, "module"
    path = existing_file(model.path, "model.path")
    if path.suffix == ".pt2":
        return _exported(path, allow_pickle), "export"
    if path.suffix not in (".pt", ".ts", ".pth"):
        raise ModelContractError(
            f"model.path {model.path}: expected identity, a TorchScript file (.pt, .ts), a "
            "torch.export file (.pt2), an ONNX file (.onnx), an OpenVINO file (.xml), "
            "package.module:factory or file.py:factory"
        )
    if _is_torchscript(path):
        return _torchscript(path), "torchscript"
    if not allow_pickle:
        raise ModelContractError(
            f"{path} is not TorchScript but pickled Python, which could run any code when loaded. "
            "If it is a state dict, name the network as model.path (package.module:factory) and "
            "this file as model.weights. If it is a whole pickled network that you trust, pass "
            "--allow_pickle."
        )
    module = _unpickled(path)
    if not isinstance(module, torch.nn.Module):
        raise ModelContractError(
            f"{path} holds a {type(module).__name__}, not a network. Name the network as "
            "model.path (package.module:factory) and this file as model.weights."
        )
    return module, "module"


def files_sha256(model: Network) -> str:
    """Hash of what defines the network: its weights file, or the model file; a factory's source file is hashed too.

    Raises:
        ModelContractError: a file is absent, or ``model.sha256`` is given and differs.
    """
    factory = factory_parts(model.path)
    files = [_factory_file(*factory)] if factory else [existing_file(model.path, "model.path")]
    if model.weights is not None:
        files.append(existing_file(model.weights, "model.weights"))
    if files[0].suffix == ".onnx":
        _refuse_external_data(files[0])
    digests = [file_sha256(path) for path in files]
    if model.sha256 is not None and digests[-1] != model.sha256:
        raise ModelContractError(
            f"{files[-1]} has the sha256 {digests[-1]}, the job says model.sha256: {model.sha256}. "
            "It is another file, or was changed or damaged."
        )
    return "+".join(digests)


def _refuse_external_data(path: Path) -> None:
    """Weights beside an ONNX file would be neither hashed nor fetched with it."""
    # the key of TensorProto.external_data, as protobuf writes it
    if b"\x0a\x08location\x12" in path.read_bytes():
        raise ModelContractError(
            f"{path} keeps its weights in another file, which would not be part of the job's "
            "identity. Save it as one file: torch.onnx.export(…, external_data=False), or "
            "onnx.save_model(onnx.load(…), …)."
        )


def existing_file(path: str, key: str) -> Path:
    """A local file that a job names under ``key``. Raises ModelContractError if there is none."""
    if path.startswith("file://"):
        path = unquote(urlsplit(path).path)
    if "://" in path:
        raise ModelContractError(
            f"{key}: {path} cannot be read from there; copy it to a local file, and name that"
        )
    file = Path(path)
    if not file.is_file():
        raise ModelContractError(f"{key}: there is no file {file}")
    return file


def _factory_file(module: str, name: str) -> Path:
    if module.endswith(".py"):
        return existing_file(module, "model.path")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    except Exception as error:  # the package's own code runs, and may raise anything
        raise ModelContractError(
            f"model.path: cannot import {module}: {type(error).__name__}: {error}"
        ) from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ModelContractError(
            f"model.path: there is no Python module {module} (looked for its function {name})"
        )
    return Path(spec.origin)


def _from_factory(path: str, module_name: str, name: str) -> torch.nn.Module:
    file = _factory_file(module_name, name)
    try:
        if module_name.endswith(".py"):
            # Not registered under a fixed name: two jobs in one process may have files of the same
            # name.
            unique = f"beam_inference_model_{file_sha256(file)[:16]}"
            spec = importlib.util.spec_from_file_location(unique, file)
            if spec is None or spec.loader is None:
                raise ImportError(f"{file} is no Python source")
            python_module = importlib.util.module_from_spec(spec)
            sys.modules[unique] = python_module
            spec.loader.exec_module(python_module)
        else:
            python_module = importlib.import_module(module_name)
        factory = getattr(python_module, name, None)
        module = None if factory is None else factory()
    except Exception as error:
        raise ModelContractError(
            f"model.path {path}: the factory failed: {type(error).__name__}: {error}"
        ) from error
    if factory is None:
        raise ModelContractError(f"model.path {path}: {file} has no function {name}")
    if not isinstance(module, torch.nn.Module):
        raise ModelContractError(
            f"model.path {path}: the factory returned a {type(module).__name__}, not a torch module"
        )
    return module


def _load_weights(module: torch.nn.Module, path: Path, allow_pickle: bool) -> None:
    state = _state_dict(path, allow_pickle)
    if all(key.startswith("module.") for key in state):  # as DataParallel saves them
        state = {key.removeprefix("module."): value for key, value in state.items()}
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ModelContractError(
            f"the weights {path} do not fit the network: {' '.join(str(error).split())[:600]}"
        ) from None


def _state_dict(path: Path, allow_pickle: bool) -> dict[str, Any]:
    with path.open("rb") as file:
        head = file.read(9)
    if (
        len(head) == 9
        and head[8:] == b"{"
        and int.from_bytes(head[:8], "little") < path.stat().st_size
    ):
        from safetensors.torch import load_file

        return dict(load_file(path))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise ModelContractError(
                f"{path} holds more than tensors, and loading it could run any code. Save the "
                "state dict alone (or as safetensors), or pass --allow_pickle if you trust it. "
                f"({str(error).splitlines()[0]})"
            ) from None
        state = _unpickled(path)
    except Exception as error:
        raise ModelContractError(
            f"cannot read the weights {path}: {' '.join(str(error).split())[:300]}"
        ) from None
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    for key in ("state_dict", "model_state_dict"):  # as training frameworks nest it
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in state.values()
    ):
        raise ModelContractError(
            f"{path} is no state dict: expected names with tensors, found {type(state).__name__}"
        )
    return dict(state)


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise ModelContractError(
            f"cannot unpickle {path}: {type(error).__name__}: {error}"
        ) from None


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _torchscript(path: Path) -> torch.nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*torch.jit.load", category=DeprecationWarning
            )
            module: torch.nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise ModelContractError(
            f"cannot load the TorchScript file {path}: {_first_line(error)}"
        ) from None
    return module


def _exported(path: Path, allow_pickle: bool) -> Any:
    pickled = False
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled = any("custom_obj_" in name for name in archive.namelist())
    if pickled and not allow_pickle:
        raise ModelContractError(
            f"{path} holds pickled objects, which could run any code when loaded. {_ALLOW}"
        )
    try:
        # torch.export itself asks torch.load for more than tensors.
        with nullcontext() if allow_pickle else set_variable("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
            return torch.export.load(path)
    except pickle.UnpicklingError:
        raise ModelContractError(
            f"{path} holds more than tensors, and loading it could run any code. {_ALLOW}"
        ) from None
    except Exception as error:
        raise ModelContractError(
            f"cannot load the torch.export file {path}: {_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def model_sha256(model: NetworkConfig) -> str:
    """Hash of what defines the network; "identity" for identity. Raises ModelContractError for absent files."""
    if model.path == "identity":
        return "identity"

    return files_sha256(model)
