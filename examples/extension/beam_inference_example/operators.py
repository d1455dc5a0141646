"""An operator: the median of the voxels around each voxel."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field

from beam_inference.config.fields import Margin
from beam_inference.config.operators import Operator, Values
from beam_inference.geometry.zyx import Zyx


class Median(Operator):
    """Each channel's median over a box around the voxel; at the domain's ends the last is repeated.

    Attributes:
        radius: voxels that the box reaches beyond the voxel, per side, ZYX.
    """

    radius: Margin = Field(description="voxels around each voxel, per side, ZYX")

    @property
    def halo_zyx(self) -> Zyx:
        """Voxels around a chunk that must be computed for it."""
        return self.radius

    def make_function(self) -> Callable[[Values], Values]:
        """A function of values (C, Z, Y, X), float32. What is slow to import is imported here."""
        from scipy import ndimage

        size = [1, *(2 * radius + 1 for radius in self.radius)]

        def median(values: Values) -> Values:
            result: Values = ndimage.median_filter(values, size, mode="nearest")
            return result

        return median
