"""Normalisations of divided arrays: statistics are of all voxels of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from beam_inference.engines.partition.part import Part

_NOT_CHANNELS = (0, 2, 3, 4)


def normalize_groups(
    part: Part, groups: int, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Part:
    """Group normalisation; with as many groups as channels, instance normalisation."""
    batch, channels = part.values.shape[:2]
    each = channels // groups
    sets = _Sets(each, math.prod(part.division.shape) * each, part.mesh.add_up)
    flat = part.values.reshape(1, batch * channels, *part.values.shape[2:])
    mean, variance = _statistics(flat, sets)
    scale = None if weight is None else weight.repeat(batch)
    shift = None if bias is None else bias.repeat(batch)
    normal = _normalize(flat, mean, variance, scale, shift, epsilon, sets)
    return part.with_values(normal.reshape(part.values.shape))


def normalize_batch(
    part: Part,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    epsilon: float,
) -> Part:
    """Batch normalisation by the batch's own statistics, which update the running ones, if any.

    The batch is that of all meshes that train together.
    """
    count = math.prod(part.division.shape) * part.values.shape[0] * part.mesh.meshes
    sets = _Sets(1, count, part.mesh.add_up_batch)
    mean, variance = _statistics(part.values, sets)
    if running is not None:
        with torch.no_grad():
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            unbiased = variance * (count / max(count - 1, 1))
            running[1].lerp_(unbiased.to(running[1].dtype), momentum)
    normal = _normalize(part.values, mean, variance, weight, bias, epsilon, sets)
    return part.with_values(normal)


@dataclass(frozen=True)
class _Sets:
    """The sets of values of an array (N, C, Z, Y, X) that have a mean and a variance each.

    Attributes:
        channels: of a set, which lie one after the other; a set is of all N samples.
        count: values of a set, of all members.
        add_up: adds over the members that hold a set's values.
    """

    channels: int
    count: int
    add_up: Callable[[Tensor], Tensor]

    def average(self, sums: Tensor) -> Tensor:
        """The mean of each channel's set.

        Args:
            sums: (…, C), of what this member holds of each channel; they are added in float64.
        """
        sets = sums.double().reshape(*sums.shape[:-1], -1, self.channels).sum(-1)
        return self.add_up(sets).repeat_interleave(self.channels, -1) / self.count


@torch.no_grad()
def _statistics(values: Tensor, sets: _Sets) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel's set, (C,).

    Each member's sums are exact enough in float32, for they are of differences from its own mean.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    own = values.numel() // values.shape[1]
    if own:
        variances, means = torch.var_mean(values.to(wide), _NOT_CHANNELS, correction=0)
        variances, means = variances.double(), means.double()
    else:
        means = values.new_zeros(values.shape[1], dtype=torch.float64)
        variances = means
    mean, square = sets.average(own * torch.stack([means, variances + means.square()]))
    variance = (square - mean.square()).clamp_min(0)
    return mean.to(wide), variance.to(wide)


def _normalize(
    values: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    sets: _Sets,
) -> Tensor:
    """(values - mean) / sqrt(variance + epsilon) * weight + bias, all of channels."""
    normal: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
        values, mean, variance, weight, bias, epsilon, sets
    )
    return normal


class _Normalize(torch.autograd.Function):
    """Normalises by PyTorch's own kernel, and keeps the values alone, as PyTorch does.

    Mean and variance are of the voxels of all members, and so are the gradients that pass through
    them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        sets: _Sets,
    ) -> Tensor:
        ctx.epsilon = epsilon
        ctx.sets = sets
        ctx.save_for_backward(values, mean, variance, weight, bias)
        if values.numel() == 0:
            return values.clone()
        return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, mean, variance, weight, bias = ctx.saved_tensors
        gradient = gradients[0].to(mean.dtype)
        inverse = (variance + ctx.epsilon).rsqrt()
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        normal = (values - _of_channels(mean)) * _of_channels(inverse)
        sums = gradient.sum(_NOT_CHANNELS)
        products = (gradient * normal).sum(_NOT_CHANNELS)
        of_mean, of_variance = ctx.sets.average(torch.stack([sums, products]) * scale)
        result = gradient * _of_channels(scale)
        result -= _of_channels(of_mean.to(mean.dtype))
        result -= normal.mul_(_of_channels(of_variance.to(mean.dtype)))
        result *= _of_channels(inverse)
        of_weight = None if weight is None else products.to(weight.dtype)
        of_bias = None if bias is None else sums.to(bias.dtype)
        return result.to(values.dtype), None, None, of_weight, of_bias, None, None


def _of_channels(each: Tensor) -> Tensor:
    """Values of channels (C,) beside an array (N, C, Z, Y, X)."""
    return each[:, None, None, None]
