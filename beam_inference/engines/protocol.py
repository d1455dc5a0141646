"""What patch inference needs of a device, and the types of a network's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from beam_inference.arrays import AnyArray, AnyDtype

Forward = Callable[[Any], Any]
"""A network's forward pass, on device arrays.

It maps a float32 batch (N, C_in, Z, Y, X) to a float32 array (N, C_out, Z', Y', X'), where
Z', Y', X' are the patch, or the patch grown by the crop margin. The activation is part of it. The
next call may overwrite what this one returned. It raises
:class:`beam_inference.errors.DeviceOutOfMemory` where a smaller batch may do.
"""


class Encoding(NamedTuple):
    """How float32 values are written.

    Attributes:
        dtype: the output's.
        value_range: (low, high), which maps onto an integer dtype's full range; values beyond are
            clipped, the rest rounded to the nearest integer, halves to even. None for float32,
            which is written as it is.
    """

    dtype: AnyDtype
    value_range: tuple[float, float] | None = None


AS_COMPUTED = Encoding(np.dtype(np.float32))
"""Float32, as the network and the blending gave it."""


class Device(Protocol):
    """The place where a network's arrays live ("device arrays"), and the operations on them.

    Device arrays are NumPy arrays, or arrays that are sliced, and changed in place by arithmetic
    operators, as NumPy arrays are.
    """

    @property
    def on_host(self) -> bool:
        """Whether device arrays are in the machine's memory."""

    def session(self) -> AbstractContextManager[object]:
        """A context in which everything else is called (torch: no gradients)."""

    def upload(self, array: AnyArray) -> Any:
        """Bring an array to the device: a device array of the same shape, dtype and values."""

    def begin_upload(self, array: AnyArray) -> Callable[[], Any]:
        """Begin to bring an array to the device while it computes.

        Any thread may begin; a thread that computes calls what is returned, which waits for the
        device array. One array is sent ahead at a time; others are sent when they are called for.
        """

    def empty(self, shape: tuple[int, ...]) -> Any:
        """A float32 device array of any values, to be written before it is read."""

    def copy(self, array: Any) -> Any:
        """Return a device array of its own, with the same values."""

    def flip(self, array: Any, axes: Sequence[int]) -> Any:
        """Return a device array of its own: the array, reversed along some axes."""

    def multiply(self, array: Any, by: Any, out: Any) -> None:
        """Write the product of two device arrays into a third."""

    def add_rounded(self, sums: Any, terms: Any, step: float) -> None:
        """Round terms to whole numbers, halves to even, and add them to sums as so many steps.

        Args:
            sums: a device array of multiples of the step.
            terms: a device array of the same shape, in steps; it is overwritten.
            step: a power of two.
        """

    def largest_magnitude(self, array: Any) -> Any:
        """Return the largest magnitude in a device array, as a device array of one value."""

    def download(self, array: Any, encoding: Encoding = AS_COMPUTED) -> Callable[[], AnyArray]:
        """Encode a float32 device array there, and begin to bring it to the host.

        Args:
            array: is overwritten by the encoding. Others may overwrite it after this call, except
                on the host, where it may be what is returned.
            encoding: of the result.

        Returns:
            A function that waits for the result. On a device other than the host the next download
            may overwrite the result of this one.
        """

    def make_room(self) -> bool:
        """Free what the device holds for later, after a call that ran out of memory.

        Returns:
            Whether an array that had been sent ahead was given up: the same call may then succeed.
        """
