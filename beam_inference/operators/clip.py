"""The operator ``clip``: limits of the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import numpy as np
from pydantic import Field, FiniteFloat, model_validator

from beam_inference.config.operators import Interval, Operator, Values


class Clip(Operator):
    """Values below ``low`` become ``low``, and those above ``high`` become ``high``."""

    operator: Literal["clip"]
    low: FiniteFloat | None = Field(None, description="the lowest value there may be; default none")
    high: FiniteFloat | None = Field(
        None, description="the highest value there may be; default none"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError("clip needs low, high, or both")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be less than high {self.high:g}")
        return self

    @property
    def keeps_labels(self) -> bool:
        """Only between whole numbers: others would become values in their place."""
        return all(limit is None or limit.is_integer() for limit in (self.low, self.high))

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:  # noqa: ARG002
        """The part of the interval between the limits.

        Raises:
            ValueError: all values become one of the limits.
        """
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        if interval is None:
            return (low, high) if np.isfinite(high - low) else None
        if interval[1] <= low or interval[0] >= high:
            raise ValueError(
                f"clip to {low:g} … {high:g}, but the values there are from {interval[0]:g} to "
                f"{interval[1]:g}: the result would be {low if interval[1] <= low else high:g} "
                "everywhere. Write limits in the unit of these values, not in that of the output's "
                "dtype"
            )
        return (max(low, interval[0]), min(high, interval[1]))

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result."""
        return 4 * channels

    def make_function(self) -> Callable[[Values], Values]:
        """Return NumPy's function, with limits in float32."""
        low = None if self.low is None else np.float32(self.low)
        high = None if self.high is None else np.float32(self.high)

        def clip(values: Values) -> Values:
            clipped: Values = np.clip(values, low, high)
            return clipped

        return clip
