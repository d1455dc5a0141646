"""Weights of a network that a factory makes: state dicts, in the forms in which they are saved."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError, PickledCode
from beam_inference.foreign_text import describe_error, shorten_value
from beam_inference.models.archive import is_archive, open_archive
from beam_inference.models.module_versions import (
    KEY,
    copy_state,
    read_versions,
    versions_of,
    with_versions,
    without_prefix,
)
from beam_inference.models.pickle_bounds import NotFollowed, PickleOutOfBounds
from beam_inference.models.pickles import first_line, unpickle
from beam_inference.models.saved_pickles import check_saved
from beam_inference.models.stand_ins import check_no_stand_in, check_saved_by_torch
from beam_inference.models.tensors import tensor_fault

NESTED = ("state_dict", "model_state_dict", "network_weights", "model")
"""Keys of checkpoints under which training frameworks save a state dict; the third is nnU-Net's."""

_MOST_KEYS = 10
WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")
"""What torch.compile and DataParallel put before names, in the order in which it is taken off."""


def load_weights(
    module: torch.nn.Module, path: Path, *, allow_pickle: bool, replace: bool = False
) -> None:
    """Load a file of weights into a network.

    Args:
        module: the network.
        path: of the file.
        allow_pickle: whether pickled code may run.
        replace: see :func:`fit_weights`.

    Raises:
        ModelContractError: it is no file of weights, needs pickled code while ``allow_pickle`` is
            not given, or does not fit the network.
    """
    state = _state_dict(path, allow_pickle)
    fit_weights(module, state, str(path), replace=replace)


def fit_weights(
    module: torch.nn.Module, state: Json, source: str, *, replace: bool = False
) -> None:
    """Give a network its weights.

    Args:
        module: the network.
        state: its state dict, perhaps with names as torch.compile and DataParallel write them.
        source: the file, for messages.
        replace: whether the tensors become the network's own, which then may be on the device
            "meta" before.

    Raises:
        ModelContractError: they do not fit each other.
    """
    own = module.state_dict()
    for prefix in WRAPPERS:
        if all(key.startswith(prefix) for key in state):
            bare = without_prefix(state, prefix)
            fitting = len(own.keys() & state.keys())
            # a network may have such an attribute itself
            if fitting == 0 or len(own.keys() & bare.keys()) > fitting:
                state = bare
    state = _without_holder(state, own)
    _refuse_other_numbers(state, own, source)
    try:
        if (
            replace
        ):  # one of another shape is left to be refused: converted, it could take all memory
            tensors = {
                key: value.to(own[key].dtype)
                if key in own and value.shape == own[key].shape
                else value
                for key, value in state.items()
            }
            state = with_versions(tensors, versions_of(state))
        module.load_state_dict(state, strict=True, assign=replace)
    except RuntimeError as error:
        raise ModelContractError(
            f"the weights {source} do not fit the network: {' '.join(str(error).split())[:600]}"
        ) from None
    except Exception as error:  # of a module, which may read its own weights as it likes
        raise ModelContractError(
            f"the weights {source} do not fit the network: {describe_error(error)}"
        ) from None
    rest = [name for name, tensor in module.named_buffers() if tensor.is_meta]
    if rest:
        raise ModelContractError(f"{source} has no values for {', '.join(rest)}")


def _without_holder(state: Json, own: Mapping[str, torch.Tensor]) -> Json:
    """Take off what all names begin with, if the network's own names are left.

    It is the attribute of a class that held the network while it was trained, as PyTorch
    Lightning's modules do.
    """
    stripped = state
    while stripped and not stripped.keys() & own.keys():
        holder = next(iter(stripped)).partition(".")[0] + "."
        if not all(key.startswith(holder) for key in stripped):
            break
        stripped = without_prefix(stripped, holder)
    return stripped if stripped.keys() == own.keys() else state


def _refuse_other_numbers(
    state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: str
) -> None:
    """Refuse numbers of another kind than the parameters, which PyTorch would convert in silence.

    Complex ones would lose their imaginary parts; integers and floats of 8 bits or fewer are
    mostly quantised, and mean nothing without their scale.
    """
    for name, parameter in own.items():
        if name not in state:
            continue
        if state[name].is_complex() and not parameter.is_complex():
            raise ModelContractError(
                f"the weights {path} do not fit the network: {name} has complex numbers, the "
                "network's are real"
            )
        is_float = state[name].is_floating_point() and state[name].itemsize > 1
        if parameter.is_floating_point() and parameter.itemsize > 1 and not is_float:
            raise ModelContractError(
                f"the weights {path} do not fit the network: {name} has numbers of the type "
                f"{str(state[name].dtype).removeprefix('torch.')}, the network's are of a floating "
                "type of 16 bits or more. Save the weights as they were trained, not quantised."
            )


def _state_dict(path: Path, allow_pickle: bool) -> Json:
    if path.suffix == ".json":
        raise ModelContractError(
            f"{path} is no file of weights; an index of several files is not read here: load the "
            "network with its own library, and save its state dict in one file, as safetensors"
        )
    check_no_stand_in(path)
    if path.suffix == ".safetensors" or _is_safetensors(path):
        return _load_safetensors(path)
    state = load_checkpoint(path, allow_pickle=allow_pickle)
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    for key in NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in state.items()
    ):
        raise ModelContractError(
            f"{path} is not a state dict: expected names with tensors, alone or under "
            f"{', '.join(NESTED)}; found {_describe(state)}"
        )
    if not allow_pickle:
        check_tensors(state, str(path))
    return copy_state(state)


def check_tensors(state: Mapping[str, object], source: str) -> None:
    """Refuse weights that are not dense tensors of plain numbers.

    Args:
        state: a state dict.
        source: the file, for messages.

    Raises:
        ModelContractError: one is sparse, nested, quantised or no tensor.
    """
    for key, value in state.items():
        if not isinstance(key, str):
            raise ModelContractError(
                f"the weights {source} have the key {shorten_value(key)}: expected names"
            )
        fault = tensor_fault(value)
        if fault:
            raise ModelContractError(
                f"the weights {source} hold {fault}, {key!a:.60}: expected dense tensors of plain "
                "numbers. Save the state dict of a network that is neither sparse nor quantised."
            )


def _describe(state: object) -> str:
    """What a file holds in place of a state dict, in a few words."""
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    others = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if 0 < len(others) < len(state):
        return f"tensors, and under {shorten_value(others[0])} a {type(state[others[0]]).__name__}"
    keys = [shorten_value(key) for key in list(state)[:_MOST_KEYS]]
    more = ", …" if len(state) > len(keys) else ""
    return f"a mapping with the keys {', '.join(keys)}{more}"


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(9)
    return (
        len(head) == 9
        and head[8:] == b"{"
        and int.from_bytes(head[:8], "little") < path.stat().st_size
    )


def _load_safetensors(path: Path) -> Json:
    from safetensors import safe_open
    from safetensors.torch import load_file

    try:
        # copies, for the file may change while the network is used
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        # save_model() writes weights that a network has twice once, and where the other one is
        tensors |= {
            name: tensors[kept]
            for name, kept in metadata.items()
            if kept in tensors and name not in tensors
        }
        return with_versions(tensors, read_versions(metadata.get(KEY, "")))
    except Exception as error:  # of the library, or of PyTorch for a dtype that it lacks
        raise ModelContractError(
            f"cannot read the weights {path}: they are damaged, or not safetensors: "
            f"{first_line(error)}. Save or copy the file again."
        ) from None


def load_checkpoint(path: Path, *, allow_pickle: bool, in_place: bool = False) -> Any:
    """Load what :func:`torch.save` has written: tensors, plain numbers and text, in containers.

    Args:
        path: of the file.
        allow_pickle: whether pickled code may run.
        in_place: whether the tensors stay in the file, where its form allows, and are read when
            they are used.

    Raises:
        ModelContractError: it is damaged, or holds more while ``allow_pickle`` is not given.
    """
    check_saved_by_torch(path)
    can_stay = is_archive(path)
    if can_stay:
        with open_archive(path, "file of weights"):
            pass  # checked, before PyTorch unpacks it
    try:
        if not allow_pickle:
            with path.open("rb") as file:
                check_saved(file)
        with torch.serialization.safe_globals(_SCALARS):
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=in_place and can_stay
            )
    except (pickle.UnpicklingError, NotFollowed) as error:
        if not allow_pickle:
            raise PickledCode(
                f"{path} holds more than tensors, and loading it could run any code. Save the "
                "state dict alone (or as safetensors), or pass --allow_pickle if you trust it. "
                f"({str(error).splitlines()[0]})"
            ) from None
        return unpickle(path)
    except PickleOutOfBounds as error:
        raise ModelContractError(
            f"cannot read the weights {path}: {error}. Save the state dict alone (or as "
            "safetensors), or pass --allow_pickle if you trust the file."
        ) from None
    except Exception as error:
        raise ModelContractError(f"cannot read the weights {path}: {first_line(error)}") from None


class _PickledDtype:
    """What stands for ``numpy.dtype`` while a checkpoint is read: the name of a type of numbers.

    NumPy's own would let a file change the types that this process computes with.
    """

    def __init__(self, name: object, *_: object) -> None:
        if name not in ("f8", "f4", "i8", "i4", "b1"):
            raise pickle.UnpicklingError("it holds values of NumPy that are no plain numbers")
        self.name = str(name)

    def __setstate__(self, _state: object) -> None:
        """Leave out byte order and fields: these names have none."""


def _read_scalar(dtype: object, content: object) -> np.generic:
    """Stand for NumPy's function that makes a number of its bytes."""
    if not isinstance(dtype, _PickledDtype) or not isinstance(content, bytes):
        raise pickle.UnpicklingError("it holds values of NumPy that are no plain numbers")
    try:
        (number,) = np.frombuffer(content, dtype.name)
    except ValueError:
        raise pickle.UnpicklingError("it holds a number of NumPy that is cut off") from None
    scalar: np.generic = number
    return scalar


_SCALARS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_PickledDtype, "numpy.dtype"),
    (_read_scalar, "numpy._core.multiarray.scalar"),
    (_read_scalar, "numpy.core.multiarray.scalar"),
]
"""How NumPy's numbers are read that stand in checkpoints beside weights, as in nnU-Net's."""
