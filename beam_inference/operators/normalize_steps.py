"""From stored values to what the network expects: a list of steps, each after the one before."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.normalize import (
    AffineStep,
    ClipStep,
    DefiniteStep,
    InsideStandardStep,
    PatchMoments,
    PatchStandardStep,
    SectionClipStep,
    SectionStandardStep,
    SectionStep,
    StandardStep,
    is_of_object,
)

Undo: TypeAlias = Callable[[Any], None]
"""Undoes a step on a network's values (N, C, Z, Y, X), in place."""


@dataclass(frozen=True, slots=True)
class StepwiseNormalization:
    """Steps of a normalisation in float32, on NumPy arrays and torch tensors alike.

    Attributes:
        steps: in their order.
        is_undone: whether they are undone on the network's values.
    """

    steps: Sequence[DefiniteStep]
    is_undone: bool = False

    def __call__(self, batch: Any) -> Any:
        """Normalise a float32 batch (N, C, Z, Y, X), in place."""
        self.apply(batch)
        return batch

    def apply(self, batch: Any) -> list[Undo]:
        """Normalise a batch in place, and return what undoes each step."""
        return [_take_step(step, batch) for step in self.steps]


def split_steps(
    steps: Sequence[DefiniteStep],
) -> tuple[Sequence[DefiniteStep], Sequence[DefiniteStep]]:
    """Steps up to the last one that depends on the place, and those after it.

    Such a step changes the inside of an object alone, or has numbers of each section.
    """
    last = max(
        (
            number
            for number, step in enumerate(steps, 1)
            if is_of_object(step) or isinstance(step, SectionStandardStep | SectionClipStep)
        ),
        default=0,
    )
    return steps[:last], steps[last:]


def normalize_by_place(
    array: AnyArray,
    inside: AnyArray | None,
    sections: NDArray[np.int64],
    steps: Sequence[DefiniteStep],
) -> NDArray[np.float32]:
    """Take steps of which some change the inside of an object alone, or each section by its own.

    Where an object ends inside a resampled voxel, it is inside by a part: what is subtracted is
    subtracted by that part, so that the result is that of steps which are taken before resampling.

    Args:
        array: stored or resampled values (C, Z, Y, X); those outside of the object are zero.
        inside: how much of each voxel is inside (Z, Y, X); None where no step is for an object.
        sections: number of each section in the volume.
        steps: none of each patch.

    Returns:
        Values (C, Z, Y, X).
    """
    values = array.astype(np.float32)
    for step in steps:
        if isinstance(step, SectionStandardStep | SectionClipStep):
            _take_section_step(step, values, sections)
            continue
        if not is_of_object(step):
            _take_step(step, values[None])
            continue
        assert inside is not None, "a job with such a step reads it"
        for channel, mean, std in _moments_of_channels(step, len(values)):
            for z, part in enumerate(inside):
                values[channel, z] -= np.float32(mean) * part.astype(np.float32)
            values[channel] /= np.float32(std)
    return values


def _take_section_step(
    step: SectionStep, values: NDArray[np.float32], sections: NDArray[np.int64]
) -> None:
    """Change each section (of C, Z, Y, X) by its own numbers, in place."""
    channels = range(len(values)) if step.channels is None else step.channels
    for z, section in enumerate(sections.tolist()):
        for channel in channels:
            plane = values[channel, z]
            if isinstance(step, SectionClipStep):
                low, high = map(_float32, step.clip.limits[section - step.clip.start])
                plane.clip(low, high, out=plane)
                continue
            number = section - step.standard.start
            std = _float32(step.standard.std[number])
            if std:
                plane -= np.float32(_float32(step.standard.mean[number]))
                plane /= np.float32(std)
            else:
                plane[:] = 0


def _moments_of_channels(
    step: InsideStandardStep, channels: int
) -> Iterator[tuple[int, float, float]]:
    """Each channel that a step changes, with its mean and deviation, which float32 holds."""
    chosen = range(channels) if step.channels is None else step.channels
    for position, channel in enumerate(chosen):
        mean, std = (
            _float32(each[position] if isinstance(each, list) else each)
            for each in (step.standard.mean, step.standard.std)
        )
        yield channel, mean, std


def _standardise_nonzero(step: InsideStandardStep, batch: Any) -> Undo:
    for channel, mean, std in _moments_of_channels(step, batch.shape[1]):
        values = batch[:, channel]
        number = np.float32(mean) if isinstance(values, np.ndarray) else mean
        values -= (values != 0) * number
        values /= std
    return _do_nothing


def predict_normalized(
    predict: Callable[[Any], Any], normalize: Callable[[Any], Any], batch: Any
) -> Any:
    """Predictions for a batch of stored values.

    Args:
        predict: the network.
        normalize: maps a float32 batch of stored values to what it expects. If that is to be
            undone, it is undone on a copy of the predictions, which may be the network's own array.
        batch: stored values (N, C, Z, Y, X), in float32; may be overwritten.
    """
    if not (isinstance(normalize, StepwiseNormalization) and normalize.is_undone):
        return predict(normalize(batch))
    undo = normalize.apply(batch)
    predictions = predict(batch)
    is_array = isinstance(predictions, np.ndarray)
    predictions = predictions.copy() if is_array else predictions.clone()
    for each in reversed(undo):
        each(predictions)
    return predictions


def _take_step(step: DefiniteStep, batch: Any) -> Undo:
    """Change a batch in place; return what undoes it."""
    match step:
        case InsideStandardStep():
            assert not is_of_object(step), "what is inside is not seen here: normalize_by_place"
            return _standardise_nonzero(step, batch)
        case ClipStep():
            _change(batch, step.channels, step.clip, _clip)
            return _do_nothing
        case AffineStep():
            return _in_turn(
                batch,
                step.channels,
                (step.scale, operator.imul, operator.itruediv, 1.0),
                (step.offset, operator.iadd, operator.isub, 0.0),
            )
        case StandardStep():
            return _in_turn(
                batch,
                step.channels,
                (step.standard.mean, operator.isub, operator.iadd, 0.0),
                (step.standard.std, operator.itruediv, operator.imul, 1.0),
            )
        case PatchStandardStep():
            return _standardise_patches(step, batch)
        case SectionStandardStep() | SectionClipStep():
            raise AssertionError("sections are not seen here: normalize_by_place")


def _do_nothing(_: Any) -> None:
    """Values that were clipped stay so."""


_Action: TypeAlias = Callable[[Any, Any], object]


def _in_turn(
    batch: Any, channels: Sequence[int] | None, *actions: tuple[Any, _Action, _Action, float]
) -> Undo:
    """Do actions, each with its numbers; return what does their inverses, the last one first.

    Each has its numbers, the action, its inverse, and the number with which it changes nothing.
    """
    for numbers, action, _, unless in actions:
        _change(batch, channels, numbers, _with_float32(action), unless)

    def undo(predictions: Any) -> None:
        for numbers, _, inverse, unless in reversed(actions):
            _change(predictions, channels, numbers, _with_float32(inverse), unless)

    return undo


def _standardise_patches(step: PatchStandardStep, batch: Any) -> Undo:
    chosen = [
        (position, channel)
        for position in range(len(batch))
        for channel in step.channels or range(batch.shape[1])
    ]
    numbers = [_standardise(batch[place], step.standard) for place in chosen]

    def undo(predictions: Any) -> None:
        for place, (divisor, mean, rest) in zip(chosen, numbers, strict=True):
            values = predictions[place]
            values *= divisor
            values += rest
            values += mean

    return undo


def _change(
    batch: Any,
    channels: Sequence[int] | None,
    values: Any,
    action: _Action,
    unless: float | None = None,
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


def _standardise(values: Any, wanted: PatchMoments) -> tuple[Any, Any, Any]:
    """Standardise the values (Z, Y, X) of one channel of a patch, in place.

    Patches are summed one by one, so that a patch's place in its batch changes nothing, and in
    float64 where the device has it.

    Returns:
        What was divided by, the mean, and the rest of it that float32 does not hold.
    """
    number = math.prod(values.shape)
    mean = _narrow(sum(_wide(slab).sum() for slab in _slabs(values)) / number, values)
    values -= mean
    rest = _narrow(sum(_wide(slab).sum() for slab in _slabs(values)) / number, values)
    values -= rest
    squares = sum((_wide(slab) ** 2).sum() for slab in _slabs(values))
    deviation = (squares / max(1, number - wanted.ddof)) ** 0.5
    divisor = _narrow(deviation.clip(wanted.floor, None) + wanted.eps, values)
    values /= divisor
    return divisor, mean, rest


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
