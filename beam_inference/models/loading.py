"""Loads what ``model.path`` names: a factory, a package, or a file of an installed kind."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Literal, Protocol
from urllib.parse import unquote

from beam_inference.config.engines import NetworkKind
from beam_inference.config.factories import factory_parts, run_file
from beam_inference.config.network import Network
from beam_inference.config.plugins import list_plugins, load_plugin
from beam_inference.config.siblings import (
    check_siblings,
    hint_at_folder,
    note_source,
    own_path,
    runs_its_source,
)
from beam_inference.errors import ConfigError, ModelContractError
from beam_inference.foreign_text import describe_error
from beam_inference.models.local_files import existing_file, local_path
from beam_inference.models.packages import may_be_package, open_package
from beam_inference.models.stand_ins import check_no_stand_in
from beam_inference.models.trust import Trust

_OWN_SUFFIXES = ("pt", "pt2", "pth", "ts")
_OF_OTHER_ENGINES = {".onnx": ("onnxruntime", "openvino"), ".xml": ("openvino",)}
"""Suffixes of files that PyTorch does not read, with the engines that do."""


class LoadFile(Protocol):
    """Loads a network from a local file or folder; no code in it is run unless ``allow_pickle``."""

    def __call__(self, path: Path, *, allow_pickle: bool) -> Any:
        """A network of PyTorch on the CPU, or a function of NumPy arrays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoader:
    """A kind of file that ``model.path`` may name.

    A kind is installed by an entry point of the group ``beam_inference.models`` whose name is the
    file's suffix without its dot; several entry points may name one loader.

    Attributes:
        load: loads a network from such a file. It raises
            :class:`beam_inference.errors.ModelContractError` where the file is not what its name
            says.
        gives: what it loads: a network of PyTorch, or a function of NumPy arrays, as a factory may
            return it.
        is_folder: whether ``model.path`` is a folder instead.
    """

    load: LoadFile
    gives: Literal["torch", "function"] = "torch"
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A network, and what it is.

    Attributes:
        network: a network of PyTorch on the CPU, or a function that maps float32 arrays
            (N, C, Z, Y, X) to such arrays. A function is called by one thread at a time, unless it
            has an attribute ``thread_safe`` that is true.
        kind: which of these it is.
    """

    network: Any
    kind: NetworkKind


def suffix_of(model: Network) -> str:
    """The suffix of the network's file, as far as ``model.path`` is one.

    By it the checks of the file and its engine are chosen. Of a URL it is that of the file's name,
    in which characters may be written as %2E.
    """
    path = unquote(model.path) if "://" in model.path else model.path
    return PurePosixPath(path).suffix


def loader_of(model: Network) -> ModelLoader | None:
    """The installed loader for the suffix of ``model.path``; None if there is none.

    Raises:
        ConfigError: what is installed for it is no loader.
    """
    suffix = suffix_of(model).removeprefix(".")
    if factory_parts(model.path) or suffix not in list_plugins("models"):
        return None
    loader = load_plugin("models", suffix)
    if not isinstance(loader, ModelLoader):
        raise ConfigError(
            f"model {suffix} is installed as {list_plugins('models')[suffix].object}, which is not "
            "a beam_inference.models.loading.ModelLoader"
        )
    return loader


def package_path(model: Network) -> Path | None:
    """The local path of the model's package; None if it is none, or not on this machine."""
    if model.path == "identity" or factory_parts(model.path) or loader_of(model) is not None:
        return None
    path = local_path(model.path)
    return path if path is not None and may_be_package(path) else None


def gives_function(model: Network) -> bool:
    """Whether a model's network is a function of NumPy arrays; a factory is called to find out.

    Raises:
        ModelContractError: the factory fails.
    """
    if factory_parts(model.path):
        return _kind_of(_call_factory(model)) == "function"
    loader = loader_of(model)
    return loader is not None and loader.gives == "function"


def load_network(model: Network, *, trust: Trust = Trust.NOTHING) -> LoadedNetwork:
    """Load a job's network.

    Raises:
        ModelContractError: a file is absent or not what its name says, needs pickled code while
            ``trust`` does not allow it, or weights and network do not fit each other.
    """
    if factory_parts(model.path):
        return _from_factory(model, trust)
    package = package_path(model)
    if package is not None:
        with open_package(package, model.folds) as opened:
            return as_network(opened.network.load(is_trusted=trust.allows_source))
    if model.folds is not None:
        raise ModelContractError(
            f"model.folds is for packages of networks, such as nnU-Net's; model.path {model.path} "
            "is none. Remove it."
        )
    loader = loader_of(model)
    is_folder = loader is not None and loader.is_folder
    path = existing_file(model.path, "model.path", is_folder=is_folder)
    if loader is None and path.suffix in _OF_OTHER_ENGINES:
        raise ModelContractError(
            f"model.path {model.path} is no network of PyTorch: choose an engine that reads such "
            f"files, {' or '.join(_OF_OTHER_ENGINES[path.suffix])}"
        )
    if loader is None:
        others = [f".{name}" for name in list_plugins("models") if name not in _OWN_SUFFIXES]
        kinds = f", or a file of an installed kind ({', '.join(others)})" if others else ""
        raise ModelContractError(
            f"model.path {model.path}: expected identity, a TorchScript file (.pt, .ts), a "
            "torch.export file (.pt2), an ONNX file (.onnx), an OpenVINO file (.xml), a package (a "
            "folder or a zip file), package.module:factory or "
            f"file.py:factory{kinds}"
        )
    if not is_folder:
        check_no_stand_in(path)
    network = loader.load(path, allow_pickle=trust.allows_pickles)
    kind = _kind_of(network)
    if kind is None:
        raise ModelContractError(
            f"model.path {model.path}: its loader returned a {type(network).__name__}, not a torch "
            "module or a function of arrays"
        )
    return LoadedNetwork(network, kind)


def as_network(network: object) -> LoadedNetwork:
    """A network that is at hand, with its kind.

    Raises:
        ModelContractError: it is neither a network of PyTorch nor a function.
    """
    kind = _kind_of(network)
    if kind is None:
        raise ModelContractError(
            f"the network is a {type(network).__name__}, not a torch module or a function of arrays"
        )
    return LoadedNetwork(network, kind)


def source_file(model: Network) -> Path:
    """The local source file of the model's factory.

    Raises:
        ModelContractError: there is none.
    """
    module, name = factory_parts(model.path) or ("", "")
    if module.endswith(".py"):
        return existing_file(module, "model.path")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the package's own code runs, and may raise anything
        raise ModelContractError(
            f"model.path: cannot import {module}: {describe_error(error)}"
        ) from None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise ModelContractError(
            f"model.path: there is no Python module {module} (looked for its function {name})"
        )
    return Path(spec.origin)


def _from_factory(model: Network, trust: Trust) -> LoadedNetwork:
    network = _call_factory(model)
    kind = _kind_of(network)
    if kind not in ("module", "torchscript", "function"):
        raise ModelContractError(
            f"model.path {model.path}: the factory returned a {type(network).__name__}, not a "
            "torch module or a function of arrays"
        )
    if model.weights is None or _takes_weights(_factory(model)):
        return LoadedNetwork(network, "function" if kind == "function" else "module")
    if kind == "function":
        raise ModelContractError(
            f"model.weights: the factory {model.path} returns a function, into which no weights "
            "can be loaded: give the factory a parameter weights_path"
        )
    from beam_inference.models.weights import load_weights

    weights = existing_file(model.weights, "model.weights")
    load_weights(network, weights, allow_pickle=trust.allows_pickles)
    return LoadedNetwork(network, "module")


def _call_factory(model: Network) -> Any:
    file = source_file(model)
    try:
        factory = _factory(model)
        with own_path(file):
            if model.weights is None or not _takes_weights(factory):
                network = factory()
            else:
                network = factory(weights_path=existing_file(model.weights, "model.weights"))
        check_siblings(file)
        return network
    except (ModelContractError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() in it must end nothing but the factory
        raise ModelContractError(
            f"model.path {model.path}: the factory failed: {describe_error(error)}"
            f"{hint_at_folder(error, file)}"
        ) from error


def _factory(model: Network) -> Callable[..., Any]:
    """The factory of a model; its module's own code runs, and may raise anything."""
    file = source_file(model)
    module, name = factory_parts(model.path) or ("", "")
    # A file is run anew: what it draws by lot, on top, is then the same for every network.
    source = run_file(file) if module.endswith(".py") else _import_source(module, file)
    factory = getattr(source, name, None)
    if factory is None:
        raise ModelContractError(f"model.path {model.path}: {file} has no function {name}")
    made: Callable[..., Any] = factory
    return made


def _import_source(name: str, file: Path) -> ModuleType:
    """Import a module, whose source is hashed, unless Python runs another one in its place.

    Raises:
        ModelContractError: what was compiled of an earlier source has the same size and time.
    """
    module = importlib.import_module(name)
    note_source(file, name)
    loader = None if module.__spec__ is None else module.__spec__.loader
    if isinstance(loader, SourceFileLoader) and not runs_its_source(loader, name):
        raise ModelContractError(
            f"model.path: Python runs a compiled form of {file} that was made of another source, "
            "so the hash of that file would not be that of the network. Remove the folder "
            f"{file.parent / '__pycache__'}, or touch the file."
        )
    return module


def _takes_weights(factory: Callable[..., Any]) -> bool:
    """Whether a factory loads ``model.weights`` itself."""
    try:
        return "weights_path" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of an object without a signature
        return False


def _kind_of(network: object) -> NetworkKind | None:
    torch = sys.modules.get("torch")  # where it is not imported, nothing is a network of its
    if torch is not None:
        if isinstance(network, torch.jit.ScriptModule):
            return "torchscript"
        if isinstance(network, torch.nn.Module):
            return "module"
        if isinstance(network, torch.export.ExportedProgram):
            return "export"
    return "function" if callable(network) else None
