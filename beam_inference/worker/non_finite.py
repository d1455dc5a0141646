"""NaN and infinite values: in what is blended, and in the input that they come from."""

from __future__ import annotations

from typing import Any

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.errors import NonFiniteError


def check_finite(values: Any) -> None:
    """Refuse blended values that are NaN or infinite; ``values`` is an array on any device.

    Raises:
        NonFiniteError: some are.
    """
    # A sum that is finite has finite terms, and takes one pass; one that is not may have
    # overflowed.
    if np.isfinite(float(values.sum())):
        return
    if not np.isfinite([float(values.min()), float(values.max())]).all():
        raise NonFiniteError("NaN or infinite values after blending")


def is_finite(array: AnyArray) -> bool:
    """Whether an array has neither NaN nor infinite values."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def explain_non_finite(cutout: AnyArray) -> str:
    """Say whether a chunk's input or its network is at fault for NaN or infinite values."""
    if is_finite(cutout):
        return "the network returned NaN or infinite values for finite input"
    count = int((~np.isfinite(cutout)).sum())
    return f"the input holds {count} NaN or infinite voxels, and so does the result"
