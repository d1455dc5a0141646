"""PyTorch's functions as functions of divided arrays, by the function: the one list of them.

Each entry takes PyTorch's arguments, in which divided arrays are parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from beam_inference.engines.onednn import conv3d
from beam_inference.engines.partition.norms import normalize_batch, normalize_groups
from beam_inference.engines.partition.part import (
    SPATIAL,
    Part,
    align,
    crop,
    join,
    mean,
    pad,
)
from beam_inference.engines.partition.resizing import resize, samplings
from beam_inference.engines.partition.windows import (
    convolve,
    convolve_transposed,
    padded_windows,
    pool,
)
from beam_inference.errors import ModelContractError
from beam_inference.geometry.shares import TransposedWindow, Window
from beam_inference.residual_unet import normalize_in_place

Function = Callable[..., Any]


def _three(value: Any) -> tuple[int, int, int]:
    if isinstance(value, int):
        return value, value, value
    values = tuple(int(each) for each in value)
    a, b, c = values * 3 if len(values) == 1 else values
    return a, b, c


def _conv3d(
    input: Part,  # torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Part:
    strides = _three(stride)
    dilations = _three(dilation)
    margins = padding if isinstance(padding, str) else _three(padding)
    windows = padded_windows(weight.shape[2:], strides, margins, dilations)

    def local(values: Tensor, padding: tuple[int, ...]) -> Tensor:
        run = torch.conv3d if torch.is_grad_enabled() else conv3d
        result: Tensor = run(values, weight, bias, strides, padding, dilations, groups)
        return result

    return convolve(input, windows, weight.shape[0], local)


def _conv_transpose3d(
    input: Part,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Part:
    strides = _three(stride)
    dilations = _three(dilation)
    columns = zip(
        weight.shape[2:], strides, dilations, _three(padding), _three(output_padding), strict=True
    )
    windows = [TransposedWindow(*column) for column in columns]

    def local(values: Tensor, before: tuple[int, ...], further: tuple[int, ...]) -> Tensor:
        return torch.conv_transpose3d(
            values, weight, bias, strides, before, further, groups, dilations
        )

    return convolve_transposed(input, windows, weight.shape[1] * groups, local)


def _max_pool3d(
    input: Part,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Part:
    if return_indices:
        raise ModelContractError("max_pool3d with return_indices")
    kernel = _three(kernel_size)
    strides = _three(stride) if stride else kernel
    dilations = _three(dilation)
    columns = zip(kernel, strides, dilations, _three(padding), strict=True)
    windows = [Window(k, s, d, p, p, ceil_mode) for k, s, d, p in columns]

    def local(values: Tensor) -> Tensor:
        return functional.max_pool3d(values, kernel, strides, 0, dilations)

    return pool(input, windows, -torch.inf, local)


def _avg_pool3d(
    input: Part,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Part:
    if ceil_mode:
        raise ModelContractError("avg_pool3d with ceil_mode")
    kernel = _three(kernel_size)
    strides = _three(stride) if stride else kernel
    margins = _three(padding)
    windows = [Window(k, s, 1, p, p) for k, s, p in zip(kernel, strides, margins, strict=True)]

    def local(values: Tensor) -> Tensor:
        return functional.avg_pool3d(values, kernel, strides, divisor_override=divisor_override)

    result = pool(input, windows, 0, local)
    if count_include_pad or divisor_override or not any(margins):
        return result
    ones = input.with_values(torch.ones_like(input.values[:1, :1]).detach())
    return result.with_values(result.values / pool(ones, windows, 0, local).values)


def _adaptive_avg_pool3d(input: Part, output_size: Any) -> Tensor:
    if output_size != 1 and output_size not in ((1, 1, 1), [1, 1, 1]):
        raise ModelContractError("adaptive_avg_pool3d to more than one voxel")
    return mean(input)


def _mean(
    input: Part, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Part | Tensor:
    axes = _axes(dim)
    if axes == {1} and keepdim:
        return input.with_values(torch.mean(input.values, 1, keepdim=True, dtype=dtype))
    if axes != set(SPATIAL) or dtype is not None:
        raise ModelContractError("a mean over other axes than z, y and x")
    whole = mean(input)
    return whole if keepdim else whole[..., 0, 0, 0]


def _axes(dim: Any) -> set[int]:
    dims = range(5) if dim is None else [dim] if isinstance(dim, int) else dim
    return {each % 5 for each in dims}


def _batch_norm(
    input: Part,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Part:
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    if not training and running is not None:
        if input.values.numel() == 0:
            return input.with_values(input.values * 1)
        return input.with_values(
            functional.batch_norm(input.values, *running, weight, bias, eps=eps)
        )
    if momentum is None:
        raise ModelContractError("batch_norm with momentum: None, in training")
    return normalize_batch(input, weight, bias, running, momentum, eps)


def _instance_norm(
    input: Part,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Part:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    if running_mean is not None:
        raise ModelContractError("instance_norm with track_running_stats, in training")
    return normalize_groups(input, input.values.shape[1], weight, bias, eps)


def _group_norm(
    input: Part,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Part:
    return normalize_groups(input, num_groups, weight, bias, eps)


def _interpolate(
    input: Part,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Part:
    if antialias:
        raise ModelContractError("interpolation with antialias")
    factors = None
    if size is None:
        factors = list(scale_factor) if isinstance(scale_factor, Sequence) else [scale_factor] * 3
    sizes = None if size is None else _three(size)
    if recompute_scale_factor and factors is not None:
        sizes = _three([int(n * f) for n, f in zip(input.division.shape, factors, strict=True)])
        factors = None
    return resize(input, samplings(input, sizes, factors, mode, bool(align_corners)))


def _pad(
    input: Part, pad_: Sequence[int], mode: str = "constant", value: float | None = None
) -> Part:
    pairs = [(pad_[i], pad_[i + 1]) for i in range(0, len(pad_), 2)][::-1]
    margins = [(0, 0)] * (5 - len(pairs)) + pairs
    if any(map(any, margins[:2])):
        raise ModelContractError("padding of channels")
    return pad(input, margins[2:], mode, value or 0.0)


def _cat(tensors: Sequence[Part | Tensor], dim: int = 0) -> Part:
    parts = [each for each in tensors if isinstance(each, Part)]
    if dim % 5 > 1 or len(parts) != len(tensors):
        raise ModelContractError(f"concatenation along axis {dim}, or with an undivided array")
    return join(parts, dim % 5)


def _chunk(input: Part, chunks: int, dim: int = 0) -> tuple[Part, ...]:
    _check_undivided(dim)
    return tuple(map(input.cut, input.values.chunk(chunks, dim)))


def _split(tensor: Part, split_size_or_sections: Any, dim: int = 0) -> tuple[Part, ...]:
    _check_undivided(dim)
    return tuple(map(tensor.cut, torch.split(tensor.values, split_size_or_sections, dim)))


def _softmax(function: Function) -> Function:
    def run(input: Part, dim: int | None = None, *arguments: Any, **further: Any) -> Part:
        _check_undivided(0 if dim is None else dim)
        return input.with_values(function(input.values, dim, *arguments, **further))

    return run


def _check_undivided(dim: int) -> None:
    if dim % 5 > 1:
        raise ModelContractError(f"along axis {dim}, which is divided")


def _get_item(input: Part, index: Any) -> Part:
    indices = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in indices:
        place = indices.index(Ellipsis)
        indices[place : place + 1] = [slice(None)] * (6 - len(indices))
    indices += [slice(None)] * (5 - len(indices))
    is_plain = all(isinstance(each, slice) and each.step in (None, 1) for each in indices)
    if not is_plain or len(indices) != 5:
        raise ModelContractError("an index that is not a box")
    box = []
    for each, n in zip(indices[2:], input.division.shape, strict=True):
        start, stop, _ = each.indices(n)
        box.append((start, max(start, stop)))
    return crop(input.cut(input.values[tuple(indices[:2])]), tuple(box))


def _size(input: Part, dim: int | None = None) -> Any:
    return torch.Size(input.shape) if dim is None else input.shape[dim]


def _shape(input: Part) -> torch.Size:
    return torch.Size(input.shape)


def _prelu(input: Part, weight: Tensor) -> Part:
    return input.with_values(torch.prelu(input.values, weight))


def _voxelwise(function: Function, in_place: bool = False) -> Function:
    """A function of each voxel: its arguments are divided as the largest of them that is a part."""

    def run(*arguments: Any, **further: Any) -> Part:
        every = [*arguments, *further.values()]
        parts = [each for each in every if isinstance(each, Part)]
        like = every[0] if in_place else max(parts, key=lambda each: math.prod(each.division.shape))
        if not isinstance(like, Part):
            raise ModelContractError("a change in place of an array that is not divided")
        aligned = [align(each, like) for each in arguments]
        named = {name: align(each, like) for name, each in further.items()}
        values = function(*aligned, **named)
        if not isinstance(values, Tensor):
            raise ModelContractError("a function that gives no array with these arguments")
        return like.with_values(values)

    return run


def _dropout3d(input: Part, p: float = 0.5, training: bool = True, inplace: bool = False) -> Part:
    """Drop channels, the same ones on all members, which draw the same numbers."""
    if not training or p == 0:
        return input
    ones = input.values.new_ones((*input.values.shape[:2], 1, 1, 1))
    kept = functional.dropout3d(ones, p, training)
    return input.with_values(input.values.mul_(kept) if inplace else input.values * kept)


def _dropout(input: Part, p: float = 0.5, training: bool = True, inplace: bool = False) -> Part:
    """Drop voxels, others on each member, which draw the same numbers otherwise."""
    if not training or p == 0:
        return input
    seed = int(torch.randint(2**62, ())) + input.mesh.rank
    generator = torch.Generator(input.values.device).manual_seed(seed)
    kept = torch.empty_like(input.values).bernoulli_(1 - p, generator=generator)
    kept /= max(1 - p, torch.finfo(kept.dtype).tiny)
    return input.with_values(input.values.mul_(kept) if inplace else input.values * kept)


def _normalize_in_place(
    input: Part, scale: Tensor, bias: Tensor, slope: float, epsilon: float
) -> tuple[Part, Tensor, Tensor, Tensor]:
    """The training pass of the batch normalisation of ours, which adds over all ranks itself."""
    # a copy, for PyTorch lets no function change a view that returns several tensors
    values, *statistics = normalize_in_place(input.values.clone(), scale, bias, slope, epsilon)
    mean, variance, count = statistics
    return input.with_values(values), mean, variance, count


def _attribute(function: Function) -> Function:
    return lambda input, *arguments, **further: function(input.values, *arguments, **further)


def _converted(function: Function) -> Function:
    """Make another type of an array; without a copy where it is of that type, as PyTorch does."""

    def run(input: Part | Tensor, *arguments: Any, **further: Any) -> Part | Tensor:
        if further.pop("memory_format", torch.preserve_format) != torch.preserve_format:
            raise ModelContractError("another memory format")
        # Of another array its type counts, not its values.
        others = [each.values if isinstance(each, Part) else each for each in arguments]
        if not isinstance(input, Part):
            result: Tensor = function(input, *others, **further)
            return result
        values: Tensor = function(input.values, *others, **further)
        return input if values is input.values else input.with_values(values)

    return run


def _detach(input: Part) -> Part:
    return replace(input, values=input.values.detach())


def _contiguous(input: Part, memory_format: torch.memory_format = torch.contiguous_format) -> Part:
    """Copy what would not be contiguous undivided, and nothing else: the copy alone is changed."""
    _check_format(memory_format)
    if input.is_contiguous:
        return input
    return input.with_values(input.values.clone(memory_format=memory_format))


def _is_contiguous(
    input: Part, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    _check_format(memory_format)
    return input.is_contiguous


def _check_format(memory_format: torch.memory_format) -> None:
    if memory_format != torch.contiguous_format:
        raise ModelContractError("another memory format")


_VOXELWISE = (
    "abs add addcmul clamp clamp_max clamp_min cos div eq erf exp expm1 ge gt le log log1p "
    "logical_and logical_not logical_or lt maximum minimum mul ne neg pow reciprocal round rsqrt "
    "rsub sigmoid sign sin sqrt square sub tanh true_divide where nan_to_num relu celu selu "
)
_OF_TENSORS = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ "
    "__pow__ __neg__ __abs__ __gt__ __ge__ __lt__ __le__ __eq__ __ne__ __and__ __or__ __invert__ "
    "clone masked_fill "
)
_CONVERSIONS = "bool bfloat16 cpu double float half int to type_as"
_IN_PLACE = (
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ abs_ add_ addcmul_ clamp_ clamp_max_ "
    "clamp_min_ div_ exp_ mul_ neg_ pow_ relu_ sigmoid_ sqrt_ sub_ tanh_ copy_ fill_ zero_ "
    "masked_fill_ "
)
_ACTIVATIONS = (
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish "
    "relu relu6 rrelu selu sigmoid silu softplus softshrink softsign tanh tanhshrink "
)
_ACTIVATIONS_IN_PLACE = "celu_ elu_ hardtanh_ leaky_relu_ relu_ rrelu_ selu_"
_ATTRIBUTES = "device dtype grad_fn is_cuda is_leaf layout ndim requires_grad"


def _named(holders: Sequence[Any], names: str) -> list[Function]:
    """Functions by name, wherever PyTorch has them: in its module, as a method."""
    return [
        getattr(holder, name)
        for holder in holders
        for name in names.split()
        if hasattr(holder, name)
    ]


FUNCTIONS: Mapping[Function, Function] = {
    **{
        each: _voxelwise(each)
        for each in (
            *_named((torch, torch.Tensor), _VOXELWISE),
            *_named((torch.Tensor,), _OF_TENSORS),
            *_named((functional,), _ACTIVATIONS),
            torch.zeros_like,
            torch.ones_like,
        )
    },
    **{each: _converted(each) for each in _named((torch.Tensor,), _CONVERSIONS)},
    torch.detach: _detach,
    torch.Tensor.detach: _detach,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.is_contiguous: _is_contiguous,
    **{
        each: _voxelwise(each, in_place=True)
        for each in (
            *_named((torch, torch.Tensor), _IN_PLACE),
            *_named((functional, torch), _ACTIVATIONS_IN_PLACE),
        )
    },
    **{
        getattr(torch.Tensor, name).__get__: _attribute(getattr(torch.Tensor, name).__get__)
        for name in _ATTRIBUTES.split()
    },
    **{
        each: _attribute(each)
        for each in _named((torch.Tensor,), "__repr__ dim is_complex is_floating_point")
    },
    torch.is_complex: _attribute(torch.is_complex),
    torch.is_floating_point: _attribute(torch.is_floating_point),
    torch.Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    torch.Tensor.size: _size,
    torch.Tensor.__getitem__: _get_item,
    torch.conv3d: _conv3d,
    torch.conv_transpose3d: _conv_transpose3d,
    functional.max_pool3d: _max_pool3d,
    torch.max_pool3d: _max_pool3d,
    functional.avg_pool3d: _avg_pool3d,
    functional.adaptive_avg_pool3d: _adaptive_avg_pool3d,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    functional.batch_norm: _batch_norm,
    functional.instance_norm: _instance_norm,
    functional.group_norm: _group_norm,
    functional.interpolate: _interpolate,
    functional.pad: _pad,
    torch.prelu: _prelu,
    functional.prelu: _prelu,
    torch.cat: _cat,
    torch.concat: _cat,
    torch.chunk: _chunk,
    torch.Tensor.chunk: _chunk,
    torch.split: _split,
    torch.Tensor.split: _split,
    **{
        each: _softmax(each)
        for each in (
            functional.softmax,
            functional.log_softmax,
            torch.softmax,
            torch.log_softmax,
            torch.Tensor.softmax,
            torch.Tensor.log_softmax,
        )
    },
    functional.dropout: _dropout,
    functional.dropout3d: _dropout3d,
    normalize_in_place: _normalize_in_place,
}
