"""Instance normalisation for OpenVINO, which adds up all voxels of a channel one after the other.

In float32 that loses digits, the more the larger the patch and the further its mean from zero. Here sums are taken
over one axis after the other, and the variance is that of what the mean leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import ExportedProgram


def by_short_sums(graph: ExportedProgram) -> ExportedProgram:
    """A network with :func:`instance_norm` in the stead of PyTorch's; one that has none stays as it is."""
    operator = torch.ops.aten.instance_norm.default
    if any(node.target == operator for node in graph.graph.nodes):
        graph = graph.run_decompositions({operator: instance_norm})
    return graph


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

    ``batch`` is (N, C, *axes), all else of shape (C,). ``of_batch``: by the mean and variance of each patch's channel
    (Ulyanov et al., arXiv:1607.08022), not by those given.
    """
    if not of_batch:
        return torch.batch_norm(batch, weight, bias, mean, variance, False, momentum, epsilon, False)
    difference = batch - _mean(batch, 2)
    squares = torch.linalg.vector_norm(difference, dim=2, keepdim=True).square() / batch.shape[2]
    scale = (_mean(squares, 3) + epsilon).rsqrt()
    per_channel = (-1, *[1] * (batch.ndim - 2))
    scale = scale if weight is None else scale * weight.reshape(per_channel)
    normal = difference * scale
    return (normal if bias is None else normal + bias.reshape(per_channel)).to(batch.dtype)


def _mean(array: Tensor, first: int) -> Tensor:
    """Over the axes from ``first`` on.

    Means and sums take turns, or OpenVINO would make one long sum of them.
    """
    for axis in range(first, array.ndim):
        n = array.shape[axis]
        array = array.sum(axis, keepdim=True) / n if axis % 2 else array.mean(axis, keepdim=True)
    return array
