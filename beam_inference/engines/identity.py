"""The network that returns its input: for trying a job's geometry, and for copying a volume through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.operators.quantize import quantize


class IdentityPredictor:
    """Returns each batch unchanged (after the activation), with NumPy on the host."""

    def __init__(self, activation: str = "none") -> None:
        self._activation = activation

    @property
    def on_host(self) -> bool:
        """Always."""
        return True

    def session(self) -> nullcontext[None]:
        """Nothing to enter."""
        return nullcontext()

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself."""
        return array

    def begin_upload(self, array: NDArray[Any]) -> Callable[[], NDArray[Any]]:
        """The array itself."""
        return lambda: array

    def make_room(self) -> bool:
        """There is nothing to give up."""
        return False

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A float32 array of any values."""
        return arrays.empty(shape, np.float32)

    def predict(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        """The batch (N, C, Z, Y, X) itself, or its sigmoid."""
        if self._activation == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-batch)), np.float32)
        return batch

    def copy(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """An array of its own, with the same values."""
        return array.copy()

    def flip(self, array: NDArray[np.float32], axes: Sequence[int]) -> NDArray[np.float32]:
        """The array, reversed along some axes."""
        return np.flip(array, tuple(axes))

    def multiply(
        self, array: NDArray[np.float32], by: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        """Write the product of two arrays into a third."""
        np.multiply(array, by, out=out)

    def download(
        self, array: NDArray[np.float32], encoding: Encoding = AS_COMPUTED
    ) -> Callable[[], NDArray[Any]]:
        """The array, encoded; float32 ones as they are."""
        encoded = quantize(array, encoding.dtype, encoding.value_range)
        return lambda: encoded

    def describe(self) -> dict[str, str]:
        """Engine "identity", which has no version."""
        return {
            "engine": "identity",
            "engine_version": "1",
            "device": "cpu",
            "precision": "float32",
        }
