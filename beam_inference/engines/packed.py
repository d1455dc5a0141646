"""Arrays of several shapes that a network takes for one batch, each of them computed as alone.

Nothing is padded: a function of PyTorch is run on the array of each shape, which is right for all
functions that treat each sample by itself. Batch normalisation alone looks at several samples, and
takes its statistics from the voxels of all arrays, and of all processes that train together.

Functions are run one after the other, each on all arrays, so that the processes come to each
normalisation in the same order, forwards and backwards, however many arrays each of them has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from beam_inference.engines.joint_norms import Sets, measure_statistics, normalize_arrays
from beam_inference.engines.partition.functions import FUNCTIONS
from beam_inference.engines.partition.mesh import Mesh
from beam_inference.engines.partition.share import name_of_function
from beam_inference.errors import ModelContractError
from beam_inference.residual_unet import (
    InPlaceBatchNorm,
    normalize_arrays_in_place,
    normalize_in_place,
    update_running,
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Pack:
    """What the arrays of a pack belong to.

    Attributes:
        mesh: all processes that train together; it need not have a group if it is this one alone.
        counts: whether the arrays' voxels count in statistics; False for those of a process that
            has no sample, and computes only because others need it to take part.
        has_gradients: whether gradients pass through the network.
    """

    mesh: Mesh
    counts: bool = True
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        return values if self.mesh.size == 1 else self.mesh.add_up(values)


class Packed(Tensor):
    """Arrays (N, C, Z, Y, X) of several shapes that a network takes for one tensor."""

    arrays: tuple[Tensor, ...]
    pack: Pack

    @staticmethod
    def of(arrays: Sequence[Tensor], pack: Pack) -> Packed:
        """The pack of some arrays, at least one."""
        packed: Packed = torch.Tensor._make_wrapper_subclass(Packed, (0,), dtype=arrays[0].dtype)
        packed.arrays = tuple(arrays)
        packed.pack = pack
        return packed

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Packed({[tuple(each.shape) for each in self.arrays]})"

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of PyTorch on each array."""
        named = dict(kwargs or {})
        packed = next(_packs_among([*args, *named.values()]))
        with torch._C.DisableTorchFunctionSubclass():
            if torch.is_grad_enabled() != packed.pack.has_gradients:
                # Within an autograd.Function, a gradient would be lost without a word.
                what = f"gradients are switched off in {name_of_function(func)}, as in checkpoints"
                raise _refusal(packed.pack, what)
            if func is functional.batch_norm:
                return _normalize_batch(*args, **named)
            if func is normalize_in_place:
                return _normalize_batch_in_place(*args, **named)
            if func is functional.instance_norm and _keeps_statistics(args, named):
                raise _refusal(packed.pack, _RUNNING)
            if len(packed.arrays) > 1:
                _check_samplewise(func, args, named, packed.pack)
            results = [
                func(*_of_array(args, k), **{key: _of_array(v, k) for key, v in named.items()})
                for k in range(len(packed.arrays))
            ]
            return _join(results, packed.pack)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # PyTorch states it without the function
        cls,
        func: Function,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse an operation that was not asked for as a function of PyTorch."""
        pack = next(_packs_among([*args, *(kwargs or {}).values()])).pack
        pack.mesh.refusal = _refusal(pack, f"{func}, in TorchScript or the like")
        raise pack.mesh.refusal


_RUNNING = "instance_norm with track_running_stats, in training"


def _keeps_statistics(args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether a call of ``instance_norm`` changes running statistics, which are of all samples."""
    running = args[1] if len(args) > 1 else named.get("running_mean")
    uses_input = args[5] if len(args) > 5 else named.get("use_input_stats", True)
    return running is not None and bool(uses_input)


def _packs_among(values: Sequence[Any]) -> Iterator[Packed]:
    for value in values:
        if isinstance(value, Packed):
            yield value
        elif isinstance(value, list | tuple):
            yield from _packs_among(value)


def _of_array(value: Any, index: int) -> Any:
    """An argument as the function of one array takes it."""
    if isinstance(value, Packed):
        return value.arrays[index]
    if isinstance(value, PerArray):
        return value.values[index]
    if type(value) in (list, tuple):
        return type(value)(_of_array(each, index) for each in value)
    return value


def _join(results: Sequence[Any], pack: Pack) -> Any:
    """What a network sees of the results for each array."""
    first = results[0]
    if isinstance(first, Tensor):
        return Packed.of(results, pack)
    if type(first) in (list, tuple) and any(isinstance(each, Tensor) for each in first):
        return type(first)(_join(each, pack) for each in zip(*results, strict=True))
    return _join_values(results, pack)


def _normalize_batch(
    input: Packed,  # torch's name
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Packed:
    if not training:
        arrays = [
            functional.batch_norm(each, running_mean, running_var, weight, bias, eps=eps)
            for each in input.arrays
        ]
        return Packed.of(arrays, input.pack)
    sets = Sets(1, input.pack.add_up, input.pack.counts)
    found = measure_statistics(input.arrays, sets)
    if running_mean is not None and running_var is not None:
        count = found.count
        update_running(running_mean, running_var, found.mean, found.variance, count, momentum)
    normal = normalize_arrays(input.arrays, found, weight, bias, eps, sets)
    return Packed.of(normal, input.pack)


def _normalize_batch_in_place(
    x: Packed, scale: Tensor, bias: Tensor, slope: float, epsilon: float
) -> tuple[Packed, Tensor, Tensor, Tensor]:
    result = normalize_arrays_in_place(x.arrays, scale, bias, slope, epsilon, x.pack.counts)
    return Packed.of(result.arrays, x.pack), result.mean, result.variance, result.count


_OVER_AXES: Mapping[Function, tuple[int, int | None]] = {
    **{
        getattr(holder, name): (1, None)
        for holder in (torch, torch.Tensor)
        for name in ("mean", "sum", "amax", "amin", "softmax", "log_softmax", "logsumexp")
    },
    functional.softmax: (1, None),
    functional.log_softmax: (1, None),
    torch.cat: (1, 0),
    torch.concat: (1, 0),
    **{
        getattr(holder, name): (2, 0)
        for holder in (torch, torch.Tensor)
        for name in ("chunk", "split")
    },
}
"""Functions of some axes: which argument these are, and what they are by default; None for all."""

_FURTHER = (
    torch.Tensor.__format__,
    functional.adaptive_avg_pool3d,
    functional.adaptive_max_pool3d,
    functional.conv3d,
    functional.conv_transpose3d,
    functional.dropout3d,
    functional.feature_alpha_dropout,
    functional.layer_norm,
    functional.max_unpool3d,
    functional.pixel_shuffle,
)
_SAMPLEWISE = {*FUNCTIONS, *_OVER_AXES, *_FURTHER}
"""Functions that treat each sample of a batch by itself, those of some axes if 0 is not one."""


def _check_samplewise(
    func: Function, args: Sequence[Any], named: Mapping[str, Any], pack: Pack
) -> None:
    """Refuse a function that may look at several samples.

    Raises:
        ModelContractError: it is not known to treat each sample by itself.
    """
    if func not in _SAMPLEWISE:
        raise _refusal(pack, name_of_function(func))
    ndim = next(_packs_among([*args, *named.values()])).arrays[0].ndim
    if func in _OVER_AXES:
        place, default = _OVER_AXES[func]
        axes = named.get("dim", args[place] if len(args) > place else default)
        each = axes if isinstance(axes, list | tuple) else [axes]
        if any(axis is None or axis % ndim == 0 for axis in each):
            raise _refusal(pack, f"{name_of_function(func)} over all samples")
    if func is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_whole = index[0] is Ellipsis if len(index) <= ndim else False
        if not is_whole and not (isinstance(index[0], slice) and index[0] == slice(None)):
            raise _refusal(pack, "an index that leaves out samples")


class PerArray:
    """A value that is another one for each array of a pack, such as its extent.

    Arithmetic, comparison and items are of each value. Where Python needs one number or one answer,
    and the values are several, the network is refused.
    """

    def __init__(self, values: Sequence[Any], pack: Pack) -> None:
        self.values = tuple(values)
        self._pack = pack

    def __getitem__(self, index: Any) -> Any:
        return _join_values([value[index] for value in self.values], self._pack)

    def __iter__(self) -> Iterator[Any]:
        return (_join_values(each, self._pack) for each in zip(*self.values, strict=True))

    def __index__(self) -> int:
        raise _refusal(self._pack, f"a number that differs between them: {list(self.values)}")

    __int__ = __index__

    def __bool__(self) -> bool:
        raise _refusal(self._pack, f"a decision that differs between them: {list(self.values)}")

    def __hash__(self) -> int:
        return hash(self.values)

    def _combine(self, other: Any, function: Function) -> Any:
        values = [function(v, _of_array(other, k)) for k, v in enumerate(self.values)]
        return _join_values(values, self._pack)

    def __eq__(self, other: object) -> Any:
        return self._combine(other, operator.eq)

    def __lt__(self, other: Any) -> Any:
        return self._combine(other, operator.lt)

    def __gt__(self, other: Any) -> Any:
        return self._combine(other, operator.gt)

    def __le__(self, other: Any) -> Any:
        return self._combine(other, operator.le)

    def __ge__(self, other: Any) -> Any:
        return self._combine(other, operator.ge)

    def __neg__(self) -> Any:
        return self._combine(-1, operator.mul)

    def __rsub__(self, other: Any) -> Any:
        return self._combine(other, lambda own, first: first - own)

    def __add__(self, other: Any) -> Any:
        return self._combine(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._combine(other, operator.sub)

    def __mul__(self, other: Any) -> Any:
        return self._combine(other, operator.mul)

    def __floordiv__(self, other: Any) -> Any:
        return self._combine(other, operator.floordiv)

    def __mod__(self, other: Any) -> Any:
        return self._combine(other, operator.mod)


def _join_values(values: Sequence[Any], pack: Pack) -> Any:
    return PerArray(values, pack) if any(each != values[0] for each in values) else values[0]


def _refusal(pack: Pack, what: str) -> ModelContractError:
    layer = pack.mesh.layers[-1] if pack.mesh.layers else "the network"
    return ModelContractError(
        f"patches of several shapes: {layer} cannot take them together, as batch normalisation "
        f"needs: {what}. Give one shape of patches, or replace this layer."
    )


def has_batch_statistics(network: nn.Module) -> bool:
    """Whether a network, as it is set now, has layers that look at several samples."""
    return any(
        (isinstance(each, InPlaceBatchNorm) and each.training)
        or (isinstance(each, _BatchNorm) and (each.training or each.running_mean is None))
        for each in network.modules()
    )


def run_packed(network: nn.Module, arrays: Sequence[Tensor], pack: Pack) -> list[Tensor]:
    """Run a network on arrays of several shapes, as one batch.

    All processes of the pack's mesh must call it, with at least one array.

    Args:
        network: of (N, C, Z, Y, X).
        arrays: one of each shape.
        pack: what they belong to.

    Returns:
        The network's answer to each array. Gradients of parameters are of these arrays: the sum
        over processes is that of the whole batch.

    Raises:
        ModelContractError: a layer is not known to treat samples by themselves, the network is
            TorchScript, or the answer is not one array.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in network.modules()):
        raise ModelContractError(
            "the network is TorchScript, of which nobody can tell whether it looks at several "
            "samples: give a factory of modules of Python, or one shape of patches and one process"
        )
    if not has_batch_statistics(network):
        with _RefuseStatistics():
            return [network(each) for each in arrays]
    pack.mesh.layers.clear()
    with pack.mesh.refusing():
        answer = network(Packed.of(arrays, pack))
    if not isinstance(answer, Packed):
        raise ModelContractError(
            f"the network returned a {type(answer).__name__}; expected one tensor of logits"
        )
    return list(answer.arrays)


class _RefuseStatistics(TorchFunctionMode):
    """Refuses normalisation by the statistics of a batch, outside of the layers that are known."""

    def __torch_function__(
        self, func: Function, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        is_norm = func in (functional.batch_norm, torch.batch_norm)
        if is_norm and (args[5] if len(args) > 5 else named.get("training")):
            raise ModelContractError(
                "the network calls batch_norm with training=True, whose statistics are of the "
                "whole batch; expected a module for it, such as torch.nn.BatchNorm3d"
            )
        if func is functional.instance_norm and _keeps_statistics(args, named):
            raise ModelContractError(
                f"the network calls {_RUNNING}: of patches of several shapes, or of several "
                "processes, these would be of some samples alone. Set track_running_stats to False."
            )
        return func(*args, **named)
