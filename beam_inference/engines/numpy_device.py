"""The host as a device, with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray
from beam_inference.engines.protocol import AS_COMPUTED, Encoding
from beam_inference.operators.quantize import quantize

Array = NDArray[np.float32]


class NumpyDevice:
    """NumPy arrays in the machine's memory; see :class:`beam_inference.engines.protocol.Device`."""

    on_host = True

    def session(self) -> nullcontext[None]:
        """A context that does nothing."""
        return nullcontext()

    def upload(self, array: AnyArray) -> AnyArray:
        """The array itself."""
        return array

    def begin_upload(self, array: AnyArray) -> Callable[[], AnyArray]:
        """A function that returns the array itself."""
        return lambda: array

    def empty(self, shape: tuple[int, ...]) -> Array:
        """A float32 array of any values."""
        return arrays.empty(shape, np.float32)

    def copy(self, array: Array) -> Array:
        """Return an array of its own, with the same values."""
        return array.copy()

    def flip(self, array: Array, axes: Sequence[int]) -> Array:
        """Return an array of its own: the array, reversed along some axes."""
        return np.flip(array, tuple(axes)).copy()

    def multiply(self, array: Array, by: Array, out: Array) -> None:
        """Write the product of two arrays into a third."""
        np.multiply(array, by, out=out)

    def add_rounded(self, sums: Array, terms: Array, step: float) -> None:
        """Round terms to whole numbers, and add them to sums as so many steps."""
        np.rint(terms, out=terms)
        terms *= np.float32(step)
        sums += terms

    def largest_magnitude(self, array: Array) -> Any:
        """Return the largest magnitude in an array."""
        return np.maximum(array.max(), -array.min())

    def download(self, array: Array, encoding: Encoding = AS_COMPUTED) -> Callable[[], AnyArray]:
        """Encode an array; float32 stays as it is."""
        encoded = quantize(array, encoding.dtype, encoding.value_range)
        return lambda: encoded

    def make_room(self) -> bool:
        """Free nothing: nothing is held for later."""
        return False
