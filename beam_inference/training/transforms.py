"""From a cutout to what a step of training takes: image, target, and where that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteNormalize
from beam_inference.errors import ConfigError
from beam_inference.job.parts import make_normalization
from beam_inference.training.augmentation import Augmentation
from beam_inference.training.labelled_volumes import Cutout
from beam_inference.training.targets import Stored, TargetConfig


@dataclass(frozen=True)
class TrainingTransform:
    """The transform of a :class:`~beam_inference.training.samples.SampleStream` for training.

    It gives ``image`` and ``target``, float32, and ``known``, where the target counts.

    Attributes:
        target: what the network is to answer.
        normalize: as a job's ``model.normalize``, of no levels file.
        augmentation: changes at random; None for none, as in validation.
    """

    target: TargetConfig
    normalize: DefiniteNormalize = "none"
    augmentation: Augmentation | None = None

    def __call__(self, cutout: Cutout, random: np.random.Generator) -> Mapping[str, AnyArray]:
        """Make the arrays of a sample; raises ConfigError where labels have unfit channels."""
        self._check(cutout)
        normalize = make_normalization(self.normalize, cutout.image.dtype)
        image = normalize(cutout.image.astype(np.float32)[None])[0]
        cutout = replace(cutout, image=image)
        offsets = self.target.channel_offsets if isinstance(self.target, Stored) else None
        if self.augmentation is not None:
            cutout = self.augmentation.apply(cutout, random, offsets)
        if isinstance(self.target, Stored):
            target = self.target.compute(cutout.labels, cutout.valid)
        else:
            target = self.target.compute(cutout.labels[0], cutout.valid[0])
        return {"image": cutout.image, "target": target.values, "known": target.known}

    def _check(self, cutout: Cutout) -> None:
        expected = len(self.target.channels) if isinstance(self.target, Stored) else 1
        found = len(cutout.labels)
        if found != expected:
            raise ConfigError(
                f"the labels have {found} channels; the target {self.target.kind} is made of "
                f"{expected}. Choose channels of the labels' volume, or another target."
            )
