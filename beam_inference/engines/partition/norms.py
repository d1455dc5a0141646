"""Normalisations of divided arrays: statistics are of all voxels of the mesh."""

from __future__ import annotations

from torch import Tensor

from beam_inference.engines.joint_norms import Sets, measure_statistics, normalize_arrays
from beam_inference.engines.partition.part import Part
from beam_inference.residual_unet import update_running


def normalize_groups(
    part: Part, groups: int, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Part:
    """Group normalisation; with as many groups as channels, instance normalisation."""
    batch, channels = part.values.shape[:2]
    sets = Sets(channels // groups, part.mesh.add_up)
    flat = part.values.reshape(1, batch * channels, *part.values.shape[2:])
    statistics = measure_statistics([flat], sets)
    scale = None if weight is None else weight.repeat(batch)
    shift = None if bias is None else bias.repeat(batch)
    [normal] = normalize_arrays([flat], statistics, scale, shift, epsilon, sets)
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
    sets = Sets(1, part.mesh.add_up_batch)
    found = measure_statistics([part.values], sets)
    if running is not None:
        update_running(*running, found.mean, found.variance, found.count, momentum)
    [normal] = normalize_arrays([part.values], found, weight, bias, epsilon, sets)
    return part.with_values(normal)
