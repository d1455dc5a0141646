"""From blended float32 values to the output's dtype: clipped and rounded, never wrapped around."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beam_inference import arrays
from beam_inference.arrays import AnyArray, AnyDtype


def quantize(
    core: NDArray[np.float32], dtype: AnyDtype, value_range: tuple[float, float] | None
) -> AnyArray:
    """``core`` in the output's dtype; float32 is returned as it is.

    For an integer dtype, ``value_range`` (low, high) maps onto the dtype's full range; values
    beyond are clipped, the rest rounded to the nearest integer, halves to even. Without one the
    values are whole numbers of the dtype, and are written as they are. ``core`` may be overwritten.
    """
    if dtype == np.float32:
        return core
    if value_range is not None:
        low, high = value_range
        info = np.iinfo(dtype)
        step = (float(info.max) - float(info.min)) / (high - low)
        core -= np.float32(low)
        core *= np.float32(step)
        np.rint(core, out=core)
        np.clip(core, 0, info.max - info.min, out=core)
        core += info.min
    array = arrays.empty(core.shape, dtype)
    np.copyto(array, core, casting="unsafe")
    return array
