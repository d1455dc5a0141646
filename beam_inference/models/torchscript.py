"""Files with the suffixes .pt, .ts and .pth: TorchScript, or a network pickled whole.

PyTorch is imported with the first file, not with this module: a plan asks which kinds there are.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from beam_inference.errors import ModelContractError
from beam_inference.models.archive import is_archive, open_archive
from beam_inference.models.loading import ModelLoader
from beam_inference.models.pickles import first_line, unpickle

if TYPE_CHECKING:
    import torch


def load_file(path: Path, *, allow_pickle: bool) -> torch.nn.Module:
    """Load TorchScript, or, if that is allowed, a pickled network.

    Raises:
        ModelContractError: it is neither, or pickled while ``allow_pickle`` is not given.
    """
    if _is_torchscript(path):
        return _load_torchscript(path)
    if not allow_pickle:
        raise ModelContractError(
            f"{path} is not TorchScript but pickled Python, which could run any code when loaded. "
            "If it is a state dict, name the network as model.path (package.module:factory) and "
            "this file as model.weights. If it is a whole pickled network that you trust, pass "
            "--allow_pickle."
        )
    import torch

    module = unpickle(path)
    if not isinstance(module, torch.nn.Module):
        raise ModelContractError(
            f"{path} holds a {type(module).__name__}, not a network. Name the network as "
            "model.path (package.module:factory) and this file as model.weights."
        )
    return module


LOADER = ModelLoader(load=load_file)

_RUN_AT_ONCE = re.compile(rb"\b__setstate__\b")
"""A method that runs as soon as a file is loaded."""

_NAMESPACES = ("aten::", "prim::", "quantized::", "torchvision::")
_REFUSED = ("aten::from_file", "aten::save", "prim::Print", "prim::rpc")
"""Operators that read or write files, or write to the terminal; others call other machines."""


def load_packed(path: Path, *, allow_pickle: bool) -> torch.nn.Module:
    """Load a network of a package, whose programs must do nothing but compute.

    Args:
        path: of the file.
        allow_pickle: whether it is trusted: then it may be anything that :func:`load_file` takes.

    Raises:
        ModelContractError: it is no TorchScript, or its programs could do more.
    """
    if not allow_pickle and _is_torchscript(path):
        reason = _find_more_than_computing(path)
        if reason is not None:
            raise ModelContractError(
                f"the TorchScript file {path} {reason}, and what packages bring may only compute. "
                "If you trust it, pass --trust_model."
            )
    return load_file(path, allow_pickle=allow_pickle)


def _find_more_than_computing(path: Path) -> str | None:
    """What the programs of a file would do beside computing, in a clause; None if nothing."""
    import torch

    with open_archive(path, "TorchScript file") as archive:
        sources = [name for name in archive.namelist() if name.endswith(".py")]
        if any(_RUN_AT_ONCE.search(archive.read(name)) for name in sources):
            return "runs code of its own as it is loaded (__setstate__)"
    unit = torch._C.CompilationUnit()
    try:
        torch._C.import_ir_module(unit, str(path), torch.device("cpu"), {}, False)  # type: ignore[call-arg]
    except Exception as error:
        raise _not_loaded(path, error) from None
    for function in unit.get_functions():  # type: ignore[func-returns-value, attr-defined]
        for node in _list_nodes(function.graph):
            kind = node.kind()
            if not kind.startswith(_NAMESPACES) or kind.startswith(_REFUSED):
                return f"calls {kind} in {function.name}"
            if any("torch.classes" in str(value.type()) for value in node.outputs()):
                return f"makes an object of PyTorch's own in {function.name}"
    return None


def _list_nodes(block: torch._C.Graph | torch._C.Block) -> Iterator[torch._C.Node]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _list_nodes(inner)


def _not_loaded(path: Path, error: Exception) -> ModelContractError:
    return ModelContractError(f"cannot load the TorchScript file {path}: {first_line(error)}")


def _is_torchscript(path: Path) -> bool:
    if not is_archive(path):
        return False
    with open_archive(path, "TorchScript file") as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _load_torchscript(path: Path) -> torch.nn.Module:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*torch.jit.load", category=DeprecationWarning
            )
            module: torch.nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except Exception as error:
        raise _not_loaded(path, error) from None
    return module
