"""What every predictor can do, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from beam_inference.chunk_inference import Network


class Predictor(Network, Protocol):
    """A loaded network on its device."""

    def begin_upload(self, array: NDArray[Any]) -> Callable[[], Any]:
        """Begin to bring an array to the device, beside what is computed there; a call of what is returned gives it.

        Any thread may begin, those that compute are to call. One is on its way at a time; others come when called for.
        """

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """A device array reversed along some axes."""

    def describe(self) -> dict[str, str]:
        """What of the engine determines the output's bits: engine, engine_version, device, precision, threads."""
