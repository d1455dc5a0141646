"""Files with the suffix .pt2: networks saved by ``torch.export``."""

from __future__ import annotations

import pickle
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from beam_inference.environment import set_variable
from beam_inference.errors import ModelContractError
from beam_inference.models.loading import ModelLoader
from beam_inference.models.pickles import ALLOW_HINT, first_line


def load_file(path: Path, *, allow_pickle: bool) -> Any:
    """Load the program of a ``torch.export`` file.

    Raises:
        ModelContractError: it is none, or holds pickled objects while ``allow_pickle`` is not
            given.
    """
    pickled = False
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled = any("custom_obj_" in name for name in archive.namelist())
    if pickled and not allow_pickle:
        raise ModelContractError(
            f"{path} holds pickled objects, which could run any code when loaded. {ALLOW_HINT}"
        )
    try:
        # torch.export itself asks torch.load for more than tensors.
        with nullcontext() if allow_pickle else set_variable("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1"):
            return torch.export.load(path)
    except pickle.UnpicklingError:
        raise ModelContractError(
            f"{path} holds more than tensors, and loading it could run any code. {ALLOW_HINT}"
        ) from None
    except Exception as error:
        raise ModelContractError(
            f"cannot load the torch.export file {path}: {first_line(error)}"
        ) from None


LOADER = ModelLoader(load=load_file)
