"""The operator ``affine``: another unit, or another sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from beam_inference.config.fields import Numbers, has_zero
from beam_inference.config.operators import Interval, Operator, Values


class Affine(Operator):
    """``scale · value + offset``."""

    operator: Literal["affine"]
    scale: Numbers = Field(1.0, description="factor, or a list with one for each channel")
    offset: Numbers = Field(0.0, description="what is added then, or a list with one per channel")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if has_zero(self.scale):
            raise ValueError("scale must not be 0: one value would be written everywhere")
        return self

    def channels_after(self, channels: int) -> int:
        """As many.

        Raises:
            ValueError: it lists numbers for more or fewer channels.
        """
        for name, numbers in (("scale", self.scale), ("offset", self.offset)):
            if isinstance(numbers, list) and len(numbers) != channels:
                raise ValueError(
                    f"postprocess: affine has a list {name} of {len(numbers)} numbers, but there "
                    f"are {channels} channels: write one number for each, or one for all"
                )
        return channels

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:
        """What becomes of the interval, over all channels."""
        if interval is None:
            return None
        ends = np.outer(interval, self._of_channels(self.scale, channels))
        ends += self._of_channels(self.offset, channels)
        return (float(ends.min()), float(ends.max()))

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result."""
        return 4 * channels

    def make_function(self) -> Callable[[Values], Values]:
        """Return a product and a sum, each rounded to float32."""

        def change(values: Values) -> Values:
            channels = len(values)
            changed = values * _as_columns(self._of_channels(self.scale, channels))
            changed += _as_columns(self._of_channels(self.offset, channels))
            return changed

        return change

    @staticmethod
    def _of_channels(numbers: float | list[float], channels: int) -> NDArray[np.float64]:
        return np.broadcast_to(np.asarray(numbers, np.float64), (channels,))


def _as_columns(numbers: NDArray[np.float64]) -> Values:
    """Numbers of channels, for arrays (C, Z, Y, X): the largest of float32 for larger ones."""
    ends = np.finfo(np.float32)
    return np.clip(numbers, ends.min, ends.max).astype(np.float32).reshape(-1, 1, 1, 1)
