"""Convolutions of PyTorch's eager mode on a CPU, all by oneDNN.

PyTorch leaves those of one patch to other code where channels, depth and height multiply to 20480 or less
(``use_mkldnn`` in its Convolution.cpp): that writes out the neighbours of every voxel, 27 times the array for a kernel
of 3×3×3, and multiplies matrices. Batches of two patches go to oneDNN, several times as fast in as little memory, and
here those of one do, too. So a patch's answer has the same bits in a batch of any size, as far as convolutions go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def by_onednn(network: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A network whose 3-D convolutions of float32 are oneDNN's, if PyTorch was built with it; all else is as it was.

    Of modules, functions and ``torch.export`` files: TorchScript asks nobody.
    """

    def forward(batch: Tensor) -> Any:
        with _Convolutions():
            return network(batch)

    return forward


class _Convolutions(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.conv3d, torch.ops.aten.conv3d.default):
            return _conv3d(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def _conv3d(
    input: Tensor,  # torch.conv3d's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or not _is_for_onednn(input, weight, groups):
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)
    margins, strides, dilations = (_per_axis(each) for each in (padding, stride, dilation))
    extents = (
        n + 2 * m - d * (k - 1)
        for n, m, d, k in zip(input.shape[2:], margins, dilations, weight.shape[2:], strict=True)
    )
    if min(extents) < 1:
        return torch.conv3d(input, weight, bias, stride, padding, dilation, groups)  # has words for what is wrong
    return torch.mkldnn_convolution(input, weight, bias, margins, strides, dilations, groups)


def _is_for_onednn(batch: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether PyTorch would use oneDNN for two such patches.

    Kernels of one voxel in the plane are products of matrices, and quicker as such.
    """
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and batch.dtype == weight.dtype == torch.float32
        and batch.device.type == weight.device.type == "cpu"
        and batch.dim() == weight.dim() == 5
        and batch.shape[1] == groups * weight.shape[1]
        and weight.shape[3:] != (1, 1)
    )


def _per_axis(value: int | Sequence[int]) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 3 if len(values) == 1 else values
