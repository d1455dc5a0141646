"""From a cutout to what a step of training takes: image, target, and where that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from beam_inference.arrays import AnyArray
from beam_inference.config.definite import DefiniteNormalize
from beam_inference.errors import ConfigError, VolumeError
from beam_inference.job.parts import make_normalization
from beam_inference.training.augmentation import Augmentation
from beam_inference.training.labelled_volumes import Cutout
from beam_inference.training.targets import Stored, Target, TargetConfig


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
        """Make the arrays of a sample.

        Raises:
            ConfigError: the labels have unfit channels, or are no integers.
            VolumeError: stored values are not between 0 and 1.
        """
        self._check(cutout)
        normalize = make_normalization(self.normalize, cutout.image.dtype)
        image = normalize(cutout.image.astype(np.float32)[None])[0]
        cutout = replace(cutout, image=image)
        offsets = None
        if isinstance(self.target, Stored):
            offsets = self.target.channel_offsets
            cutout = replace(cutout, labels=self._stored_values(self.target, cutout))
        if self.augmentation is not None:
            cutout = self.augmentation.apply(cutout, random, offsets)
        if isinstance(self.target, Stored):
            target = Target(cutout.labels, np.broadcast_to(cutout.valid, cutout.labels.shape))
        else:
            target = self.target.compute(cutout.labels[0], cutout.valid[0])
        return {"image": cutout.image, "target": target.values, "known": target.known}

    def _stored_values(self, target: Stored, cutout: Cutout) -> NDArray[np.float32]:
        try:
            return target.compute(cutout.labels, cutout.valid).values
        except ValueError as error:
            raise VolumeError(
                f"the stored targets {cutout.labels_url} cannot be learnt: in {cutout.box} {error}"
            ) from None

    def _check(self, cutout: Cutout) -> None:
        expected = len(self.target.channels) if isinstance(self.target, Stored) else 1
        found = len(cutout.labels)
        if found != expected:
            raise ConfigError(
                f"the labels have {found} channels; the target {self.target.kind} is made of "
                f"{expected}. Choose channels of the labels' volume, or another target."
            )
        if cutout.labels.dtype.kind not in "iub" and not isinstance(self.target, Stored):
            raise ConfigError(
                f"the labels {cutout.labels_url} hold {cutout.labels.dtype}; the target "
                f"{self.target.kind} is made of integers. Convert them, or, if they are values to "
                "be learnt as they are, take the target stored."
            )
