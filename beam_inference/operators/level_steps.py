"""Steps of a normalisation whose numbers are made of a volume's levels.

Each step takes the values as they are after the steps before. Quantiles go through every step that
keeps the order of values. Mean and standard deviation go through scale and offset, and through a
clip to quantiles of the same levels, for which a levels file holds sums up to each quantile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from beam_inference.config.definite import DefiniteNormalize
from beam_inference.config.normalize import (
    AffineStep,
    ClipStep,
    Contrast,
    DefiniteStep,
    LevelsStandardStep,
    Moments,
    MomentsFromLevels,
    Normalize,
    PatchStandardStep,
    QuantileClipStep,
    Quantiles,
    RescaleStep,
    Standard,
    StandardStep,
    Statistics,
    Step,
)
from beam_inference.config.storage import Storage
from beam_inference.errors import ConfigError
from beam_inference.operators.distributions import ValueLevels
from beam_inference.operators.levels import Levels, levels_of_volume, normalization_from_levels
from beam_inference.volumes.volume import Volume


def definite_normalization(
    wanted: Normalize, volume: Volume, storage: Storage
) -> DefiniteNormalize:
    """Make a normalisation of numbers of one that may name levels files.

    Raises:
        ConfigError: levels are of another volume, do not hold what is wanted, or are one value
            only.
    """
    if isinstance(wanted, Contrast | Standard):
        return normalization_from_levels(wanted, volume, storage)
    if isinstance(wanted, tuple):
        load = cache(lambda url: levels_of_volume(volume, url, storage))
        return definite_steps(wanted, volume.channels, load)
    return wanted


def definite_steps(
    steps: Sequence[Step], channels: int, load: Callable[[str], Levels]
) -> tuple[DefiniteStep, ...]:
    """Make steps of numbers of those that name levels files.

    Args:
        steps: in their order.
        channels: channels of the volume.
        load: reads a levels file.

    Raises:
        ConfigError: a file does not hold what a step wants, or steps before it make it unknown.
    """
    made = _Steps(channels, load)
    for number, step in enumerate(steps):
        made.take(f"model.normalize.{number}", step)
    return tuple(made.steps)


@dataclass
class _Clipped:
    """Clips to quantiles so far.

    Attributes:
        url, of: the levels that they are of.
        low: position of the lower quantile.
        high: position of the upper quantile.
    """

    url: str
    of: str
    low: int
    high: int


@dataclass
class _Steps:
    """The steps so far, and what they make of values.

    Attributes:
        scales, offsets: of each channel, of all steps so far together, but for clips.
        clipped: the clips to quantiles.
        unknown: why mean and standard deviation are not known any more.
    """

    channels: int
    load: Callable[[str], Levels]
    steps: list[DefiniteStep] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    offsets: list[float] = field(default_factory=list)
    clipped: _Clipped | None = None
    unknown: str | None = None

    def __post_init__(self) -> None:
        self.scales = [1.0] * self.channels
        self.offsets = [0.0] * self.channels

    def take(self, key: str, step: Step) -> None:
        """Add a step, as numbers."""
        match step:
            case QuantileClipStep():
                self._clip_to_quantiles(key, step.clip)
            case RescaleStep():
                lows, highs = self._values(key, step.rescale)
                spans = [high - low for low, high in zip(lows, highs, strict=True)]
                self._standardise(key, lows, [step.rescale.divisor(span) for span in spans])
            case LevelsStandardStep():
                self._standardise(key, *self._moments(key, step.standard))
            case StandardStep():
                moments = step.standard
                self._standardise(key, self._each(moments.mean), self._each(moments.std), step)
            case AffineStep():
                self._scale(self._each(step.scale), self._each(step.offset))
                self.steps.append(step)
            case ClipStep():
                self.unknown = self.unknown or "a clip to fixed numbers changes both"
                self.steps.append(step)
            case PatchStandardStep():
                self.unknown = "the step before it depends on each patch"
                self.steps.append(step)

    def _each(self, numbers: float | list[float]) -> list[float]:
        return numbers if isinstance(numbers, list) else [numbers] * self.channels

    def _scale(self, scales: Sequence[float], offsets: Sequence[float]) -> None:
        self.scales = [one * other for one, other in zip(self.scales, scales, strict=True)]
        self.offsets = [
            before * scale + offset
            for before, scale, offset in zip(self.offsets, scales, offsets, strict=True)
        ]

    def _standardise(
        self,
        key: str,
        means: Sequence[float],
        divisors: Sequence[float],
        step: StandardStep | None = None,
    ) -> None:
        if not all(math.isfinite(each) for each in (*means, *divisors)) or not all(
            each >= 2.0**-126 for each in divisors
        ):
            raise ConfigError(
                f"{key}: would divide by {min(divisors):g}, because the volume has one value "
                "there. Write eps or floor."
            )
        self._scale(
            [1 / each for each in divisors],
            [-mean / each for mean, each in zip(means, divisors, strict=True)],
        )
        self.steps.append(
            step or StandardStep(standard=Moments(mean=list(means), std=list(divisors)))
        )

    def _clip_to_quantiles(self, key: str, wanted: Quantiles) -> None:
        lows, highs = self._values(key, wanted)
        if any(low >= high for low, high in zip(lows, highs, strict=True)):
            raise ConfigError(
                f"{key}: a channel has one value at both quantiles, {wanted.low:g} and "
                f"{wanted.high:g}. Choose others."
            )
        self.steps.append(ClipStep(clip=list(zip(lows, highs, strict=True))))
        low, high = _positions(key, wanted, self.load(wanted.levels))
        before = self.clipped or _Clipped(wanted.levels, wanted.of, low, high)
        if (before.url, before.of) != (wanted.levels, wanted.of):
            self.unknown = self.unknown or "clips before it are of other levels"
        self.clipped = _Clipped(before.url, before.of, max(low, before.low), min(high, before.high))

    def _values(self, key: str, wanted: Quantiles) -> tuple[list[float], list[float]]:
        """The values at two quantiles, of each channel, after the steps so far."""
        if any(isinstance(step, PatchStandardStep) for step in self.steps):
            raise ConfigError(f"{key}: its quantiles are not known after a step of each patch")
        if any(scale < 0 for scale in self.scales):
            raise ConfigError(f"{key}: its quantiles are not known after a negative scale")
        low, high = _positions(key, wanted, self.load(wanted.levels))
        channels = self._channels(key, wanted)
        return (
            [self._after_steps(each.values[low], number) for number, each in enumerate(channels)],
            [self._after_steps(each.values[high], number) for number, each in enumerate(channels)],
        )

    def _after_steps(self, value: float, channel: int) -> float:
        for step in self.steps:
            match step:
                case ClipStep():
                    pair = step.clip[channel] if isinstance(step.clip, list) else step.clip
                    value = min(max(value, pair[0]), pair[1])
                case AffineStep():
                    scale = self._each(step.scale)[channel]
                    value = value * scale + self._each(step.offset)[channel]
                case StandardStep():
                    mean = self._each(step.standard.mean)[channel]
                    value = (value - mean) / self._each(step.standard.std)[channel]
        return value

    def _moments(self, key: str, wanted: MomentsFromLevels) -> tuple[list[float], list[float]]:
        """Mean of each channel after the steps so far, and what is divided by."""
        clipped = self.clipped
        unknown = self.unknown
        if clipped is not None and (clipped.url, clipped.of) != (wanted.levels, wanted.of):
            unknown = unknown or "the values were clipped to quantiles of other levels"
        if unknown is not None:
            raise ConfigError(
                f"{key}: mean and standard deviation are not known here, because {unknown}. Clip "
                "to quantiles of the same levels, or write mean and std as numbers."
            )
        means = []
        divisors = []
        for number, channel in enumerate(self._channels(key, wanted)):
            mean = channel.mean
            std = channel.std
            if clipped is not None:
                mean, std = channel.clipped_moments(clipped.low, clipped.high)
            std *= math.sqrt(channel.number / max(1, channel.number - wanted.ddof))
            means.append(mean * self.scales[number] + self.offsets[number])
            divisors.append(wanted.divisor(std * abs(self.scales[number])))
        return means, divisors

    def _channels(self, key: str, wanted: Statistics) -> list[ValueLevels]:
        levels = self.load(wanted.levels)
        if levels.channels is None:
            raise ConfigError(
                f"{key}: {wanted.levels} was made by an earlier version, without levels of each "
                "channel. Make it again: beam-inference levels INPUT --to FILE --overwrite"
            )
        if wanted.of == "nonzero_box" and levels.nonzero is None:
            raise ConfigError(f"{key}: {levels.input} is zero throughout: it has no nonzero_box")
        nonzero = levels.nonzero if wanted.of == "nonzero_box" else None
        channels = levels.channels if nonzero is None else nonzero.channels
        if len(channels) != self.channels:
            raise ConfigError(
                f"{key}: {wanted.levels} holds levels of {len(channels)} channels, and the input "
                f"has {self.channels}: make it again with the same channels (--channel)"
            )
        return channels


def _positions(key: str, wanted: Quantiles, levels: Levels) -> tuple[int, int]:
    """Positions of two quantiles among those of levels."""
    if not {wanted.low, wanted.high} <= set(levels.quantiles) or wanted.low >= wanted.high:
        raise ConfigError(
            f"{key}: low {wanted.low:g} and high {wanted.high:g} must be two of the quantiles that "
            f"{wanted.levels} holds, low < high: "
            f"{', '.join(f'{quantile:g}' for quantile in levels.quantiles)}"
        )
    return levels.quantiles.index(wanted.low), levels.quantiles.index(wanted.high)
