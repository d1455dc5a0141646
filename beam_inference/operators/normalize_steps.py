"""From stored values to what the network expects: a list of steps, each after the one before."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from beam_inference.config.normalize import (
    AffineStep,
    ClipStep,
    DefiniteStep,
    PatchMoments,
    PatchStandardStep,
    StandardStep,
)


@dataclass(frozen=True, slots=True)
class StepwiseNormalization:
    """Steps of a normalisation in float32, on NumPy arrays and torch tensors alike.

    Attributes:
        steps: in their order.
    """

    steps: Sequence[DefiniteStep]

    def __call__(self, batch: Any) -> Any:
        """Normalise a float32 batch (N, C, Z, Y, X), in place."""
        for step in self.steps:
            _take_step(step, batch)
        return batch


def _take_step(step: DefiniteStep, batch: Any) -> None:
    match step:
        case ClipStep():
            _change(batch, step.clip, _clip)
        case AffineStep():
            _change(batch, step.scale, _with_float32(operator.imul), unless=1.0)
            _change(batch, step.offset, _with_float32(operator.iadd), unless=0.0)
        case StandardStep():
            _change(batch, step.standard.mean, _with_float32(operator.isub), unless=0.0)
            _change(batch, step.standard.std, _with_float32(operator.itruediv), unless=1.0)
        case PatchStandardStep():
            for patch in batch:
                for channel in patch:
                    _standardise(channel, step.standard)


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


def _standardise(values: Any, wanted: PatchMoments) -> None:
    """Standardise the values (Z, Y, X) of one channel of a patch, in place.

    Patches are summed one by one, so that a patch's place in its batch changes nothing, and in
    float64 where the device has it.
    """
    number = math.prod(values.shape)
    values -= _narrow(sum(_wide(slab).sum() for slab in _slabs(values)) / number, values)
    rest = sum(_wide(slab).sum() for slab in _slabs(values)) / number  # what rounding has left
    values -= _narrow(rest, values)
    squares = sum((_wide(slab) ** 2).sum() for slab in _slabs(values))
    deviation = (squares / max(1, number - wanted.ddof)) ** 0.5
    values /= _narrow(deviation.clip(wanted.floor, None) + wanted.eps, values)


def _slabs(values: Any) -> list[Any]:
    """Parts of an array (Z, Y, X), whose copies in float64 are small."""
    depth = max(1, _SLAB_VOXELS // math.prod(values.shape[1:]))
    return [values[z : z + depth] for z in range(0, len(values), depth)]


def _wide(values: Any) -> Any:
    """Values in float64, where the device has it."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)
    return values.double() if values.device.type in ("cpu", "cuda") else values


def _narrow(number: Any, values: Any) -> Any:
    """A number as float32, where the values are."""
    return np.float32(number) if isinstance(values, np.ndarray) else number.to(values.dtype)


def _clip(values: Any, limits: tuple[float, float]) -> None:
    low, high = map(_float32, limits)
    if isinstance(values, np.ndarray):
        values.clip(low, high, out=values)
    else:
        values.clamp_(low, high)


_SLAB_VOXELS = 2**22
_LARGEST = float(np.finfo(np.float32).max)
