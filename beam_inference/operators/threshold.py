"""The operator ``threshold``: what is at least a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from pydantic import FiniteFloat

from beam_inference.config.operators import Operator, Values


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

    def bytes_per_voxel(self, channels: int) -> int:
        """Bytes of the result, and of the comparison, as bools."""
        return 4 * channels + channels

    def make_function(self) -> Callable[[Values], Values]:
        """Return a comparison in float32."""
        at = np.float32(self.at)
        return lambda values: (values >= at).astype(np.float32)
