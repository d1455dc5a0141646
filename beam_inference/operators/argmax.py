"""The operator ``argmax``: the channel with the largest value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field, FiniteFloat

from beam_inference.config.operators import Interval, Operator, Values


class Argmax(Operator):
    """The number of the channel with the largest value, the first of equal ones.

    With ``background`` it is 0 where no channel reaches that value, and channels are counted from 1
    (a vote).
    """

    operator: Literal["argmax"]
    background: FiniteFloat | None = Field(
        None,
        description=(
            "the result is 0 where no channel's value is at least this, and channels count from 1"
        ),
    )

    @property
    def gives_labels(self) -> bool:
        """True: numbers of channels."""
        return True

    def channels_after(self, channels: int) -> int:
        """One channel.

        Raises:
            ValueError: there is nothing to choose from.
        """
        if channels == 1 and self.background is None:
            raise ValueError(
                "postprocess: argmax of one channel is 0 everywhere; threshold makes two classes "
                "of it"
            )
        return 1

    def largest_label(self, channels: int) -> int:
        """Number of the last channel."""
        return channels - 1 if self.background is None else channels

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:
        """From 0 to the number of the last channel.

        Raises:
            ValueError: no value reaches ``background``.
        """
        background = self.background
        if interval is not None and background is not None and background > interval[1]:
            low, high = interval
            raise ValueError(
                f"argmax with background {background:g}, but the values there are from {low:g} to "
                f"{high:g}: the result would be 0 everywhere. Write a number up to {high:g}, in "
                "the unit of these values, not in that of the output's dtype"
            )
        return (0.0, float(self.largest_label(channels)))

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result, NumPy's copy with the channels last, and the numbers as int64."""
        return 4 + 4 * channels + 8

    def make_function(self) -> Callable[[Values], Values]:
        """Return NumPy's argmax over channels."""
        background = self.background

        def vote(values: Values) -> Values:
            classes: Values = values.argmax(axis=0)[None].astype(np.float32)
            if background is not None:
                classes += 1
                classes[values.max(axis=0)[None] < np.float32(background)] = 0
            return classes

        return vote
