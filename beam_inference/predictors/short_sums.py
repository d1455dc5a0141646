"""Normalisations of a network that leaves PyTorch for other engines, which add up all voxels one after the other.

In float32 that loses digits, the more the larger the patch and the further its mean from zero. Here a sum is taken over
one axis after the other, and a variance is that of what the mean leaves. Batches are (N, C, *axes), all else that
normalisations are given is of shape (C,).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram


def by_short_sums(graph: ExportedProgram) -> ExportedProgram:
    """A network with these normalisations in the stead of PyTorch's; one that has none stays as it is."""
    table = {torch.ops.aten.instance_norm.default: instance_norm, torch.ops.aten.group_norm.default: group_norm}
    return graph.run_decompositions(table) if any(node.target in table for node in graph.graph.nodes) else graph


def instance_norm(
    batch: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    of_batch: bool,
    momentum: float,
    epsilon: float,
    _: bool,
) -> Tensor:
    """What ``torch.instance_norm`` computes, with its arguments.

    Ulyanov et al., arXiv:1607.08022. ``of_batch``: by mean and variance of each patch's channel, not by those given.
    """
    if not of_batch:
        return torch.batch_norm(batch, weight, bias, mean, variance, False, momentum, epsilon, False)
    difference, scale = _parts(batch, epsilon)
    per_channel = (-1, *[1] * (batch.ndim - 2))
    normal = difference * (scale if weight is None else scale * weight.reshape(per_channel))  # once over the array
    return (normal if bias is None else normal + bias.reshape(per_channel)).to(batch.dtype)


def group_norm(
    batch: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    _: bool = True,
) -> Tensor:
    """What ``torch.group_norm`` computes, with its arguments: groups of channels are normalised as one.

    Wu and He, arXiv:1803.08494.
    """
    difference, scale = _parts(batch.reshape(batch.shape[0], groups, -1, *batch.shape[2:]), epsilon)
    normal, per_channel = (difference * scale).reshape(batch.shape), (-1, *[1] * (batch.ndim - 2))
    normal = normal if weight is None else normal * weight.reshape(per_channel)
    return (normal if bias is None else normal + bias.reshape(per_channel)).to(batch.dtype)


def _parts(array: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The array, in float32 at least, minus its mean over all axes but two; and 1 / √(σ² + ε)."""
    array = array.float() if array.dtype in (torch.float16, torch.bfloat16) else array
    difference = array - _mean(array, 2)
    # Engines sum squares up as they compute them, for a norm: one pass over the array, where a product would be two.
    squares = torch.linalg.vector_norm(difference, dim=2, keepdim=True).square() / array.shape[2]
    return difference, (_mean(squares, 3) + epsilon).rsqrt()


def _mean(array: Tensor, first: int) -> Tensor:
    """Over the axes from ``first`` on, one after the other.

    Means and sums take turns, or OpenVINO would make one long sum of them.
    """
    for axis in range(first, array.ndim):
        n = array.shape[axis]
        array = array.sum(axis, keepdim=True) / n if axis % 2 else array.mean(axis, keepdim=True)
    return array
