"""Files with the suffixes .pt, .ts and .pth: TorchScript, or a network pickled whole.

PyTorch is imported with the first file, not with this module: a plan asks which kinds there are.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from beam_inference.errors import ModelContractError
from beam_inference.models.archive import is_archive, open_archive
from beam_inference.models.loading import ModelLoader
from beam_inference.models.pickles import first_line, unpickle
from beam_inference.models.stand_ins import check_saved_by_torch

if TYPE_CHECKING:
    import torch


def load_file(path: Path, *, allow_pickle: bool) -> torch.nn.Module:
    """Load TorchScript, or, if that is allowed, a pickled network.

    Raises:
        ModelContractError: it is neither, or pickled while ``allow_pickle`` is not given.
    """
    if is_torchscript(path):
        return _load_torchscript(path)
    if not allow_pickle:
        check_saved_by_torch(path)
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


def not_loaded(path: Path, error: Exception) -> ModelContractError:
    """An error which says why PyTorch cannot load a file."""
    return ModelContractError(f"cannot load the TorchScript file {path}: {first_line(error)}")


def is_torchscript(path: Path) -> bool:
    """Whether a file is an archive of TorchScript.

    Raises:
        ModelContractError: it is an archive that is damaged.
    """
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
        raise not_loaded(path, error) from None
    return module
