"""Normalisations of a network that leaves PyTorch for other engines, which add up all voxels one after the other.

In float32 that loses digits, the more the larger the patch and the further its mean from zero. Here
a sum is taken over one axis after the other, and a variance is that of what the mean leaves.
Batches are (N, C, *axes), all else that normalisations are given is of shape (C,).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram


def replace_norms(graph: ExportedProgram) -> ExportedProgram:
    """A network with these normalisations in the stead of PyTorch's; one that has none stays as it is."""
    table = {
        torch.ops.aten.instance_norm.default: instance_norm,
        torch.ops.aten.group_norm.default: group_norm,
    }
    return (
        graph.run_decompositions(table)
        if any(node.target in table for node in graph.graph.nodes)
        else graph
    )


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

    Ulyanov et al., arXiv:1607.08022. ``of_batch``: by mean and variance of each patch's channel,
    not by those given.
    """
    if not of_batch:
        return torch.batch_norm(
            batch, weight, bias, mean, variance, False, momentum, epsilon, False
        )
    return _normalised(batch, weight, bias, epsilon, batch.shape[1])


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
    return _normalised(batch, weight, bias, epsilon, groups)


def _normalised(
    batch: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, groups: int
) -> Tensor:
    """By the mean and variance of each group of channels; summed up in float32 at least."""
    array = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
    difference = array - _shared(_mean(array, 2), groups)
    # Engines sum squares up as they compute them, for a norm: one pass over the array, where a
    # product would be two.
    squares = torch.linalg.vector_norm(difference, dim=2, keepdim=True).square() / array.shape[2]
    scale = (_shared(_mean(squares, 3), groups) + epsilon).rsqrt()
    per_channel = (-1, *[1] * (batch.ndim - 2))
    # once over the array
    normal = difference * (scale if weight is None else scale * weight.reshape(per_channel))
    return (normal if bias is None else normal + bias.reshape(per_channel)).to(batch.dtype)


def _shared(means: Tensor, groups: int) -> Tensor:
    """Of the channels of a group, their mean: the array keeps its shape, as it is only these few that are regrouped."""
    count, channels = means.shape[:2]
    if groups == channels:
        return means
    grouped = means.reshape(count, groups, -1)
    return grouped.mean(2, keepdim=True).expand(grouped.shape).reshape(means.shape)


def _mean(array: Tensor, first: int) -> Tensor:
    """Over the axes from ``first`` on, one after the other.

    Means and sums take turns, or OpenVINO would make one long sum of them.
    """
    for axis in range(first, array.ndim):
        n = array.shape[axis]
        array = array.sum(axis, keepdim=True) / n if axis % 2 else array.mean(axis, keepdim=True)
    return array
