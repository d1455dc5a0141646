"""Networks whose output has other voxels than their input."""

from __future__ import annotations

from itertools import product
from typing import Any

from beam_inference.engines.protocol import Device, Forward
from beam_inference.geometry.zyx import Zyx


def scale_output(forward: Forward, device: Device, scale: Zyx) -> Forward:
    """A forward pass that takes batches with the voxels of its answers.

    A job counts the voxels of its output alone, and reads each voxel of the network's input as many
    times as the output has voxels there. So every so many-th is what the network takes.

    Args:
        forward: the network's own forward pass.
        device: where its arrays are.
        scale: voxels of the output for each of the input, ZYX.
    """
    z, y, x = scale

    def scaled_forward(batch: Any) -> Any:
        return forward(device.copy(batch[:, :, ::z, ::y, ::x]))

    return scaled_forward


def repeat_output(forward: Forward, device: Device, scale: Zyx) -> Forward:
    """A forward pass whose answers have the voxels of its batches.

    A job counts the voxels of the network's input, where its output is coarser, and takes each
    value of the output for all voxels of the input in it.

    Args:
        forward: the network's own forward pass.
        device: where its arrays are.
        scale: voxels of the input for each of the output, ZYX.
    """

    def repeated_forward(batch: Any) -> Any:
        answer = forward(batch)
        count, channels, *shape = answer.shape
        lengths = (n * factor for n, factor in zip(shape, scale, strict=True))
        repeated = device.empty((count, channels, *lengths))
        for first in product(*map(range, scale)):
            z, y, x = (slice(n, None, factor) for n, factor in zip(first, scale, strict=True))
            repeated[:, :, z, y, x] = answer
        return repeated

    return repeated_forward
