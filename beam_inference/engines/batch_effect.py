"""Tries whether a network's answer to a patch depends on its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.trial import TOLERANCES, ChannelDistances, noise_unlike, without_blank

_SHUFFLED = 4
"""How many patches of shuffled voxels are tried at every place: few values show a difference."""


@dataclass(frozen=True, slots=True)
class BatchEffect:
    """How far answers to one patch differ from batch to batch.

    Attributes:
        largest: root mean square over a patch, the largest of those that were tried, of the channel
            that differs most for its values.
        allowed: what arithmetic in another order explains.
    """

    largest: float
    allowed: float

    @property
    def is_none(self) -> bool:
        """Whether all answers have the same bits."""
        return self.largest == 0

    @property
    def is_rounding(self) -> bool:
        """Whether other last bits are all that differs."""
        return self.largest <= self.allowed


def effect_of_batch(
    predictor: Predictor, patch: AnyArray, normalize: Callable[[Any], Any], batch_size: int
) -> BatchEffect:
    """Compare a network's answers to a patch at several places of a batch, and among others.

    A network that normalises over all of its batch answers otherwise among others. Processors
    compute the last values of an array in another way than those that fill their vectors, so that
    the place alone may change last bits.

    Args:
        predictor: the network on its device.
        patch: (channels, Z, Y, X), stored values, grown by the crop margin.
        normalize: maps a float32 batch of stored values to the network's input.
        batch_size: patches of a batch, 2 or more.
    """
    patch = without_blank(patch)
    stranger = noise_unlike(patch)
    distances: ChannelDistances | None = None
    with predictor.device.session():

        def compare(first: NDArray[np.float32], others: Iterable[NDArray[np.float32]]) -> None:
            nonlocal distances
            for other in others:
                distances = ChannelDistances.between(other, first, 0).joined(distances)

        for each in (patch, _quieter(patch)):
            answers = _answers(predictor, [each] * batch_size, normalize)
            first = next(answers)
            compare(first, answers)
            strangers = [stranger] * (batch_size - 1)
            compare(first, _answers(predictor, [each, *strangers], normalize, [0]))
            compare(first, _answers(predictor, [*strangers, each], normalize, [batch_size - 1]))
        for each in _shuffled(patch):
            answers = _answers(predictor, [each] * batch_size, normalize)
            compare(next(answers), answers)
    assert distances is not None, "patches were compared"
    precision = predictor.description.get("precision", "float32")
    return BatchEffect(*distances.worst(TOLERANCES[precision]))


def _quieter(patch: AnyArray) -> AnyArray:
    """The patch with values in the lower half of its range."""
    low = patch.min()
    quieter: AnyArray = (low + (patch.astype(np.float64) - low) / 2).astype(patch.dtype)
    return quieter


def _shuffled(patch: AnyArray) -> list[AnyArray]:
    """The patch with its voxels in other orders."""
    random = np.random.default_rng(0)
    voxels = patch.reshape(len(patch), -1)
    return [random.permuted(voxels, axis=1).reshape(patch.shape) for _ in range(_SHUFFLED)]


def _answers(
    predictor: Predictor,
    patches: list[AnyArray],
    normalize: Callable[[Any], Any],
    places: Sequence[int] | None = None,
) -> Iterator[NDArray[np.float32]]:
    """The answers (C, Z, Y, X) to the patches of a batch, or those at some places."""
    device = predictor.device
    batch = device.empty((len(patches), *patches[0].shape))
    for place, patch in enumerate(patches):
        batch[place : place + 1] = device.upload(patch[None])
    answer = predictor.predict(normalize(batch))
    for place in range(len(patches)) if places is None else places:
        yield np.array(device.download(device.copy(answer[place : place + 1]))())[0]
