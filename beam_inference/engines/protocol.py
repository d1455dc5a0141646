"""What every predictor can do, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Encoding(NamedTuple):
    """How float32 values are written.

    Attributes:
        dtype: the output's.
        value_range: (low, high), which maps onto an integer dtype's full range; values beyond are
            clipped, the rest rounded to the nearest integer, halves to even. None for float32,
            which is written as it is.
    """

    dtype: np.dtype[Any]
    value_range: tuple[float, float] | None = None


AS_COMPUTED = Encoding(np.dtype(np.float32))
"""Float32, as the network and the blending gave it."""


class Network(Protocol):
    """What patch inference needs of a network, wherever its arrays live ("device arrays")."""

    @property
    def on_host(self) -> bool:
        """Whether device arrays are in the machine's memory."""

    def session(self) -> AbstractContextManager[object]:
        """A context in which all the following are called (torch: inference mode)."""

    def upload(self, array: NDArray[Any]) -> Any:
        """A device array of the same shape, dtype and values."""

    def empty(self, shape: tuple[int, ...]) -> Any:
        """A float32 device array of any values: to be written before it is read."""

    def predict(self, batch: Any) -> Any:
        """Predict a batch (N, C_in, Z, Y, X) float32: a float32 device array (N, C_out, Z', Y', X').

        Z', Y', X' are the patch, or the patch grown by the crop margin. The activation is applied.
        The next call may overwrite what this one returned.

        Raises:
            DeviceOutOfMemory: the batch is too large; a smaller one may do.
        """

    def make_room(self) -> bool:
        """Once a call has failed, give up what the device holds for later; whether that was an array."""

    def copy(self, array: Any) -> Any:
        """A device array of its own, with the same values."""

    def multiply(self, array: Any, by: Any, out: Any) -> None:
        """Write the product of two device arrays into a third."""

    def download(self, array: Any, encoding: Encoding = AS_COMPUTED) -> Callable[[], NDArray[Any]]:
        """Encode a float32 device array there, and begin to bring it to the host; a call of what is returned waits.

        The device array may be overwritten by this; and after it by others, except on the host,
        where it may be what is returned. On another device the next call may overwrite what this
        one's returned.
        """


class Predictor(Network, Protocol):
    """A loaded network on its device."""

    def begin_upload(self, array: NDArray[Any]) -> Callable[[], Any]:
        """Begin to bring an array to the device, beside what is computed there; a call of what is returned gives it.

        Any thread may begin, those that compute are to call. One is on its way at a time; others
        come when called for.
        """

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """A device array reversed along some axes."""

    def describe(self) -> dict[str, str]:
        """What of the engine determines the output's bits: engine, engine_version, device, precision, threads."""
