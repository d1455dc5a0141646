"""Forward passes on NumPy arrays: axes of 2-D networks, type of the answer, activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.heads import Head, channel_ranges
from beam_inference.engines.heads import pick_heads
from beam_inference.engines.planes import sections_as_channels
from beam_inference.errors import DeviceOutOfMemory, ModelContractError

Array = NDArray[np.float32]


def numpy_forward(
    network: Callable[[Array], Any],
    *,
    activation: str = "none",
    heads: Sequence[Head] = (),
    dims: int = 3,
) -> Callable[[Array], Array]:
    """The forward pass of a network on NumPy arrays.

    Args:
        network: maps a float32 array (N, C, Z, Y, X), or (N, C, Y, X) if ``dims`` is 2, to an array
            of as many axes, or to what NumPy can convert to one; with heads, to a tuple, list or
            dict of arrays.
        activation: "none", "sigmoid" or "softmax" (over channels), applied in float32.
        heads: the arrays that are joined as channels, each with an activation of its own.
        dims: 2 or 3. Of 2, the sections of a batch become channels: all of the first channel, then
            all of the second.

    Returns:
        A function of float32 arrays (N, C, Z, Y, X) to the same. It raises DeviceOutOfMemory where
        memory is short, ModelContractError where the network's answer is not real numbers.
    """

    def forward(batch: Array) -> Array:
        batch = sections_as_channels(batch) if dims == 2 else batch
        try:
            answer = network(np.ascontiguousarray(batch))
            result = np.concatenate(pick_heads(answer, heads), 1) if heads else np.asarray(answer)
        except MemoryError as error:
            raise DeviceOutOfMemory(str(error) or "out of memory") from error
        if result.dtype.kind not in "fiub":
            raise ModelContractError(
                f"the network returns an array of {result.dtype}; expected real numbers (batch, "
                "channels, z, y, x)"
            )
        if dims == 2 and result.ndim == 4:
            result = result[:, :, None]
        values = result.astype(np.float32, copy=False)
        if not heads:
            return activate(values, activation)
        for head, channels in zip(heads, channel_ranges(heads), strict=True):
            part = slice(channels.start, channels.stop)
            values[:, part] = activate(values[:, part], head.activation)
        return values

    return forward


def activate(values: Array, activation: str) -> Array:
    """Apply an activation to values (N, C, …): "none", "sigmoid" or "softmax" over channels."""
    if activation == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-values)), np.float32)
    if activation == "softmax":
        powers = np.exp(values - values.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)
    return values
