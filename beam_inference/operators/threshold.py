"""The operator ``threshold``: what is at least a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import FiniteFloat

from beam_inference.config.operators import Interval, Operator, Values


class Threshold(Operator):
    """1 where a value is at least ``at``, else 0."""

    operator: Literal["threshold"]
    at: FiniteFloat

    @property
    def gives_labels(self) -> bool:
        """True: 0 and 1."""
        return True

    def largest_label(self, channels: int) -> int:  # noqa: ARG002
        """One."""
        return 1

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:
        """From 0 to 1.

        Raises:
            ValueError: all values, or none, are at least ``at``.
        """
        if interval is not None and not interval[0] < self.at <= interval[1]:
            low, high = interval
            result = 1 if self.at <= low else 0
            raise ValueError(
                f"threshold at {self.at:g}, but the values there are from {low:g} to {high:g}: the "
                f"result would be {result} everywhere. Write a number above {low:g} and up to "
                f"{high:g}, in the unit of these values, not in that of the output's dtype"
            )
        return (0.0, float(self.largest_label(channels)))

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result, and of the comparison, as bools."""
        return 4 * channels + channels

    def make_function(self) -> Callable[[Values], Values]:
        """Return a comparison in float32."""
        at = np.float32(self.at)
        return lambda values: (values >= at).astype(np.float32)
