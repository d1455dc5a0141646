"""The operator ``softmax``: from logits to probabilities of classes, after blending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from beam_inference.config.operators import Interval, Operator, Values


class Softmax(Operator):
    """The share of each channel's exponential in the sum over channels, voxel by voxel.

    ``model.activation: softmax`` does the same before patches are blended.
    """

    operator: Literal["softmax"]

    def channels_after(self, channels: int) -> int:
        """As many.

        Raises:
            ValueError: there is only one, which would become 1 everywhere.
        """
        if channels == 1:
            raise ValueError(
                "postprocess: softmax of one channel is 1 everywhere; sigmoid makes a probability "
                "of it"
            )
        return channels

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:  # noqa: ARG002
        """From 0 to 1."""
        return (0.0, 1.0)

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result, and of the largest values, whose memory then takes the sums."""
        return 4 * channels + 4

    def make_function(self) -> Callable[[Values], Values]:
        """Return a softmax in float32, in which exponentials do not overflow."""

        def softmax(values: Values) -> Values:
            scratch = values.max(axis=0)
            shares: Values = values - scratch
            np.exp(shares, out=shares)
            # Channel by channel: how NumPy groups the terms of a sum depends on the array's shape.
            np.copyto(scratch, shares[0])
            for share in shares[1:]:
                scratch += share
            shares /= scratch
            return shares

        return softmax
