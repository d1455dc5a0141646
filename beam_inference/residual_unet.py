"""The residual symmetric U-Net with which this kind of tool began, to train and to measure with.

Architecture: Lee, Zung, Li, Jain and Seung, "Superhuman Accuracy on the SNEMI3D Connectomics
    Challenge", 2017 (arXiv:1706.00120), in the form of Wu et al., "Chunkflow", Nature Methods 2021,
    Fig. 4: instance normalisation, 1×5×5 convolutions in and out, pooling and resize-convolutions
    in the plane of the sections only. This is an independent implementation, and no published
    weights load into it.

A job names a factory without arguments, in a file of one's own, and as ``model.weights`` what
training has saved::

    from beam_inference.residual_unet import ResidualUNet

    def network():
        return ResidualUNet(output_channels=3)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

Normalization = Literal["instance", "batch"]
"""What follows a convolution."""


class ResidualUNet(nn.Module):
    """Maps (N, input_channels, Z, Y, X) to (N, output_channels, Z, Y, X), logits, float32.

    Z, Y and X must be multiples of the product of ``pooling`` along their axis, taken once per
    level below the first: with the defaults any Z, and Y and X multiples of 8. Instance
    normalisation takes its statistics from the whole patch, so a network must be run with the patch
    shape it was trained with.

    Args:
        input_channels: Channels of the volume that is read.
        output_channels: Channels of the result.
        widths: Feature maps of each level, the finest first.
        pooling: Factors by which each level is coarser than the one above it, ZYX.
        normalization: "instance" for instance normalisation and ReLU; "batch" for
            :class:`InPlaceBatchNorm`, which takes half of the memory in training.
    """

    def __init__(
        self,
        input_channels: int = 1,
        output_channels: int = 1,
        widths: Sequence[int] = (16, 32, 64, 80),
        pooling: tuple[int, int, int] = (1, 2, 2),
        normalization: Normalization = "instance",
    ) -> None:
        super().__init__()
        self.enter = _convolution(input_channels, widths[0], (1, 5, 5), normalization)
        self.down = nn.ModuleList(
            _Level(a, b, normalization) for a, b in zip([widths[0], *widths], widths, strict=False)
        )
        self.pool = nn.MaxPool3d(pooling)
        self.resize = nn.ModuleList(_Resize(b, a, pooling) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_Level(a, a, normalization) for a in widths[:-1])
        self.leave = nn.Conv3d(widths[0], output_channels, (1, 5, 5), padding=(0, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits of a batch."""
        x = self.down[0](self.enter(x))
        skipped = []
        for level in self.down[1:]:
            skipped.append(x)
            x = level(self.pool(x))
        for resize, level, skip in reversed(list(zip(self.resize, self.up, skipped, strict=True))):
            x = level(resize(x) + skip)
        logits: Tensor = self.leave(x)
        return logits


class InPlaceBatchNorm(nn.Module):
    """Batch normalisation and leaky ReLU in one, whose backward pass works from the output.

    Rota Bulò, Porzi and Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training
    of DNNs", CVPR 2018; an independent implementation. In training the input is overwritten, so
    nothing else may need its values; the output, which the next convolution keeps anyway, is all
    that is kept. Weights act by their absolute value, so that the layer can be inverted.

    Where processes train together, statistics are of the voxels of all of them, each voxel
    counting alike, also where processes have unequal shares; on gloo, too.

    Args:
        channels: Channels of the input (N, channels, …).
        slope: Of the leaky ReLU below zero; above 0.
        epsilon: Added to variances and to absolute weights.
        momentum: Share of a batch's statistics in the running ones.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, channels: int, slope: float = 0.01, epsilon: float = 1e-5, momentum: float = 0.1
    ) -> None:
        super().__init__()
        self.slope = slope
        self.epsilon = epsilon
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate; in training in place of the input."""
        scale = self.weight.abs() + self.epsilon
        if not self.training:
            normal = functional.batch_norm(
                x, self.running_mean, self.running_var, scale, self.bias, eps=self.epsilon
            )
            return functional.leaky_relu(normal, self.slope)
        y, mean, variance, count = normalize_in_place(x, scale, self.bias, self.slope, self.epsilon)
        update_running(self.running_mean, self.running_var, mean, variance, count, self.momentum)
        return y


@torch.no_grad()
def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    count: Tensor,
    momentum: float,
) -> None:
    """Move running statistics towards those of a batch, as batch normalisation does.

    Args:
        running_mean: (C,), changed in place.
        running_var: (C,), of unbiased variances; changed in place.
        mean: of the batch, (C,).
        variance: of the batch, (C,), biased.
        count: values of each channel in the batch.
        momentum: share of the batch.
    """
    unbiased = variance * (count / (count - 1).clamp_min(1))
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)


def normalize_in_place(
    x: Tensor, scale: Tensor, bias: Tensor, slope: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalise and activate a batch in place, by its own statistics.

    Args:
        x: (N, C, …), which is overwritten.
        scale: (C,), above 0.
        bias: (C,).
        slope: of the leaky ReLU below zero.
        epsilon: added to variances.

    Returns:
        The result, and of all processes that train together mean and variance of each channel, and
        how many voxels these are of.
    """
    if has_torch_function_unary(x):  # subclasses of tensors are asked, as about PyTorch's functions
        answer: tuple[Tensor, Tensor, Tensor, Tensor]
        answer = handle_torch_function(normalize_in_place, (x,), x, scale, bias, slope, epsilon)
        return answer
    result = normalize_arrays_in_place([x], scale, bias, slope, epsilon)
    return result.arrays[0], result.mean, result.variance, result.count


@dataclass(frozen=True)
class NormalizedArrays:
    """What :func:`normalize_arrays_in_place` gives.

    Attributes:
        arrays: normalised and activated.
        mean: of each channel, over all arrays of all processes that train together.
        variance: likewise, biased.
        count: how many voxels these are of.
    """

    arrays: Sequence[Tensor]
    mean: Tensor
    variance: Tensor
    count: Tensor


def normalize_arrays_in_place(
    arrays: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor,
    slope: float,
    epsilon: float,
    counts: bool = True,
) -> NormalizedArrays:
    """Normalise and activate arrays in place, as :func:`normalize_in_place` does one batch.

    Args:
        arrays: (N, C, …) each, which are overwritten.
        scale: (C,), above 0.
        bias: (C,).
        slope: of the leaky ReLU below zero.
        epsilon: added to variances.
        counts: whether these arrays count in the statistics; another process' must, if not.
    """
    results = _InPlaceFunction.apply(scale, bias, slope, epsilon, counts, *arrays)  # type: ignore[no-untyped-call]
    *normal, mean, variance, count = results
    return NormalizedArrays(normal, mean, variance, count)


def _add_up(values: Tensor) -> Tensor:
    """The sum over the processes that train together, in place."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(values)
    return values


class _InPlaceFunction(torch.autograd.Function):
    """The training pass of :class:`InPlaceBatchNorm`, and its backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        scale: Tensor,
        bias: Tensor,
        slope: float,
        epsilon: float,
        counts: bool,
        *arrays: Tensor,
    ) -> tuple[Tensor, ...]:
        axes, shape = channel_axes(arrays[0])
        dtype = arrays[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        share = scale.new_tensor([float(sum(x.numel() // x.shape[1] for x in arrays))], dtype=wide)
        sums = torch.stack([x.sum(axes, dtype=wide) for x in arrays]).sum(0)
        sums = _add_up(torch.cat([sums, share]) * counts)
        count = sums[-1:]
        mean = sums[:-1] / count
        for x in arrays:
            x.sub_(mean.to(dtype).view(shape))
        norms = [torch.linalg.vector_norm(x, dim=axes, dtype=wide) for x in arrays]
        variance = _add_up(torch.stack(norms).square().sum(0) * counts) / count
        inverse = (variance + epsilon).rsqrt()
        for x in arrays:
            x.mul_((scale * inverse).to(dtype).view(shape)).add_(bias.to(dtype).view(shape))
            functional.leaky_relu(x, slope, inplace=True)
        ctx.mark_dirty(*arrays)
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.save_for_backward(scale, bias, inverse, count, *arrays)
        ctx.slope = slope
        ctx.counts = counts
        return *arrays, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale, bias, inverse, count, *arrays = ctx.saved_tensors
        axes, shape = channel_axes(arrays[0])
        dtype = arrays[0].dtype
        of_bias = torch.zeros_like(inverse)
        of_scale = torch.zeros_like(inverse)
        pairs = []
        for y, above in zip(arrays, gradients, strict=False):
            is_low = y < 0
            gradient = torch.where(is_low, above * ctx.slope, above)
            normal = torch.where(is_low, y / ctx.slope, y)
            normal.sub_(bias.to(dtype).view(shape)).div_(scale.to(dtype).view(shape))
            of_bias += gradient.sum(axes, dtype=inverse.dtype)
            of_scale += (gradient * normal).sum(axes, dtype=inverse.dtype)
            pairs.append((gradient, normal))
        # Arrays that do not count have not changed the statistics.
        means = _add_up(torch.stack([of_bias, of_scale])) / count * ctx.counts
        for gradient, normal in pairs:
            gradient.sub_(means[0].to(dtype).view(shape))
            gradient.sub_(normal.mul_(means[1].to(dtype).view(shape)))
            gradient.mul_((scale * inverse).to(dtype).view(shape))
        return of_scale, of_bias, None, None, None, *(gradient for gradient, _ in pairs)


def channel_axes(x: Tensor) -> tuple[list[int], list[int]]:
    """The axes other than channels, and the shape of a value for each channel."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    return axes, [-1 if axis == 1 else 1 for axis in range(x.ndim)]


def _after(channels: int, normalization: Normalization) -> list[nn.Module]:
    """The normalisation and activation that follow a convolution."""
    if normalization == "batch":
        return [InPlaceBatchNorm(channels)]
    return [nn.InstanceNorm3d(channels, affine=True), nn.ReLU(inplace=True)]


def _convolution(
    inputs: int, outputs: int, shape: tuple[int, int, int], normalization: Normalization
) -> nn.Sequential:
    """Convolution without bias, which the normalisation would remove; normalisation; ReLU."""
    return nn.Sequential(
        nn.Conv3d(
            inputs,
            outputs,
            shape,
            padding=(shape[0] // 2, shape[1] // 2, shape[2] // 2),
            bias=False,
        ),
        *_after(outputs, normalization),
    )


class _Level(nn.Module):
    """A convolution, and two more around which its result is added: Lee et al. 2017, Fig. 2."""

    def __init__(self, inputs: int, outputs: int, normalization: Normalization) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, (3, 3, 3), normalization)
        self.second = _convolution(outputs, outputs, (3, 3, 3), normalization)
        self.third = nn.Conv3d(outputs, outputs, 3, padding=1, bias=False)
        self.leave = nn.Sequential(*_after(outputs, normalization))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        activated: Tensor = self.leave(self.third(self.second(x)) + x)
        return activated


class _Resize(nn.Sequential):
    """Interpolation, linear along each pooled axis, and a 1×1×1 convolution."""

    def __init__(self, inputs: int, outputs: int, pooling: tuple[int, int, int]) -> None:
        scale = tuple(float(n) for n in pooling)
        super().__init__(
            nn.Upsample(scale_factor=scale, mode="trilinear", align_corners=False),
            nn.Conv3d(inputs, outputs, 1, bias=False),
        )
