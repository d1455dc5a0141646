"""Convolutions of PyTorch's eager mode on a CPU, run by oneDNN.

PyTorch gives a batch of one patch to other code where channels, depth and height multiply to 20480
or less (``use_mkldnn`` in its Convolution.cpp). That code copies the neighbours of every voxel, 27
times the array for a kernel of 3×3×3, and multiplies matrices. Batches of two patches go to oneDNN,
which is several times as fast and needs little memory. Here a batch of one goes there, too, and has
the bits of a batch of two. Transposed convolutions gain nothing, and kernels of one voxel in the
plane are products of matrices: both stay with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from beam_inference.config.fields import Json


def run_by_onednn(network: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a network whose float32 3-D convolutions run by oneDNN, if PyTorch has it.

    It works for modules, functions and programs of ``torch.export``; TorchScript cannot be
    intercepted.
    """

    def forward(batch: Tensor) -> Any:
        with _Convolutions():
            return network(batch)

    return forward


class _Convolutions(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Json | None = None,
    ) -> Any:
        # is_compiling() is true for all threads while one of them exports a network
        if func in _CONVOLUTIONS and not torch.compiler.is_dynamo_compiling():
            return conv3d(*args, **kwargs or {})
        return func(*args, **kwargs or {})


_CONVOLUTIONS = (torch.conv3d, torch.ops.aten.conv3d.default, torch.ops.aten.conv3d.padding)


def conv3d(
    input: Tensor,  # torch.conv3d's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Use oneDNN where it applies; otherwise PyTorch, which also raises the error messages."""
    if _is_for_onednn(input, weight, groups):
        kernel = weight.shape[2:]
        strides = _per_axis(stride)
        dilations = _per_axis(dilation)
        if strides and dilations:
            extents = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
            margins = _margins(padding, strides, extents)
            if margins and all(
                n + 2 * m > e for n, m, e in zip(input.shape[2:], margins, extents, strict=True)
            ):
                return torch.mkldnn_convolution(
                    input, weight, bias, margins, strides, dilations, groups
                )
    return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)


def _is_for_onednn(batch: Tensor, weight: Tensor, groups: int) -> bool:
    return (
        type(batch) is Tensor
        and type(weight) in (Tensor, torch.nn.Parameter)
        and batch.dtype == weight.dtype == torch.float32
        and batch.device.type == weight.device.type == "cpu"
        and batch.dim() == weight.dim() == 5
        and batch.numel() > 0
        and batch.shape[1] == groups * weight.shape[1]
        and weight.shape[3:] != (1, 1)
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def _margins(padding: Any, strides: list[int], extents: list[int]) -> list[int] | None:
    """Margins along each axis; None where the two sides differ."""
    if padding == "valid":
        return [0, 0, 0]
    if padding == "same":
        is_even = strides == [1, 1, 1] and not any(extent % 2 for extent in extents)
        return [extent // 2 for extent in extents] if is_even else None
    return _per_axis(padding)


def _per_axis(value: Any) -> list[int] | None:
    """An integer for each axis; None if the value has another form."""
    values = (
        [value]
        if isinstance(value, int)
        else list(value)
        if isinstance(value, (tuple, list))
        else []
    )
    return {1: values * 3, 3: values}.get(len(values))
