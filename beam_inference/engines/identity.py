"""The network that returns its input: to try a job's geometry, or to copy a volume through it."""

from __future__ import annotations

from functools import partial

from beam_inference.engines.numpy_device import NumpyDevice
from beam_inference.engines.numpy_forward import activate
from beam_inference.engines.predictor import Predictor

DESCRIPTION = {
    "engine": "identity",
    "engine_version": "1",
    "device": "cpu",
    "precision": "float32",
}
"""What determines the bits of the network ``identity``."""


def identity_predictor(activation: str = "none") -> Predictor:
    """The network that returns each batch unchanged, or its sigmoid, with NumPy."""
    return Predictor(NumpyDevice(), partial(activate, activation=activation), DESCRIPTION)
