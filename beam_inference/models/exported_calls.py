"""Calls of operators in a program of ``torch.export`` that PyTorch does not check itself.

Modules check their arguments in Python, and call operators that then believe them. A program in a
file calls these operators directly. Given too few numbers, they would read or write memory that is
not theirs. Others return memory as it is, with what the process had in it before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from beam_inference.config.fields import Json
from beam_inference.models.exported_program import UnsafeProgram

_ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat")
_LARGEST = 1 << 63
_HIGHEST_POWER = 8


def check_calls(program: torch.export.ExportedProgram) -> None:
    """Check that a program names dtypes, layouts and memory formats, and takes no memory as it is.

    PyTorch looks the number of a dtype up without asking whether there is such a one.

    Raises:
        UnsafeProgram: it does.
    """
    for graph in list_graphs(program.graph_module):
        for node in graph.nodes:
            if node.target in _UNCLEARED:
                raise UnsafeProgram(f"{node.target} gives what the process has in its memory")
            schema = getattr(node.target, "_schema", None)
            for argument in () if schema is None else schema.arguments:
                value = _arguments(schema, node.args, node.kwargs).get(argument.name)
                if isinstance(value, int) and str(argument.real_type).removeprefix(
                    "Optional["
                ).startswith(_ENUMERATIONS):
                    raise UnsafeProgram(
                        f"{node.target} is given the number {value} as its {argument.name}"
                    )


def guard_calls(network: fx.GraphModule) -> fx.GraphModule:
    """Have a program's network check shapes before it calls operators that believe them.

    What it would take from memory as it is becomes zeros. Python's own integers are bounded: they
    have no largest one, and computing with long ones could not be interrupted.

    Args:
        network: is changed in place.

    Returns:
        The network. It raises ValueError where the shapes do not fit each other.
    """
    for module in network.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        calls = [node for node in module.graph.nodes if node.target in _GUARDED]
        for node in calls:
            node.target = _GUARDED[node.target]
        if calls:
            module.recompile()
    return network


def list_graphs(network: fx.GraphModule) -> list[fx.Graph]:
    """List the graphs of a program, and of the branches and loops in it."""
    return [module.graph for module in network.modules() if isinstance(module, fx.GraphModule)]


def _arguments(schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Json:
    """The arguments of a call by their names."""
    names = [argument.name for argument in schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _guard(target: Any, check: Callable[[Json], bool]) -> Callable[..., Any]:
    """A function that does what an operator does, if its arguments fit each other."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not check(_arguments(target._schema, args, kwargs)):
            raise ValueError(f"{target} is given tensors whose shapes do not fit each other")
        return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = f"guarded_{target}".replace(".", "_")
    return call


def _clear(target: Any) -> Callable[..., Any]:
    """A function that gives zeros, of the shape and kind that an operator gives."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs).zero_()

    call.__name__ = call.__qualname__ = f"cleared_{target}".replace(".", "_")
    return call


def _bound(operation: Callable[[Any, Any], Any], largest_second: int) -> Callable[[Any, Any], Any]:
    """A function that does what one of Python does, if the numbers are those of sizes."""

    def call(first: Any, second: Any) -> Any:
        for value, largest in ((first, _LARGEST), (second, largest_second)):
            if isinstance(value, str | list | tuple) or (
                isinstance(value, int) and abs(value) > largest
            ):
                raise ValueError(f"{operation.__name__} is given what is no size of an array")
        return operation(first, second)

    call.__name__ = call.__qualname__ = f"bounded_{operation.__name__}"
    return call


def _fits_batch_norm(call: Json) -> bool:
    """Whether each statistic has one number for each channel."""
    batch = call["input"]
    statistics = [call.get(key) for key in ("weight", "bias", "running_mean", "running_var")]
    return bool(
        batch.ndim >= 2
        and all(tensor is None or tuple(tensor.shape) == (batch.shape[1],) for tensor in statistics)
    )


def _fits_weight_norm(call: Json) -> bool:
    """Whether there is one factor for each part of the weights, and these are not empty."""
    weights = call["v"]
    axis = call.get("dim", 0)
    if weights.ndim == 0 or axis not in (0, weights.ndim - 1):
        return False
    return bool(weights.numel() > 0 and call["g"].numel() == weights.shape[axis])


def _fits_attention(call: Json) -> bool:
    """Whether keys, values and mask are of the same batches, heads and sizes as the queries."""
    query, key, value = tensors = [call[name] for name in ("query", "key", "value")]
    if any(tensor.ndim != 4 or tensor.stride(3) != 1 for tensor in tensors):
        return False
    batch, heads, length, size = query.shape
    if tuple(key.shape) != (batch, heads, key.shape[2], size) or value.shape != key.shape:
        return False
    mask = call.get("attn_mask")
    if mask is None:
        return True
    lengths = (batch, heads, length, key.shape[2])[-mask.ndim :]
    return mask.ndim in (2, 4) and all(
        n in (1, of_all) for n, of_all in zip(mask.shape, lengths, strict=True)
    )


_ATEN = torch.ops.aten
UNFILLED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Operators that give what the process has in its memory."""
_UNCLEARED = frozenset(getattr(_ATEN, name).out for name in UNFILLED)
"""Operators that leave the memory of a tensor they are given as it is; PyTorch writes none."""
_GUARDED: dict[Any, Callable[..., Any]] = (
    {
        each: _guard(each, check)
        for check, operators in (
            (
                _fits_batch_norm,
                (
                    _ATEN._batch_norm_no_update.default,
                    _ATEN._batch_norm_with_update.default,
                    _ATEN._batch_norm_with_update_functional.default,
                    _ATEN._native_batch_norm_legit.default,
                    _ATEN._native_batch_norm_legit.no_stats,
                    _ATEN._native_batch_norm_legit_functional.default,
                    _ATEN._native_batch_norm_legit_no_training.default,
                ),
            ),
            (_fits_weight_norm, (_ATEN._weight_norm.default, _ATEN._weight_norm_interface.default)),
            (_fits_attention, (_ATEN._scaled_dot_product_flash_attention_for_cpu.default,)),
        )
        for each in operators
    }
    | {
        each: _clear(each)
        for each in (
            _ATEN.empty.memory_format,
            *(getattr(_ATEN, name).default for name in UNFILLED - {"empty"}),
            torch.ops.prims.empty.default,
            torch.ops.prims.empty_permuted.default,
            torch.ops.prims.empty_strided.default,
        )
    }
    | {
        operator.mul: _bound(operator.mul, _LARGEST),
        operator.pow: _bound(operator.pow, _HIGHEST_POWER),
    }
)
"""What takes the place of operators that do not check shapes, or give memory as it is."""
