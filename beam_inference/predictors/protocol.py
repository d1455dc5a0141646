"""What every predictor can do, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from beam_inference.chunk_inference import Network


class Predictor(Network, Protocol):
    """A loaded network on its device."""

    def begin_upload(self, array: NDArray[Any], most_bytes: int) -> Callable[[], Any]:
        """Begin to bring an array to the device, beside what is computed there; a call of what is returned gives it.

        Any thread may begin, those that compute are to call; the array is not to be changed. One is on its way at a
        time, and only where there is room. The largest there will be is of ``most_bytes``.
        """

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """A device array reversed along some axes."""

    def describe(self) -> dict[str, str]:
        """What of the engine determines the output's bits: engine, engine_version, device, precision, threads."""
