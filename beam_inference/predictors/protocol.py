"""What every predictor can do, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from beam_inference.chunk_inference import Network


class Predictor(Network, Protocol):
    """A loaded network on its device."""

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """A device array reversed along some axes."""

    def describe(self) -> dict[str, str]:
        """What of the engine determines the output's bits: engine, engine_version, device, precision, threads."""
