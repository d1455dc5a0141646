"""Normalisations of divided arrays: statistics are of all voxels of the mesh."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from beam_inference.engines.partition.mesh import add_up, needs_gradient
from beam_inference.engines.partition.part import Part


def normalize_groups(
    part: Part, groups: int, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Part:
    """Group normalisation; with as many groups as channels, instance normalisation."""
    batch, channels = part.values.shape[:2]
    grouped = part.values.reshape(batch * groups, channels // groups, -1)
    mean, variance = _statistics(grouped, (1, 2), _count(part, channels // groups), part)
    each = channels // groups
    means = mean.repeat_interleave(each)
    variances = variance.repeat_interleave(each)
    scale = None if weight is None else weight.repeat(batch)
    shift = None if bias is None else bias.repeat(batch)
    values = part.values.reshape(1, batch * channels, *part.values.shape[2:])
    normal = _apply(values, means, variances, scale, shift, epsilon)
    return part.with_values(normal.reshape(part.values.shape))


def normalize_batch(
    part: Part,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    epsilon: float,
) -> Part:
    """Batch normalisation by the batch's own statistics, which update the running ones, if any."""
    count = _count(part, part.values.shape[0])
    mean, variance = _statistics(part.values, (0, 2, 3, 4), count, part)
    if running is not None:
        with torch.no_grad():
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            running[1].lerp_(variance.to(running[1].dtype) * (count / (count - 1)), momentum)
    return part.with_values(_apply(part.values, mean, variance, weight, bias, epsilon))


def _count(part: Part, times: int) -> int:
    return math.prod(part.division.shape) * times


def _statistics(
    values: Tensor, axes: tuple[int, ...], count: int, part: Part
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over some axes and all members.

    Each member's sums are exact enough in float32, for they are of differences from its own mean;
    what the members add is float64.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    if needs_gradient(values):
        mean = add_up(values.sum(axes, dtype=wide), part.mesh) / count
        shape = [n if axis not in axes else 1 for axis, n in enumerate(values.shape)]
        squares = (values - mean.view(shape)).square().sum(axes)
        return mean, add_up(squares, part.mesh) / count
    own = values.numel() // max(1, _kept(values, axes))
    if own:
        variances, means = torch.var_mean(values.to(wide), axes, correction=0)
        means, variances = means.double(), variances.double()
    else:
        means = values.new_zeros([values.shape[a] for a in range(values.ndim) if a not in axes])
        means = means.double()
        variances = means
    sums = torch.stack([own * means, own * (variances + means.square())])
    total = add_up(sums, part.mesh) / count
    mean = total[0]
    variance = (total[1] - mean.square()).clamp_min(0)
    return mean.to(wide), variance.to(wide)


def _kept(values: Tensor, axes: tuple[int, ...]) -> int:
    return math.prod(n for axis, n in enumerate(values.shape) if axis not in axes)


def _apply(
    values: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
) -> Tensor:
    """(values - mean) / sqrt(variance + epsilon) * weight + bias, all of channels."""
    if not needs_gradient(values) and not needs_gradient(mean):
        if values.numel() == 0:
            return values.clone()
        return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, epsilon)
    shape = (1, -1, *[1] * (values.ndim - 2))
    scale = (variance + epsilon).rsqrt()
    scale = scale if weight is None else scale * weight
    normal = (values - mean.view(shape)) * scale.view(shape)
    return normal if bias is None else normal + bias.view(shape)
