"""Checkpoints: what is read from one, which need not be one that was written here.

A stranger's is refused by name wherever it does not fit. What decides the course of a training
comes from the training file alone.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from beam_inference.config.fields import Json
from beam_inference.errors import ModelContractError, PickledCode, StateError
from beam_inference.foreign_text import describe_error, shorten_value
from beam_inference.models.module_versions import copy_state
from beam_inference.models.tensors import tensor_fault
from beam_inference.models.weights import load_checkpoint
from beam_inference.training.config import TrainingConfig

CHECKPOINT = "checkpoint.pt"

_FREE_KEYS = (
    *("output", "workers", "validation_every", "validation_batches", "checkpoint_every"),
    *("threads", "cache_bytes", "storage", "partition"),
)
"""Keys that may change between two launches of one training."""

_COUNTS = (torch.float32, torch.float64)
"""Types in which PyTorch's optimizers count steps."""


@dataclass
class Metrics:
    """What is known of a training's course.

    Attributes:
        loss: of each step.
        validation: step and loss of each validation.
    """

    loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)


def read_checkpoint(path: Path, config: TrainingConfig, source: str) -> Json | None:
    """Read the checkpoint of an earlier launch of a training, if there is one.

    Args:
        path: its file.
        config: the training.
        source: hash of the file that makes its network.

    Raises:
        StateError: it cannot be read, or is another training's.
    """
    if not path.exists():
        return None
    try:
        state: Json = load_checkpoint(path, allow_pickle=False)
        _check_whole(path)
        before = dict(state["config"])
        _check_dense(state)
        _check_same(config.model_dump(mode="json"), before, path)
        _check_not_beyond(state["step"], before["steps"], config.steps, path)
        _check_source(source, state.get("source"), path)
    except StateError:
        raise
    except Exception as error:  # torch raises whatever the bytes lead to
        raise describe_damage(path, error) from None
    return state


def describe_damage(path: Path, error: Exception) -> StateError:
    """An error that says that a checkpoint cannot be used, and why."""
    if isinstance(error, PickledCode):
        reason = "it holds more than tensors, and loading it could run any code"
    else:
        is_known = isinstance(error, ModelContractError) or type(error) is ValueError
        reason = str(error).removesuffix(".") if is_known else describe_error(error)
    return StateError(
        f"{path} is no checkpoint that can be read: {reason}. Remove it to begin anew, or put back "
        "a copy of it."
    )


def find_not_finite(value: object, name: str) -> Iterator[str]:
    """Names of tensors in containers that hold NaN or infinite values."""
    if isinstance(value, Tensor):
        if (value.is_floating_point() or value.is_complex()) and not value.isfinite().all():
            yield name
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from find_not_finite(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from find_not_finite(each, f"{name}.{number}")


def read_step(step: object, steps: int) -> int:
    """The number of steps that are done. Raises ValueError if there are not as many."""
    if type(step) is not int or not 0 <= step <= steps:
        raise ValueError(f"it says step {shorten_value(step)} of {steps}")
    return step


def check_stream(state: Json, step: int) -> None:
    """Refuse another position of the stream of samples than follows a step. Raises ValueError."""
    found = state["step"]
    if type(found) is not int or found != step:
        raise ValueError(
            f"it is of step {step}, but its samples go on from step {shorten_value(found)}"
        )


def read_metrics(state: Json, step: int) -> Metrics:
    """Read losses of as many steps. Raises ValueError where they are none."""
    losses = state["loss"]
    if not isinstance(losses, list) or not all(map(_is_finite, losses)) or len(losses) != step:
        raise ValueError(f"its losses are not {step} finite numbers")
    judged = []
    for pair in state["validation"]:
        after, loss = pair
        if type(after) is not int or not 0 < after <= step or not _is_finite(loss):
            raise ValueError(f"one of its validations is {shorten_value(pair)}")
        judged.append((after, loss))
    return Metrics(losses, judged)


def _is_finite(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


def load_module(module: nn.Module, state: Json, name: str) -> None:
    """Give a module the tensors of a checkpoint.

    Args:
        module: the network, or its average.
        state: of the checkpoint.
        name: for messages.

    Raises:
        ValueError: they do not fit, or are not finite.
    """
    own = module.state_dict()
    if state.keys() != own.keys():
        raise ValueError(f"its {name} has other parts than the training's")
    for key, each in own.items():
        if isinstance(each, Tensor):
            _check_tensor(state[key], each, f"{name}.{key}")
    module.load_state_dict(copy_state(state))


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: Json, step: int, *, may_be_empty: bool
) -> None:
    """Give an optimizer the moments of a checkpoint, and nothing that decides how they are used.

    Args:
        optimizer: as the training file says.
        state: of the checkpoint.
        step: steps that are done.
        may_be_empty: whether all steps may have been left out, as mixed precision does.

    Raises:
        ValueError: they do not fit, or are not finite.
    """
    own = optimizer.state_dict()["param_groups"]
    if [each["params"] for each in state["param_groups"]] != [each["params"] for each in own]:
        raise ValueError("its optimizer has other parameters than the training's")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    names = _moments(optimizer)
    moments = state["state"]
    if names and step and not moments and not may_be_empty:
        raise ValueError(f"its optimizer has no state, after {step} steps")
    for number, found in moments.items():
        if type(number) is not int or not 0 <= number < len(parameters):
            raise ValueError("its optimizer has state of parameters that are not there")
        place = f"optimizer.state.{number}"
        if found.keys() != names:
            raise ValueError(f"{place} is not that of {type(optimizer).__name__}")
        for name, each in found.items():
            if name == "step":
                _check_count(each, step, place)
            else:
                _check_tensor(each, parameters[number], f"{place}.{name}")
        if "exp_avg_sq" in names and bool((found["exp_avg_sq"] < 0).any()):
            raise ValueError(f"{place}.exp_avg_sq has values below zero")
    copies = {  # in a file, tensors may share their memory
        number: {name: each.detach().clone() for name, each in found.items()}
        for number, found in moments.items()
    }
    optimizer.load_state_dict({"state": copies, "param_groups": own})


def _moments(optimizer: torch.optim.Optimizer) -> set[str]:
    """What an optimizer keeps of each parameter."""
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if optimizer.defaults["momentum"] else set()
    return {"step", "exp_avg", "exp_avg_sq"}


def load_scaler(scaler: torch.amp.GradScaler, state: Json, step: int) -> None:
    """Give a scaler of gradients where it was.

    Args:
        scaler: as it begins.
        state: of the checkpoint.
        step: steps that are done.

    Raises:
        ValueError: that is no such thing, or not where as many steps can lead to.
    """
    own = scaler.state_dict()
    if state.keys() != own.keys():
        raise ValueError("its scaler of gradients is not that of the training's precision")
    if not own:
        return
    scale = state["scale"]
    tracker = state["_growth_tracker"]
    is_count = type(tracker) is int and 0 <= tracker < own["growth_interval"]
    if not is_count or not _is_finite(scale) or not _can_lead_to(scale, own, step):
        raise ValueError(
            f"its scaler of gradients has a scale or a count that {step} steps do not lead to"
        )
    scaler.load_state_dict({**own, "scale": scale, "_growth_tracker": tracker})


def _can_lead_to(scale: float, own: Json, step: int) -> bool:
    """Whether a scale may come of so many steps: each can halve it, and many together double it."""
    begun, power = math.frexp(own["scale"])
    found, found_power = math.frexp(scale)
    return found == begun and -step <= found_power - power <= step // own["growth_interval"]


def check_averaged(state: Json, step: int) -> None:
    """Refuse an average of other steps than as many. Raises ValueError."""
    if int(state["n_averaged"]) != step:
        raise ValueError(f"its average is of {int(state['n_averaged'])} steps, and not of {step}")


def _check_count(value: object, step: int, place: str) -> None:
    if not isinstance(value, Tensor) or value.shape != () or value.dtype not in _COUNTS:
        raise ValueError(f"{place}.step is no number as PyTorch counts steps")
    count = value.item()  # of other types the count would end, or go on from 0
    if not float(count).is_integer() or not 1 <= count <= step:
        raise ValueError(f"{place}.step is {count}, after {step} steps")


def _check_tensor(found: Any, own: Tensor, name: str) -> None:
    if not isinstance(found, Tensor):
        raise ValueError(f"{name} is no tensor")
    if found.dtype != own.dtype or found.shape != own.shape:
        raise ValueError(
            f"{name} is {found.dtype} of {list(found.shape)}; expected {own.dtype} of "
            f"{list(own.shape)}"
        )
    if any(find_not_finite(found, name)) and not any(find_not_finite(own, name)):
        raise ValueError(f"{name} holds values that are NaN or infinite")


def _check_whole(path: Path) -> None:
    """Compare a checkpoint with its checksums, which PyTorch does not.

    Raises:
        ValueError: it was changed.
        zipfile.BadZipFile: as before.
    """
    with zipfile.ZipFile(path) as archive:
        changed = archive.testzip()
    if changed is not None:
        raise ValueError(f"{changed} was changed")


def _check_dense(value: object) -> None:
    """Refuse tensors in containers that are not dense. Raises ValueError."""
    if isinstance(value, Tensor):
        fault = tensor_fault(value)
        if fault is not None:
            raise ValueError(f"it holds {fault}")
    elif isinstance(value, dict):
        for each in value.values():
            _check_dense(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_dense(each)


def _check_source(now: str, before: object, path: Path) -> None:
    """Refuse a checkpoint of a network that another file made; older ones do not say which."""
    if before is not None and now != before:
        raise StateError(
            f"{path} is of a training whose network.path was another file, or had another content: "
            "going on would mix two networks. Put the former file back, or choose another output."
        )


def _check_not_beyond(step: object, before: object, steps: int, path: Path) -> None:
    """Refuse a checkpoint of more steps than are wanted now, if its training was to have them."""
    if type(step) is int and type(before) is int and steps < step <= before:
        raise StateError(
            f"{path} is of a training that has done {step} steps, and steps is {steps} now: write "
            f"steps: {step} or more, or choose another output."
        )


def _check_same(now: Json, before: Json, path: Path) -> None:
    is_constant = now["optimizer"]["schedule"] == "constant"
    free = {*_FREE_KEYS, "steps"} if is_constant else {*_FREE_KEYS}
    changed = [key for key in now if key not in free and now[key] != before.get(key)]
    if changed:
        raise StateError(
            f"{path} is of a training whose {', '.join(changed)} had other values: going on would "
            "mix two trainings. Write the former values, or choose another output."
        )
