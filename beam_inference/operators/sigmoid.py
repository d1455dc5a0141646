"""The operator ``sigmoid``: each channel from logits to probabilities, after blending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from beam_inference.config.operators import Interval, Operator, Values


class Sigmoid(Operator):
    """1 / (1 + exp(-value)), voxel by voxel.

    ``model.activation: sigmoid`` does the same before patches are blended.
    """

    operator: Literal["sigmoid"]

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:  # noqa: ARG002
        """From 0 to 1, or what the function makes of the ends of a known interval."""
        if interval is None:
            return (0.0, 1.0)
        from scipy.special import expit

        low, high = interval
        return (float(expit(low)), float(expit(high)))

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result."""
        return 4 * channels

    def make_function(self) -> Callable[[Values], Values]:
        """Return SciPy's function, in float32."""
        from scipy.special import expit

        def sigmoid(values: Values) -> Values:
            probabilities: Values = expit(values)
            return probabilities

        return sigmoid
