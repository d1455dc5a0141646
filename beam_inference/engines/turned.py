"""Networks that take the axes in another order than jobs have them."""

from __future__ import annotations

from typing import Any

from beam_inference.engines.protocol import Device, Forward


def turn_axes(forward: Forward, device: Device) -> Forward:
    """A forward pass of arrays Z, Y, X, by one of arrays X, Y, Z.

    Args:
        forward: the network's own forward pass, of batches (N, C, X, Y, Z).
        device: where its arrays are.
    """

    def turned_forward(batch: Any) -> Any:
        return device.copy(forward(device.copy(batch.swapaxes(2, 4))).swapaxes(2, 4))

    return turned_forward
