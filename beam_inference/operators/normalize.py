"""From stored values to what the network expects: an affine map and a clip, per voxel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from beam_inference.arrays import AnyDtype
from beam_inference.config.normalize import AffineStep, ClipStep, DefiniteStep
from beam_inference.errors import ConfigError
from beam_inference.operators.normalize_steps import StepwiseNormalization


@dataclass(frozen=True, slots=True)
class Normalization:
    """``clip(value * scale + offset)`` in float32, on NumPy arrays and torch tensors alike.

    Attributes:
        scale, offset: of the affine map.
        clip: lowest and highest value afterwards, or None.
    """

    scale: float = 1.0
    offset: float = 0.0
    clip: tuple[float, float] | None = None

    def __call__(self, batch: Any) -> Any:
        """Normalise a float32 batch, in place."""
        if self.scale != 1.0:
            batch *= np.float32(self.scale).item()
        if self.offset != 0.0:
            batch += np.float32(self.offset).item()
        if self.clip is not None and isinstance(batch, np.ndarray):
            batch.clip(*self.clip, out=batch)
        elif self.clip is not None:
            batch.clip_(*self.clip)
        return batch

    def undone(self) -> StepwiseNormalization:
        """The steps that undo this normalisation on the network's values."""
        steps: list[DefiniteStep] = [AffineStep(scale=self.scale, offset=self.offset)]
        if self.clip is not None:
            steps.append(ClipStep(clip=self.clip))
        return StepwiseNormalization(steps, is_undone=True)


AnyNormalization: TypeAlias = Normalization | StepwiseNormalization
"""Maps a float32 batch of stored values to what the network expects."""


def unit(dtype: AnyDtype) -> Normalization:
    """The normalisation by which the maximum of a stored integer dtype becomes 1.

    Raises:
        ConfigError: the dtype is not an integer type.
    """
    if dtype.kind not in "iu":
        raise ConfigError(
            "model.normalize: unit needs an integer input, whose maximum becomes 1; the input is "
            f"{dtype}. Write {{scale: …, offset: …}} or none."
        )
    return Normalization(scale=1.0 / float(np.iinfo(dtype).max))
