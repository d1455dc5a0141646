"""From stored values to what the network expects: a list of steps, each after the one before."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.config.normalize import AffineStep, ClipStep, StandardStep, Step


@dataclass(frozen=True, slots=True)
class StepwiseNormalization:
    """Steps of a normalisation in float32, on NumPy arrays and torch tensors alike.

    Attributes:
        steps: in their order.
    """

    steps: Sequence[Step]

    def __call__(self, batch: Any) -> Any:
        """Normalise a float32 batch (N, C, Z, Y, X), in place."""
        for step in self.steps:
            _take_step(step, batch)
        return batch


def _take_step(step: Step, batch: Any) -> None:
    match step:
        case ClipStep():
            _change(batch, step.clip, _clip)
        case AffineStep():
            _change(batch, step.scale, _with_float32(operator.imul), unless=1.0)
            _change(batch, step.offset, _with_float32(operator.iadd), unless=0.0)
        case StandardStep():
            _change(batch, step.standard.mean, _with_float32(operator.isub), unless=0.0)
            _change(batch, step.standard.std, _with_float32(operator.itruediv), unless=1.0)


def _change(
    batch: Any, values: Any, action: Callable[[Any, Any], object], unless: float | None = None
) -> None:
    """Change a batch in place: each channel by its value, or all of it by one value.

    The value ``unless`` would change nothing.
    """
    if isinstance(values, list):
        for channel, value in enumerate(values):
            _change(batch[:, channel], value, action, unless)
    elif values != unless:
        action(batch, values)


def _with_float32(action: Callable[[Any, float], object]) -> Callable[[Any, float], object]:
    """Apply an operation with the nearest float32 number, for NumPy and PyTorch alike."""
    return lambda array, number: action(array, _float32(number))


def _float32(number: float) -> float:
    return float(np.float32(min(max(number, -_LARGEST), _LARGEST)))


def _clip(values: Any, limits: tuple[float, float]) -> None:
    low, high = map(_float32, limits)
    if isinstance(values, np.ndarray):
        values.clip(low, high, out=values)
    else:
        values.clamp_(low, high)


_LARGEST = float(np.finfo(np.float32).max)
