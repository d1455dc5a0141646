"""The operator ``select``: some of the channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from beam_inference.config.fields import Natural
from beam_inference.config.operators import Interval, Operator, Values


class Select(Operator):
    """Some of the channels, in the order given."""

    operator: Literal["select"]
    channels: list[Natural] = Field(min_length=1)

    @property
    def keeps_labels(self) -> bool:
        """Always."""
        return True

    def channels_after(self, channels: int) -> int:
        """Number of the selected channels.

        Raises:
            ValueError: one of them is not there.
        """
        if max(self.channels) >= channels:
            raise ValueError(
                f"postprocess: select {self.channels}, but there are the channels 0 … "
                f"{channels - 1}"
            )
        return len(self.channels)

    def interval_after(self, interval: Interval | None, channels: int) -> Interval | None:  # noqa: ARG002
        """Unchanged."""
        return interval

    def bytes_per_voxel(self, channels: int) -> int:  # noqa: ARG002
        """Bytes of the result."""
        return 4 * len(self.channels)

    def make_function(self) -> Callable[[Values], Values]:
        """Indexing by a list, which copies."""
        return lambda values: values[self.channels]
