"""Networks whose output has several voxels for each voxel of their input."""

from __future__ import annotations

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
