"""A network without PyTorch: a function of NumPy arrays, as any library may give one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def edge_strength(batch: NDArray[np.float32]) -> NDArray[Any]:
    """The magnitude of the gradient: (N, C, Z, Y, X) to (N, C, Z, Y, X)."""
    z, y, x = np.gradient(batch, axis=(2, 3, 4))
    return np.sqrt(z * z + y * y + x * x)


def edges() -> Callable[[Any], Any]:
    """A factory; a job names it as ``model.path: beam_inference_example.network:edges``."""
    return edge_strength


def scaled_edges(weights_path: Path) -> Callable[[Any], Any]:
    """A factory that is given the local path of ``model.weights``, and loads it itself."""
    with np.load(weights_path) as arrays:
        scale = arrays["scale"].astype(np.float32)
    return lambda batch: edge_strength(batch) * scale
