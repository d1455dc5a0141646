"""The network that returns its input: to try a job's geometry, or to copy a volume through it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import Forward

DESCRIPTION = {
    "engine": "identity",
    "engine_version": "1",
    "device": "cpu",
    "precision": "float32",
}
"""What determines the bits of the network ``identity``."""


def identity_predictor(activation: str = "none") -> Predictor:
    """The network that returns each batch unchanged, or its sigmoid, with NumPy."""
    forward: Forward = _sigmoid if activation == "sigmoid" else lambda batch: batch
    return Predictor(NumpyDevice(), forward, DESCRIPTION)


def _sigmoid(batch: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.asarray(1 / (1 + np.exp(-batch)), np.float32)
