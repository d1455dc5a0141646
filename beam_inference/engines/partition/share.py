"""A tensor that a network takes for the whole patch, and that holds one member's part of it.

Why a subclass of Tensor, and neither exchanged modules nor a traced graph: networks call functions
beside modules (``cat``, ``+``, ``interpolate`` to another array's size), which an exchange of
modules does not see; and a graph of ``torch.fx`` cannot hold networks whose Python code decides by
shapes. PyTorch asks a subclass about every function that it is given to, modules' own among them.
A function that is not known to be right on parts is refused, by its name and the module's. So is
what PyTorch does not ask about: TorchScript and the like meet a tensor without values, which
refuses each operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from beam_inference.engines.partition.functions import FUNCTIONS
from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.part import Part
from beam_inference.errors import ModelContractError
from beam_inference.geometry.shares import box_shape, divide, slices_in


class Share(Tensor):
    """One member's part of a patch; ``shape`` is the whole patch's."""

    part: Part
    """What is held."""

    @staticmethod
    def of(part: Part) -> Share:
        """The share that holds a part.

        Raises:
            ModelContractError: the part has other voxels than its division says, and so would be
                taken for another place.
        """
        found = tuple(part.values.shape[2:])
        if found != box_shape(part.box):
            raise ModelContractError(
                f"a share of {list(found)} voxels, where one of {list(box_shape(part.box))} belongs"
            )
        share: Share = torch.Tensor._make_wrapper_subclass(
            Share, part.shape, dtype=part.values.dtype, device=part.values.device
        )
        share.part = part
        return share

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of PyTorch on parts."""
        named = {_SYNONYMS.get(name, name): each for name, each in (kwargs or {}).items()}
        with torch._C.DisableTorchFunctionSubclass():
            mesh = _mesh_of([*args, *named.values()])
            if torch.is_grad_enabled() != mesh.has_gradients:
                # Within an autograd.Function, a gradient would be another one without a word.
                raise _refusal(mesh, f"gradients are switched in {name_of_function(func)}")
            run = FUNCTIONS.get(func)
            if run is None:
                raise _refusal(mesh, name_of_function(func))
            parts = [_unwrap(each) for each in args]
            try:
                _check_arguments(func, run, args, named)
                result = run(*parts, **{name: _unwrap(each) for name, each in named.items()})
                if isinstance(result, Part) and args and _is_changed(func):
                    return args[0]
                return _wrap(result)
            except ModelContractError as error:
                raise _refusal(mesh, str(error)) from None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # PyTorch states it without the function
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse an operation that was not asked for as a function of PyTorch."""
        mesh = _mesh_of([*args, *(kwargs or {}).values()])
        mesh.refusal = _refusal(mesh, f"{func}, in TorchScript or the like")
        raise mesh.refusal


_SYNONYMS = {"axis": "dim", "keepdims": "keepdim"}
"""Names that PyTorch also takes for arguments, because NumPy has them."""


def _check_arguments(
    func: Callable[..., Any],
    run: Callable[..., Any],
    args: Sequence[Any],
    named: Mapping[str, Any],
) -> None:
    """Refuse arguments that are not known to be right on parts.

    Raises:
        ModelContractError: there are such.
    """
    try:
        _signature_of(run).bind(*args, **named)
    except TypeError:
        unknown = True
    else:
        unknown = named.get("out") is not None
    if unknown:
        names = " and ".join(named) or "these arguments"
        raise ModelContractError(f"{name_of_function(func)} with {names}")


@cache
def _signature_of(run: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(run)


def _is_changed(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument, and returns it."""
    name = getattr(func, "__name__", "")
    is_method = name.startswith("__i") and name != "__invert__"
    return is_method or (name.endswith("_") and not name.endswith("__"))


def _unwrap(value: Any) -> Any:
    if isinstance(value, Share):
        return value.part
    if isinstance(value, (list, tuple)) and any(isinstance(each, Share) for each in value):
        return [_unwrap(each) for each in value]
    return value


def _wrap(value: Any) -> Any:
    if isinstance(value, Part):
        return Share.of(value)
    if isinstance(value, tuple) and any(isinstance(each, Part) for each in value):
        return tuple(_wrap(each) for each in value)
    return value


def _mesh_of(values: Sequence[Any]) -> Mesh:
    for value in values:
        if isinstance(value, Share):
            return value.part.mesh
        if isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, Share):
                    return each.part.mesh
    raise TypeError("no share among the arguments")


def name_of_function(func: Callable[..., Any]) -> str:
    """How a function of PyTorch is called, for messages; of an attribute, the attribute's name."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(func, "__self__", func).__name__) if name == "__get__" else name


def _refusal(mesh: Mesh, what: str) -> ModelContractError:
    layer = mesh.layers[-1] if mesh.layers else ""
    return ModelContractError(
        f"partition: {layer or 'the network'} cannot be divided: {what}. Remove partition, or "
        "replace this layer."
    )


def name_layers(network: nn.Module, mesh: Mesh) -> list[RemovableHandle]:
    """Keep, in the mesh, the names of a network's modules that are computing, for messages.

    Returns:
        The hooks that do it.
    """
    hooks = []
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks
        title = f"{name or 'the network'} ({type(module).__name__})"

        def enter(_module: nn.Module, _inputs: Any, title: str = title) -> None:
            mesh.layers.append(title)

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            mesh.layers.pop()

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    return hooks


def run_divided(
    network: Callable[[Tensor], Any], values: Tensor, shape: Sequence[int], mesh: Mesh
) -> Part:
    """Run a network on one member's part of a batch. All members must call it.

    Args:
        network: of (N, C, Z, Y, X); on every member the same, with the same parameters.
        values: (N, C, *part), the member's part of the batch as :func:`own_part` cuts it.
        shape: of the whole batch in space, ZYX.
        mesh: the members.

    Returns:
        The member's part of the network's answer. Gradients of parameters are of the member's own
        voxels: the sum over members is that of the undivided network.

    Raises:
        ModelContractError: a layer cannot be divided, or the answer is not one array in space.
    """
    mesh.layers.clear()
    mesh.has_gradients = torch.is_grad_enabled()
    with mesh.refusing():
        answer = network(Share.of(Part(values, divide(shape, mesh.shape), mesh)))
    if not isinstance(answer, Share):
        raise ModelContractError(
            "partition: the network's answer must be one array (batch, channels, z, y, x), divided "
            f"as its input is; it returns a {type(answer).__name__}"
        )
    return answer.part


def own_part(batch: Tensor, mesh: Mesh) -> Tensor:
    """The part of a whole batch (N, C, Z, Y, X) that this member begins with."""
    box = divide(batch.shape[2:], mesh.shape).boxes[mesh.rank]
    return batch[slices_in(box, tuple((0, n) for n in batch.shape[2:]))]
