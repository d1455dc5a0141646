"""The operator ``smooth``: a Gaussian."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from pydantic import Field, NonNegativeFloat

from beam_inference.config.operators import Interval, Operator, Values
from beam_inference.geometry.zyx import Zyx

_RADIUS = 4
"""Standard deviations beyond which a Gaussian is cut off."""


class Smooth(Operator):
    """Each channel smoothed by a Gaussian; at the domain's ends the last voxel is repeated."""

    operator: Literal["smooth"]
    sigma: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = Field(
        description="standard deviation, ZYX, voxels"
    )

    @property
    def halo_zyx(self) -> Zyx:
        """Radius of the Gaussian, in voxels, ZYX."""
        z, y, x = (math.ceil(_RADIUS * sigma) for sigma in self.sigma)
        return (z, y, x)

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:  # noqa: ARG002
        """Unchanged."""
        return interval

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result."""
        return 4 * channels

    def make_function(self) -> Callable[[Values], Values]:
        """Return SciPy's Gaussian filter, cut off at the halo."""
        from scipy import ndimage

        sigma = (0.0, *self.sigma)
        radius = [0, *self.halo_zyx]

        def smooth(values: Values) -> Values:
            smoothed: Values = ndimage.gaussian_filter(values, sigma, mode="nearest", radius=radius)
            return smoothed

        return smooth
