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
    def change(
        values: Any, action: Callable[[Any, Any], object], unless: float | None = None
    ) -> None:
        _change(batch, step.channels, values, action, unless)

    match step:
        case ClipStep():
            change(step.clip, _clip)
        case AffineStep():
            change(step.scale, _with_float32(operator.imul), unless=1.0)
            change(step.offset, _with_float32(operator.iadd), unless=0.0)
        case StandardStep():
            change(step.standard.mean, _with_float32(operator.isub), unless=0.0)
            change(step.standard.std, _with_float32(operator.itruediv), unless=1.0)
        case PatchStandardStep():
            for patch in batch:
                for channel in step.channels or range(len(patch)):
                    _standardise(patch[channel], step.standard)


def _change(
    batch: Any,
    channels: Sequence[int] | None,
    values: Any,
    action: Callable[[Any, Any], object],
    unless: float | None,
) -> None:
    """Change channels of a batch in place, each by its value, or all by one.

    The value ``unless`` would change nothing.
    """
    if channels is None and not isinstance(values, list):
        if values != unless:
            action(batch, values)
        return
    chosen = range(batch.shape[1]) if channels is None else channels
    each = values if isinstance(values, list) else [values] * len(chosen)
    for channel, value in zip(chosen, each, strict=True):
        if value != unless:
            action(batch[:, channel], value)


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
