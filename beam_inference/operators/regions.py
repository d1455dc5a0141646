"""The operator ``regions``: labels of regions that may lie within each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import Field, FiniteFloat

from beam_inference.config.fields import Natural
from beam_inference.config.operators import Interval, Operator, Values


class Regions(Operator):
    """For each channel in turn, its label where its value is above ``above``; 0 where none is.

    Later channels overwrite earlier ones: a tumour's core is the last of tumour, core. nnU-Net
    writes regions in this way, as ``regions_class_order``, of probabilities above 0.5.
    """

    operator: Literal["regions"]
    labels: list[Natural] = Field(min_length=1, description="one for each channel")
    above: FiniteFloat

    @property
    def gives_labels(self) -> bool:
        """True."""
        return True

    def channels_after(self, channels: int) -> int:
        """One channel.

        Raises:
            ValueError: there is not one label for each.
        """
        if len(self.labels) != channels:
            raise ValueError(
                f"postprocess: regions lists {len(self.labels)} labels, but there are {channels} "
                "channels: write one label for each"
            )
        return 1

    def largest_label(self, channels: int) -> int:  # noqa: ARG002
        """The largest of the list."""
        return max(self.labels)

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:
        """From 0 to the largest label.

        Raises:
            ValueError: all values, or none, are above ``above``.
        """
        if interval is not None and not interval[0] <= self.above < interval[1]:
            low, high = interval
            result = self.labels[-1] if self.above < low else 0
            raise ValueError(
                f"regions above {self.above:g}, but the values there are from {low:g} to {high:g}: "
                f"the result would be {result} everywhere. Write a number from {low:g} on and "
                f"below {high:g}, in the unit of these values, not in that of the output's dtype"
            )
        return (0.0, float(self.largest_label(channels)))

    def bytes_per_voxel(self, channels: int) -> int:  # noqa: ARG002
        """Bytes of the result, and of one channel's comparison, as bools."""
        return 4 + 1

    def make_function(self) -> Callable[[Values], Values]:
        """Return one comparison in float32 after the other."""
        above = np.float32(self.above)

        def label(values: Values) -> Values:
            result = np.zeros((1, *values.shape[1:]), np.float32)
            for number, channel in zip(self.labels, values, strict=True):
                result[0][channel > above] = number
            return result

        return label
