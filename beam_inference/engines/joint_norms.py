"""Normalisation of values that lie in several arrays, and in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from beam_inference.residual_unet import channel_axes


@dataclass(frozen=True)
class Sets:
    """The sets of values of arrays (N, C, …) that have a mean and a variance each.

    Attributes:
        channels: of a set, which lie one after the other; a set is of all samples of all arrays.
        add_up: adds, in place, over the processes that hold a set's values.
        counts: whether the values of this process count. What does not count is normalised by the
            statistics of others.
    """

    channels: int
    add_up: Callable[[Tensor], Tensor]
    counts: bool = True

    def add(self, sums: Tensor) -> Tensor:
        """The sums over sets, each repeated for its channels, of sums over channels (…, C)."""
        sets = sums.double().reshape(*sums.shape[:-1], -1, self.channels).sum(-1)
        return self.add_up(sets).repeat_interleave(self.channels, -1)


@dataclass(frozen=True)
class Statistics:
    """Holds what was measured of each channel's set, (C,).

    Attributes:
        mean: of its values.
        variance: likewise, biased.
        count: how many values these are of, float64.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor


@torch.no_grad()
def measure_statistics(arrays: Sequence[Tensor], sets: Sets) -> Statistics:
    """Measure mean and variance of each set; all processes that hold its values must call it.

    Sums are exact enough in float32, for they are of differences from each array's own mean.

    Args:
        arrays: (N, C, …) each; they may be without values where another process has some.
        sets: of values.
    """
    wide = torch.promote_types(arrays[0].dtype, torch.float32)
    channels = arrays[0].shape[1]
    sums = arrays[0].new_zeros((3, channels), dtype=torch.float64)
    for array in arrays:
        own = array.numel() // channels
        if own:
            spread, means = torch.var_mean(array.to(wide), channel_axes(array)[0], correction=0)
            means = means.double()
            moments = [torch.ones_like(means), means, spread.double() + means.square()]
            sums += own * torch.stack(moments)
    count, first, second = sets.add(sums * sets.counts)
    mean = first / count
    variance = (second / count - mean.square()).clamp_min(0)
    return Statistics(mean.to(wide), variance.to(wide), count)


def normalize_arrays(
    arrays: Sequence[Tensor],
    statistics: Statistics,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    sets: Sets,
) -> list[Tensor]:
    """Compute (values - mean) / sqrt(variance + epsilon) * weight + bias of each channel.

    Gradients pass through the statistics, too, so all processes must take part in them.

    Args:
        arrays: (N, C, …) each.
        statistics: of these arrays.
        weight: (C,), 1 if None.
        bias: (C,), 0 if None.
        epsilon: added to variances.
        sets: that the statistics are of.
    """
    results = _Normalize.apply(statistics, weight, bias, epsilon, sets, *arrays)  # type: ignore[no-untyped-call]
    return list(results)


class _Normalize(torch.autograd.Function):
    """Normalises by PyTorch's own kernel, and keeps the values alone, as PyTorch does."""

    @staticmethod
    def forward(
        ctx: Any,
        statistics: Statistics,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        sets: Sets,
        *arrays: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.epsilon = epsilon
        ctx.sets = sets
        mean = statistics.mean
        variance = statistics.variance
        ctx.save_for_backward(mean, variance, statistics.count, weight, bias, *arrays)
        return tuple(
            functional.batch_norm(each, mean, variance, weight, bias, False, 0.0, epsilon)
            if each.numel()
            else each.clone()
            for each in arrays
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        mean, variance, count, weight, bias, *arrays = ctx.saved_tensors
        inverse = (variance + ctx.epsilon).rsqrt()
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        sums = torch.zeros_like(mean)
        products = torch.zeros_like(mean)
        for array, gradient in zip(arrays, gradients, strict=True):
            axes, _ = channel_axes(array)
            normal = _shift_and_scale(array, mean, inverse)
            sums += gradient.sum(axes, dtype=mean.dtype)
            products += (gradient * normal).sum(axes)
        of_mean, of_variance = ctx.sets.add(torch.stack([sums, products]) * scale) / count
        if not ctx.sets.counts:  # these arrays have not changed the statistics
            of_mean = torch.zeros_like(of_mean)
            of_variance = torch.zeros_like(of_variance)
        results = []
        for array, gradient in zip(arrays, gradients, strict=True):
            _, shape = channel_axes(array)
            result = gradient * scale.view(shape)
            result -= of_mean.to(mean.dtype).view(shape)
            # Computed again: kept from above, it would be of all arrays at a time.
            normal = _shift_and_scale(array, mean, inverse)
            result -= normal.mul_(of_variance.to(mean.dtype).view(shape))
            result *= inverse.view(shape)
            results.append(result.to(array.dtype))
        of_weight = None if weight is None else products.to(weight.dtype)
        of_bias = None if bias is None else sums.to(bias.dtype)
        return None, of_weight, of_bias, None, None, *results


def _shift_and_scale(array: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """(array - mean) * inverse, of channels, in the precision of the statistics."""
    _, shape = channel_axes(array)
    return (array - mean.view(shape)).mul_(inverse.view(shape))
