"""Normalisations for networks that other engines than PyTorch run.

These engines sum all voxels one after the other. In float32 that loses digits, the more the larger
the patch and the further its mean from zero. Here a sum is taken over one axis after the other, and
the variance is computed from the differences from the mean:

    μ = mean(x),  d = x - μ,  σ² = mean(d²),  result = d · weight / √(σ² + ε) + bias

Batches are (N, C, *axes); weight, bias and given statistics are (C,).
:mod:`beam_inference.engines.openvino_norms` does the same to networks in OpenVINO's form.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram


def replace_norms(graph: ExportedProgram) -> ExportedProgram:
    """Replace PyTorch's normalisations in a graph; a graph without any is returned as it is."""
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
    """Instance normalisation (Ulyanov et al., arXiv:1607.08022).

    The arguments are those of ``torch.instance_norm``. ``of_batch`` says that mean and variance are
    those of each patch's channel, not those given.
    """
    if not of_batch:
        return torch.batch_norm(
            batch, weight, bias, mean, variance, False, momentum, epsilon, False
        )
    return _normalize(batch, weight, bias, epsilon, batch.shape[1])


def group_norm(
    batch: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    _: bool = True,
) -> Tensor:
    """Group normalisation (Wu and He, arXiv:1803.08494); the arguments of ``torch.group_norm``."""
    return _normalize(batch, weight, bias, epsilon, groups)


def _normalize(
    batch: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, groups: int
) -> Tensor:
    """Normalise by the mean and variance of each group of channels, summed in float32 at least."""
    array = batch.float() if batch.dtype in (torch.float16, torch.bfloat16) else batch
    difference = array - _group_means(_mean(array, 2), groups)
    # For a norm, engines sum squares as they compute them: one pass over the array instead of two.
    squares = torch.linalg.vector_norm(difference, dim=2, keepdim=True).square() / array.shape[2]
    scale = (_group_means(_mean(squares, 3), groups) + epsilon).rsqrt()
    per_channel = (-1, *[1] * (batch.ndim - 2))
    # once over the array
    normal = difference * (scale if weight is None else scale * weight.reshape(per_channel))
    return (normal if bias is None else normal + bias.reshape(per_channel)).to(batch.dtype)


def _group_means(means: Tensor, groups: int) -> Tensor:
    """Replace the means of channels by the mean of their group; the shape stays."""
    count, channels = means.shape[:2]
    if groups == channels:
        return means
    grouped = means.reshape(count, groups, -1)
    return grouped.mean(2, keepdim=True).expand(grouped.shape).reshape(means.shape)


def _mean(array: Tensor, first: int) -> Tensor:
    """The mean over the axes from ``first`` on, one after the other.

    Means and sums take turns: OpenVINO would merge several of a kind into one long sum.
    """
    for axis in range(first, array.ndim):
        n = array.shape[axis]
        array = array.sum(axis, keepdim=True) / n if axis % 2 else array.mean(axis, keepdim=True)
    return array
