"""A kind of model file: convolution kernels in .npz files, applied with SciPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from beam_inference.errors import ModelContractError
from beam_inference.models.loading import ModelLoader


class Convolution:
    """Applies one kernel per output channel to a volume of one channel."""

    thread_safe = True
    """Several threads may call it at a time."""

    def __init__(self, kernels: NDArray[np.float32]) -> None:
        self._kernels = kernels

    def __call__(self, batch: NDArray[np.float32]) -> NDArray[Any]:
        """Map (N, 1, Z, Y, X) to (N, kernels, Z, Y, X)."""
        return np.stack(
            [
                [ndimage.correlate(patch[0], kernel, mode="constant") for kernel in self._kernels]
                for patch in batch
            ]
        )


def load_file(path: Path, *, allow_pickle: bool) -> Convolution:  # noqa: ARG001  # none is read
    """Load a file whose array "kernels" is (kernels, Z, Y, X)."""
    with np.load(path) as arrays:
        if "kernels" not in arrays:
            raise ModelContractError(f"{path} has no array named kernels")
        return Convolution(arrays["kernels"].astype(np.float32))


LOADER = ModelLoader(load=load_file, gives="function")
